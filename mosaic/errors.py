"""Every error that Mosaic raises on purpose, in one small tree.

Wrong arguments raise the built-in ``ValueError`` and ``TypeError``; the classes here are for what a
correct call can still meet. A message has the value found, the rule it broke and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_GRID = 2000
"""Characters up to which a message shows a whole schedule."""


def said_by(error: BaseException) -> str:
    """Returns an error's class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def unknown(kind: str, value: object, known: Iterable[str]) -> str:
    """Returns the sentence for a name that a table does not have."""
    return f"unknown {kind} {value!r}; choose one of: {', '.join(known)}"


class MosaicError(Exception):
    """Base of all errors raised by Mosaic."""


class BackendUnavailableError(MosaicError):
    """A backend that was asked for cannot run here.

    Attributes:
        found: What this machine has.
        needed: What the backend needs.
    """

    def __init__(self, message: str, *, found: str, needed: str) -> None:
        super().__init__(f"{message} (found: {found}; needed: {needed})")
        self.found = found
        self.needed = needed


class CudaError(MosaicError):
    """A call into the CUDA driver failed.

    Attributes:
        call: Name of the driver function.
        status: Name of the driver's status, such as ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, message: str, *, call: str, status: str) -> None:
        super().__init__(message)
        self.call = call
        self.status = status


class InfeasibleError(MosaicError):
    """No plan satisfies the constraints.

    Attributes:
        reasons: One sentence for each thing that cannot be met.
    """

    def __init__(self, message: str, *, reasons: Sequence[str]) -> None:
        super().__init__(message + "".join(f"\n  - {reason}" for reason in reasons))
        self.reasons = tuple(reasons)


class UndecidedError(MosaicError):
    """No plan was found, and it was not proven that there is none: more time may find one."""


class InvalidGraphError(MosaicError):
    """A module graph has a cycle, a missing or a duplicated module."""


class InvalidFileError(MosaicError):
    """A JSON file could not be read: not there, truncated, of a newer schema, or with wrong values."""


class NoRoomError(MosaicError):
    """A disk is full, or has less room than what is about to be written; nothing of it is left half-written."""


class InvalidRecipeError(MosaicError):
    """A recipe of daily retraining is missing, or something in it is wrong; names the line, the rule, the way out."""


class InvalidCheckpointError(MosaicError):
    """A checkpoint is missing, cut short, changed, or of another model or optimizer."""


class InvalidPlanError(MosaicError):
    """A plan contradicts itself, its graph, its profile or the device it should run on."""


class InvalidScheduleError(MosaicError):
    """A schedule contradicts itself, its plan or its graph, or can never end.

    Attributes:
        grid: All of its rows as text, a line for each rank; empty where there is no schedule yet.
        cell: Rank and place in its row of the action at fault; None where it is none of them.
    """

    def __init__(self, message: str, *, grid: str = "", cell: tuple[int, int] | None = None) -> None:
        super().__init__(message + (f"\n{grid}" if 0 < len(grid) <= MAX_GRID else ""))
        self.grid = grid
        self.cell = cell


class InvalidProfileError(MosaicError):
    """A profile contradicts itself, or belongs to another model or device."""


class UnstableMeasurementError(MosaicError):
    """The machine was too busy to measure, or had too little memory left; the message says which and what to do."""


class UnsupportedModelError(MosaicError):
    """The model cannot be colocated as it stands; the message names the module and the way out."""


class RankFailedError(MosaicError):
    """The other ranks of a run are needed and one is not there, or they cannot go on together.

    Attributes:
        ranks: Those at fault; empty if it is none of them.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ModuleContractError(MosaicError):
    """Something that a placed module reads was written to before its lane had finished with it."""


class UnforeseenError(ModuleContractError):
    """A placed module did something that its first call had ruled out, such as another output shape.

    Within a call of the whole model nobody sees it: the call is made again, with the module run in place.
    """


class UnsplittableError(MosaicError):
    """A model cannot be cut between its layers; the message names the module, the line where known, and the way out."""
