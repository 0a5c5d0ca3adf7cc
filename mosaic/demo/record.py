"""The demo's record: one JSON file with everything that it measured and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mosaic.device import FORBID_EXTRA, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run of the demo. Times and shares are measured unless a name says predicted."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    command: str
    """The command line."""
    created: str
    """Date and time, ISO 8601, UTC."""
    commit: str
    """Commit of the code; empty outside of a clone."""
    mosaic_version: str
    """Version of Mosaic."""
    torch_version: str
    """Version of torch."""
    python_version: str
    """Version of Python."""
    machine: Device
    """Where it ran."""
    seed: int
    """Of model, batches and dropout."""
    bitwise_equal: bool
    """Whether plain and colocated training had equal losses and equal parameters, bit for bit, at one thread each."""
    max_abs_difference: float
    """Largest difference between their parameters."""
    equality_steps: int
    """Steps of that comparison."""
    equality_overlap: float
    """Overlap of the colocated run in that comparison; above 0, or the comparison would prove nothing."""
    equality_of_timed_plan: bool | None = None
    """Whether that run had the plan whose steps were timed; False where that one has no modules side by side."""
    retrieval: dict[str, float]
    """R@1 by direction on held-out strings, voices and handwriting, after training colocated."""
    retrieval_plain: dict[str, float]
    """The same for the plain loop, which trained as many steps on the same batches with other thread counts."""
    chance: float
    """R@1 of guessing."""
    train_steps: int
    """Steps that each of the two took."""
    step_ms_plain: float
    """Median step of the plain loop at its best: a process of its own, all cores, torch's own threads and waiting."""
    step_ms_colocated: float
    """Median step of the colocated loop."""
    speedup: float
    """Median over rounds of plain over colocated, rounds taken in turn (A B A B)."""
    round_speedups: tuple[float, ...]
    """The same ratio, round by round."""
    step_times_ms_plain: tuple[float, ...]
    """Every step of the plain loop that was measured."""
    step_times_ms_colocated: tuple[float, ...]
    """Every step of the colocated loop that was measured."""
    predicted_ms_plain: float | None = None
    """Predicted: the modules one after the other, each at its best; loss and optimizer not counted."""
    predicted_ms_colocated: float | None = None
    """Predicted: the modules by the plan; loss and optimizer not counted."""
    predicted_speedup: float
    """Predicted: the first of these over the second."""
    colocated: bool
    """Whether the solved plan ran on lanes; False where its predicted gain was too small and the loop ran as it was."""
    overlap: float
    """Share of lane time with another lane busy, while training."""
    foreign_cpu_share: float | None
    """Share of the machine's CPU time that other processes took while steps were timed; None where unknown."""
    notes: tuple[str, ...]
    """What to know when reading the numbers."""
