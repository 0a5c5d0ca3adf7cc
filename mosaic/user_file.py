"""Functions of a user's own file, written ``FILE:NAME``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mosaic.errors import MosaicError


def import_file(path: Path) -> Any:
    """Runs a Python file as a module of its name; it can import files beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise MosaicError(f"{path} does not exist; name a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # makes its classes picklable
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        raise MosaicError(f"importing {path} raised {type(error).__name__}: {error}") from error
    return module


def import_function(where: str, *, otherwise: str) -> Callable[..., Any]:
    """Returns the function of ``FILE:FUNCTION``; ``otherwise`` is the alternative in the error message."""
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"{where!r} is not FILE:FUNCTION; write it as train.py:make, or {otherwise}")
    function: Callable[..., Any] | None = getattr(import_file(Path(path)), name, None)
    if not callable(function):
        raise MosaicError(f"{path} has no function {name!r}; define it, or name another one")
    return function
