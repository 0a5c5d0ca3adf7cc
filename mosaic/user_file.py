"""Functions of a user's own file, written ``FILE:NAME``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from mosaic.errors import MosaicError


def import_file(path: Path) -> Any:
    """Runs a Python file as a module of its name; what lies beside it can be imported from it.

    Raises:
        MosaicError: There is no such file, or it raises.
    """
    if not path.is_file():
        raise MosaicError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MosaicError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be pickled
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MosaicError(f"importing {path} raised {type(error).__name__}: {error}") from error
    return module
