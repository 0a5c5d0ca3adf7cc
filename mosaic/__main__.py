"""The command ``mosaic``, also as ``python -m mosaic``; an interrupt during its imports shows no traceback."""

from __future__ import annotations

import os
import sys


def main() -> None:
    if sys.argv[1:2] != ["doctor"]:  # which says what the user's own scripts meet
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a hardware queue a lane; CUDA reads it once
    try:
        from mosaic.cli.main import run

        code = run()
    except KeyboardInterrupt:
        print("mosaic: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
