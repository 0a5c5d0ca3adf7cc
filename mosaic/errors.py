"""The errors of correct calls; wrong arguments raise ``ValueError`` and ``TypeError``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def said_by(error: BaseException) -> str:
    """Returns an error's class and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def unknown(kind: str, value: object, choices: Iterable[str]) -> str:
    """Returns the sentence for a name that a table does not have."""
    return f"unknown {kind} {value!r}; choose one of: {', '.join(choices)}"


class MosaicError(Exception):
    """Base of all errors raised by Mosaic."""


class BackendUnavailableError(MosaicError):
    """A backend cannot run here: what this machine has (``found``), and what the backend needs (``needed``)."""

    def __init__(self, message: str, *, found: str, needed: str) -> None:
        super().__init__(f"{message} (found: {found}; needed: {needed})")
        self.found, self.needed = found, needed


class CudaError(MosaicError):
    """A driver function (``call``) failed with a ``status`` such as ``CUDA_ERROR_INVALID_VALUE``."""

    def __init__(self, message: str, *, call: str, status: str) -> None:
        super().__init__(message)
        self.call, self.status = call, status


class InfeasibleError(MosaicError):
    """No plan satisfies the constraints; ``reasons`` has one sentence for each that cannot be met."""

    def __init__(self, message: str, *, reasons: Sequence[str]) -> None:
        super().__init__(message + "".join(f"\n  - {reason}" for reason in reasons))
        self.reasons = tuple(reasons)


class UndecidedError(MosaicError):
    """No plan was found, and it was not proven that none exists: more time may find one."""


class InvalidFileError(MosaicError):
    """A file could not be read: missing, truncated, of another schema, or with wrong values."""


class NoRoomError(MosaicError):
    """A disk is full; nothing is left half-written."""


class InvalidRecipeError(MosaicError):
    """A recipe of daily retraining is missing or invalid; names the key, the rule and the way out."""


class InvalidCheckpointError(MosaicError):
    """A checkpoint is missing, cut short, changed, or of another model or optimizer."""


class InvalidPlanError(MosaicError):
    """A plan contradicts itself, its graph, its profile or the device it should run on."""


class InvalidScheduleError(MosaicError):
    """A schedule contradicts itself, its plan or its graph, or can never end; shows a short one's rows (``grid``)."""

    def __init__(self, message: str, *, grid: str = "") -> None:
        super().__init__(message + (f"\n{grid}" if 0 < len(grid) <= 2000 else ""))


class InvalidProfileError(MosaicError):
    """A profile contradicts itself, or belongs to another model or device."""


class UnstableMeasurementError(MosaicError):
    """The machine was too busy to measure, or had too little memory left; names the remedy."""


class UnsupportedModelError(MosaicError):
    """The model cannot be colocated as it stands; names the module and the way out."""


class RankFailedError(MosaicError):
    """Ranks of a run have failed or cannot go on together; ``ranks`` are those at fault, if any."""

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ModuleContractError(MosaicError):
    """Something that a placed module reads was written to before its lane had finished with it."""


class UnforeseenError(ModuleContractError):
    """A placed module did something that its first call had ruled out, and the call cannot be made again in place."""


class UnsplittableError(MosaicError):
    """A model cannot be cut between its layers; names the module, the line if possible, and the way out."""
