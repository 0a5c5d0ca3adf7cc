"""Processes that answer requests, one line of JSON each, for plain loops that Mosaic is compared with.

Mosaic's process has OpenMP's threads wait passively, which its lanes need. A plain loop is faster with torch's own way
of waiting on a quiet machine, and with the passive one where others use the CPU. A plain loop therefore runs in two
children, one of each way, and the faster one counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from mosaic.errors import MosaicError

WAITING = ("in torch's own way", "passively")
"""Waiting policies of the two plain loops' threads."""


class Child:
    """An object in a process of its own, which ends with its block."""

    def __init__(self, factory: str, argument: str, *, passive: bool = False) -> None:
        """Starts the process, in which ``factory`` (``MODULE:FUNCTION``) makes the object from ``argument``.

        With ``passive``, OpenMP's threads wait passively, instead of in torch's own way.
        """
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        if passive:
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mosaic.child", factory, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # an interrupt is for the caller, who ends this process
        )
        self.pid = self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the object, with plain data for JSON; MosaicError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise MosaicError(f"the plain loop's process ended with exit code {code}; see its error above")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if error is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def plain_loops(factory: str, argument: str) -> Iterator[dict[str, Callable[..., Any]]]:
    """Yields how to call a plain loop in each of two processes, by their threads' way of waiting."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Child(factory, argument, passive=name == WAITING[1])).call for name in WAITING}


def _serve(factory: str, argument: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # output of a user's model is not an answer
    module, _, function = factory.partition(":")
    target = getattr(importlib.import_module(module), function)(argument)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(target, method)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
