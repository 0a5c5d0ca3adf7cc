"""The command ``mosaic``, also as ``python -m mosaic``."""

import sys

from mosaic.cli.main import run as main

if __name__ == "__main__":
    sys.exit(main())
