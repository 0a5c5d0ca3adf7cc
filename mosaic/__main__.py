"""The command ``mosaic``, also as ``python -m mosaic``."""

import sys


def main() -> None:
    from mosaic.cli.main import run  # here, since processes that a command starts import this file again

    sys.exit(run())


if __name__ == "__main__":
    main()
