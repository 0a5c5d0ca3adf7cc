"""Options that several commands share, and their output."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import arg

from mosaic.artifact import check_writable, to_json, write_text
from mosaic.cost.precision import PRECISIONS, Dtype
from mosaic.errors import MosaicError
from mosaic.report.figure import picture_format
from mosaic.solver.methods import describe_methods

if TYPE_CHECKING:
    from mosaic.backends.base import Backend

_MODEL = arg(
    metavar="FILE:FACTORY",
    help="The model: a function FACTORY in FILE without arguments that returns (model, sample) or (model, sample, "
    "loss): a module, one batch (dict of keywords, tuple of positions, or tensor), and a function from the model's "
    "output to a scalar. Or one of the zoo's, such as zoo:clip-tiny.",
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Json = Annotated[Path | None, arg(metavar="FILE", help="Also write the result as JSON; - for standard output.")]
Strict = Annotated[bool, arg(help="Fail, instead of marking results, if other processes used over a tenth of the CPU.")]
BackendName = Annotated[
    str | None,
    arg(metavar="NAME", help="The device: host, cuda or cuda:1; by default the model's, or a GPU if present."),
]
Method = Annotated[
    str,
    arg(metavar="METHOD", help=f"Planner: {describe_methods()}. The plan of a named method runs without a trial."),
]
DtypeName = Annotated[
    Dtype | None,
    arg(
        help="With --model: the number format to count in; "
        + "; ".join(f"{name}: {description}" for name, description in PRECISIONS.items())
        + ". By default that of a factory's model; for the zoo's bfloat16 on a GPU and float32 on the host."
    ),
]


def takes_stdout(target: Path | None) -> bool:
    """Returns True if the JSON goes to standard output, which then holds nothing else."""
    return target is not None and str(target) == "-"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Ignores a closed pipe, because files are still to be written."""
        with suppress(SystemExit):
            super().on_broken_pipe()


def console_beside(target: Path | None) -> Console:
    """Returns the console: standard error if standard output holds the JSON, silent with ``--quiet``.

    In a pipe or a file, tables are not wrapped.
    """
    console = _Console(stderr=takes_stdout(target), quiet=logging.getLogger("mosaic").level >= logging.ERROR)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    return console


def check(command: Any) -> None:
    """Refuses torchrun, a missing model file and targets that cannot be written, before anything is loaded."""
    if hasattr(command, "strict") and (size := os.environ.get("WORLD_SIZE") or "1") != "1":
        raise ValueError(f"WORLD_SIZE={size}, but this command measures one process; start it without torchrun")
    path, colon, _ = (getattr(command, "model", None) or "").rpartition(":")
    if colon and path.endswith(".py") and not Path(path).is_file():
        raise MosaicError(f"{path} does not exist; name a Python file")
    for name in ("output", "json", "picture", "export"):
        target = getattr(command, name, None)
        if isinstance(target, Path) and not takes_stdout(target):
            is_folder = name == "output" and not Path(str(type(command).output)).suffix  # by the suffix of its default
            if target.is_file() if is_folder else target.is_dir():
                other = "it is a file; name a folder" if is_folder else "it is a folder; name a file in it"
                raise ValueError(f"cannot write {target}: {other}")
            if name == "picture":
                picture_format(target)
            check_writable(target)


def write_json(value: Any, target: Path | None) -> None:
    """Writes a result, or JSON text, to the target of ``--json``."""
    if target is None:
        return
    text = value if isinstance(value, str) else to_json(value)
    if takes_stdout(target):
        sys.stdout.write(text)
    else:
        write_text(text, target)


def open_named_backend(name: str | None) -> Backend:
    """Opens the backend of ``--backend``; by default the GPU's if there is one, else the host's."""
    from mosaic.backends.table import open_backend, present_backend

    return open_backend(name if name is not None else present_backend())
