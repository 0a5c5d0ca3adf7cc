"""The errors of correct calls; wrong arguments raise ``ValueError`` and ``TypeError``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def said_by(error: BaseException) -> str:
    """Returns an error's class and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def unknown(kind: str, value: object, choices: Iterable[str]) -> str:
    """Returns the message for a name that is not in a table."""
    return f"unknown {kind} {value!r}; choose one of: {', '.join(choices)}"


class MosaicError(Exception):
    """Base of all errors raised by Mosaic."""


class BackendUnavailableError(MosaicError):
    """A backend cannot run: what this machine has (``found``), and what the backend needs (``needed``)."""

    def __init__(self, message: str, *, found: str, needed: str) -> None:
        super().__init__(f"{message} (found: {found}; needed: {needed})")
        self.found, self.needed = found, needed


class CudaError(MosaicError):
    """A driver function (``call``) failed with a ``status`` such as ``CUDA_ERROR_INVALID_VALUE``."""

    def __init__(self, message: str, *, call: str, status: str) -> None:
        super().__init__(message)
        self.call, self.status = call, status


class InfeasibleError(MosaicError):
    """No plan satisfies the constraints; ``reasons`` has one sentence per violated constraint."""

    def __init__(self, message: str, *, reasons: Sequence[str]) -> None:
        super().__init__(message + "".join(f"\n  - {reason}" for reason in reasons))
        self.reasons = tuple(reasons)


class UndecidedError(MosaicError):
    """No plan was found, and it is not proven that none exists: a longer search may find one."""


class InvalidFileError(MosaicError):
    """A file cannot be read: missing, truncated, of another schema, or with invalid values."""


class NoRoomError(MosaicError):
    """A disk is full; no file is incomplete."""


class InvalidRecipeError(MosaicError):
    """A recipe of daily retraining is missing or invalid; has the key, the rule and the remedy."""


class InvalidCheckpointError(MosaicError):
    """A checkpoint is missing, truncated, changed, or of another model or optimizer."""


class InvalidPlanError(MosaicError):
    """A plan is inconsistent, or contradicts its graph, profile or device."""


class InvalidScheduleError(MosaicError):
    """A schedule is inconsistent, contradicts its plan or graph, or deadlocks; ``grid`` has the rows of a short one."""

    def __init__(self, message: str, *, grid: str = "") -> None:
        super().__init__(message + (f"\n{grid}" if 0 < len(grid) <= 2000 else ""))


class InvalidProfileError(MosaicError):
    """A profile is inconsistent, or for another model or device."""


class UnstableMeasurementError(MosaicError):
    """The machine was too busy to measure, or had too little memory; has the remedy."""


class UnsupportedModelError(MosaicError):
    """The model cannot be colocated; has the module and the remedy."""


class RankFailedError(MosaicError):
    """Ranks of a run have failed or cannot continue together; ``ranks`` are those at fault, if any."""

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ModuleContractError(MosaicError):
    """A value that a placed module reads was written to before its lane had ended."""


class UnforeseenError(ModuleContractError):
    """A placed module did something unlike its first call, and the call cannot be repeated in place."""


class UnsplittableError(MosaicError):
    """A model cannot be cut between its layers; has the module, if possible the line, and the remedy."""
