"""Where in the user's code the program is."""

from __future__ import annotations

import sys


def caller() -> str:
    """Returns file, line and function of the user's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("mosaic.engine", "mosaic.ranks", "torch.")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
