"""A process that answers one JSON request a line, with torch's own way of waiting for threads.

Mosaic's process has OpenMP wait passively, which its lanes need and which slows a plain loop down by half and more. A
plain loop that Mosaic is compared with therefore runs in a child, where it is at its best.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from mosaic.errors import MosaicError


class Child:
    """The caller's side: asks, and ends the process on leaving its block."""

    def __init__(self, module: str, argument: str) -> None:
        """Starts ``python -m module argument``, which reads requests and prints answers, each one line of JSON."""
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # an interrupt is for the caller, who ends this process
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request and waits for the answer.

        Raises:
            MosaicError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise MosaicError(f"the plain loop's process ended with exit code {code}; see its error above")
        return json.loads(answer)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if error is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
