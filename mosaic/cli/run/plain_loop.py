"""A user's plain loop in a process of its own, for ``mosaic run``; see ``mosaic.child``."""

from __future__ import annotations

import json
import sys

from mosaic.cli.workload import Loop, load_workload


def main(where: str) -> None:
    """Reads numbers of steps from standard input; takes each and prints the times in milliseconds."""
    loop = Loop(load_workload(where))
    answers, sys.stdout = sys.stdout, sys.stderr  # output of the model is not a result
    for line in sys.stdin:
        print(json.dumps(loop.steps(json.loads(line)["steps"])), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
