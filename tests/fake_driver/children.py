"""A process that forks a child for each body that it is sent, so that no child costs a start-up of its own.

Run as ``python -m fake_driver.children MODULE ...``: it loads the modules before it forks any child. Each line of its
input has a body, the child's environment and files for what the child writes; the answer is the child's exit code. A
child runs its body as ``python -c`` would, and ends as any Python process does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def serve() -> dict[str, Any] | None:
    """Serves; in a process that was forked for a body, returns what it was sent."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            return asked
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(asked: dict[str, Any]) -> None:
    """Makes this process the child: its output goes to files, and it has nothing to read."""
    for descriptor, path in ((0, os.devnull), (1, asked["output"]), (2, asked["errors"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])


if __name__ == "__main__":
    child = serve()
    if child is not None:
        become(child)
        exec(compile(child["body"], "<string>", "exec"))
