"""The extension ``mosaic._search``: planning's hot loops."""

from __future__ import annotations

from typing import Any

from mosaic.errors import BackendUnavailableError


def load_search() -> Any:  # a module, which is no type
    """Returns the extension; raises BackendUnavailableError if it is not built."""
    try:
        from mosaic import _search
    except ImportError as error:
        raise BackendUnavailableError(
            "the extension mosaic._search does not load; build it with `pip install -e .` or `pip install .`",
            found=str(error),
            needed="g++ with C++17 and Python's headers",
        ) from error
    return _search
