"""The command ``mosaic``, also as ``python -m mosaic``; an interrupt during its imports shows no traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    try:
        from mosaic.cli.main import run

        code = run()
    except KeyboardInterrupt:
        print("mosaic: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
