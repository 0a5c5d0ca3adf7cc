"""Processes that answer requests, one line of JSON each, for plain loops that Mosaic is compared with.

Mosaic's process has OpenMP's threads wait passively, which its lanes need. A plain loop is faster with torch's own way
of waiting on a quiet machine, and with the passive one where others use the CPU. It runs in both; the faster counts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from mosaic.errors import MosaicError

WAITING = {"in torch's own way": {}, "passively": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Waiting policies of the two plain loops' threads, with the variables that set them."""


@contextmanager
def child(factory: str, argument: str, waiting: str) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls methods of an object in a process of its own, which ends with the block.

    ``factory`` (``MODULE:FUNCTION``) makes the object from ``argument``. Methods take and return plain data for JSON.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    with subprocess.Popen(
        [sys.executable, "-m", "mosaic.child", factory, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | WAITING[waiting],
        start_new_session=True,  # an interrupt is for the caller, who ends this process
    ) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def call(method: str, *arguments: Any) -> Any:
            with suppress(BrokenPipeError):
                print(json.dumps([method, *arguments]), file=requests, flush=True)
            if not (answer := answers.readline()):
                code = process.wait()
                raise MosaicError(f"the plain loop's process ended with exit code {code}; see its error above")
            return json.loads(answer)

        try:
            yield call
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):  # what a dead process has not read
                requests.close()


@contextmanager
def plain_loops(factory: str, argument: str) -> Iterator[dict[str, Callable[..., Any]]]:
    """Yields a ``child``'s function for each waiting policy."""
    with ExitStack() as stack:
        yield {waiting: stack.enter_context(child(factory, argument, waiting)) for waiting in WAITING}


def _serve(factory: str, argument: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # output of a user's model is not an answer
    module, _, function = factory.partition(":")
    target = getattr(importlib.import_module(module), function)(argument)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(target, method)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
