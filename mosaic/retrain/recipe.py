"""The recipe, ``retrain.toml``: which functions make and train the model, on which data, when, and what is good enough.

Everything that it says has a default but the four functions and where the data is. A recipe is checked whole before
anything runs; a wrong one is told by line, rule and way out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Annotated

from mosaic.artifact import Ge, Le, parse_toml
from mosaic.errors import InvalidFileError, InvalidRecipeError
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.intake.data_check import DataCheckSettings

RECIPE = "retrain.toml"
"""Name of the recipe in its folder."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData:
    """Where a day's data arrives."""

    path: str
    """Folder of a day, relative to the recipe's; ``{day}`` stands for its date, as in ``data/{day}``."""
    ready: str = "_SUCCESS"
    """A file that is put into the folder last: without it the folder is not looked at."""

    def __post_init__(self) -> None:
        if self.path.count("{day}") != 1:
            raise ValueError(f"path={self.path!r} needs {{day}} once, where the date stands, as in 'data/{{day}}'")
        if Path(self.path).is_absolute() or ".." in Path(self.path).parts:
            raise ValueError(
                f"path={self.path!r} leaves the recipe's folder; link the data into it (ln -s /where/it/is data), and "
                "write 'data/{day}'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How much of earlier days is trained on again."""

    share: Annotated[float, Ge(0), Le(0.9)] = 0.3
    """Of the samples; the same for each of the days that are replayed, however many rows they have."""
    days: Annotated[int, Ge(0)] = 60
    """How many promoted days, the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The data."""

    new: NewData
    """What arrives each day."""
    replay: Replay = field(default_factory=Replay)
    """What is trained on again."""
    frozen: str
    """Folder of the rows that champion and challenger are compared on; never trained on."""
    fresh_share: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Part of a day's rows (whole clusters) that is held out of training for the comparison on fresh rows."""
    exact: bool = True
    """Whether an iterable data set must be able to go on from a state; otherwise what was drawn is drawn again."""
    max_unreadable: Annotated[float, Ge(0), Le(1)] = 0.01
    """Part of the samples that may draw an unreadable row before the training fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is trained, and until when."""

    batch: Annotated[int, Ge(1)]
    """Samples of a step, over all ranks and micro-batches."""
    micro_batches: Annotated[int, Ge(1)] = 1
    """Into how many the batch is cut; a rank goes through its share of them one after the other."""
    clip_norm: Annotated[float, Ge(0)] | None = None
    """Norm that gradients are scaled down to; None for no limit."""
    passes: float = 1.0
    """How often each new row is drawn in a day; ``steps`` says it otherwise."""
    steps: Annotated[int, Ge(1)] | None = None
    """Steps of a day; None: as many as the passes need."""
    after: str | None = None
    """UTC time of day before which nothing begins, such as ``01:00Z``; None: at any time until ``until``."""
    until: str | None = None
    """UTC time of day at which the device is no longer ours, such as ``05:30Z``; None: as long as it takes."""
    judging: str = "10min"
    """Kept free before ``until`` for the comparison with the champion."""
    save: str = "5min"
    """Time between checkpoints."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints that stay."""
    workers: Annotated[int, Ge(0)] = 2
    """Processes that read samples, for each rank."""
    ranks: Annotated[int, Ge(1)] = 1
    """Processes that train, a device each; started by torchrun on this machine."""
    ranks_exact: bool = False
    """Whether other numbers of ranks have to give the same bits; costs bandwidth, and nothing is colocated then."""
    pipeline: bool = False
    """Whether the model's layers are divided over the ranks, which train and score it in a pipeline: for a model whose
    gradients and optimizer's state do not fit one device. ``micro_batches`` are what passes through."""
    memory_gb: Annotated[float, Ge(0)] | None = None
    """Of a rank's device, with ``pipeline``; layers that would not fit are recomputed. None: what a GPU has."""
    colocate: bool = True
    """Whether Mosaic may run the modules side by side."""
    exclude: tuple[str, ...] = ()
    """Names or patterns of modules that are left where they are called."""
    restarts: Annotated[int, Ge(0)] = 5
    """How often a run starts training that died again by itself; two starts in a row that come no further end it."""
    fresh_start_every: Annotated[int, Ge(0)] = 0
    """Begin from new weights after so many promoted days; 0: always from the champion's."""
    seed: Annotated[int, Ge(0)] = 0
    """Of everything that is drawn."""

    def __post_init__(self) -> None:
        if not self.passes > 0:
            raise ValueError(f"passes={self.passes}; draw each row more than 0 times")
        if self.batch < max(self.micro_batches, self.ranks):
            raise ValueError(
                f"batch={self.batch} has less than a row for each of micro_batches={self.micro_batches} or "
                f"ranks={self.ranks}; take a larger batch, or fewer of them"
            )
        self._check_pipeline()
        if self.after is not None and self.until is None:
            raise ValueError(f"after={self.after!r} opens a window that nothing closes; set until, such as '05:30Z'")
        for name in ("save", "judging"):
            seconds_of(getattr(self, name), name)
        for name in ("after", "until"):
            if (value := getattr(self, name)) is not None:
                clock_time(value, name)

    def _check_pipeline(self) -> None:
        """Raises ValueError where keys do not fit ``pipeline``."""
        if not self.pipeline:
            if self.memory_gb is not None:
                raise ValueError(
                    f"memory_gb={self.memory_gb:g} is for a pipeline; set pipeline = true, or leave it out"
                )
            return
        if self.ranks == 1:
            raise ValueError("pipeline = true divides layers over ranks, and ranks=1; set it to the number of devices")
        if self.ranks_exact:
            raise ValueError("pipeline = true gives other bits on other ranks; leave ranks_exact out")
        if self.exclude:
            raise ValueError("exclude is for modules that run side by side; leave it out with pipeline = true")
        if self.micro_batches < self.ranks or self.batch % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} pass through {self.ranks} ranks; take a number that is not less "
                f"and that divides batch={self.batch}, best {4 * self.ranks} or more"
            )

    def deadline(self, now: datetime) -> datetime | None:
        """Returns when a run that begins now has to give the device back; None for never."""
        return None if self.until is None else _next(now, clock_time(self.until, "until"))

    def opens(self, now: datetime) -> datetime | None:
        """Returns when the window opens; None where it is open."""
        if self.after is None or self.until is None:
            return None
        opening, closing = _next(now, clock_time(self.after, "after")), _next(now, clock_time(self.until, "until"))
        return opening if opening < closing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """What happens once a challenger is the champion."""

    hooks: tuple[str, ...] = ()
    """Commands, run in the recipe's folder with ``MOSAIC_VERSION``, ``MOSAIC_VERSION_FOLDER`` and
    ``MOSAIC_DAY_FOLDER`` set. One may be run twice for a version; where it fails nothing is lost, and the next run
    tries again."""
    timeout: str = "10min"
    """After which the command is ended."""
    tries: Annotated[int, Ge(1)] = 20
    """Runs after which it is given up, with a line in the report."""
    keep_versions: Annotated[int, Ge(2)] = 60
    """Versions that stay on the disk; champion, anchor and the one before are never removed."""

    def __post_init__(self) -> None:
        seconds_of(self.timeout, "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``retrain.toml``; functions are written ``FILE:NAME``, the file relative to the recipe's folder."""

    model: str
    """``make_model() -> nn.Module``."""
    data: str
    """``make_dataset(folder: Path, train: bool) -> Dataset``, map-style."""
    loss: str
    """``loss(model, batch) -> Tensor``, a mean over the rows."""
    score: str
    """``score(model, batch) -> dict``: a value for each row, larger is better, and its cluster, label and slices."""
    optimizer: str | None = None
    """``make_optimizer(model, num_steps)``: one, several, or (optimizers, schedulers). None: AdamW, warmed up and
    decayed once a day."""
    companions: str | None = None
    """``make_companions(model) -> dict[str, nn.Module]``: kept beside the model, such as an average of its weights."""
    update_companions: str | None = None
    """``update(model, companions)``, called after each step."""
    export: str | None = None
    """Name of the companion that is judged and promoted in the model's place."""
    collate: str | None = None
    """``collate(samples) -> batch``; torch's default otherwise."""
    scaler: str | None = None
    """``make_scaler() -> torch.amp.GradScaler``."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if there is one."""
    sources: Sources
    """The data."""
    budget: Budget
    """How much is trained, and until when."""
    gate: GateSettings = field(default_factory=GateSettings)
    """What is good enough."""
    check: DataCheckSettings = field(default_factory=DataCheckSettings)
    """What is remarkable in a day's data."""
    promote: Promote = field(default_factory=Promote)
    """What happens to a new champion."""

    def __post_init__(self) -> None:
        functions = ("model", "data", "loss", "score", "optimizer", "companions", "update_companions", "collate")
        for name in (*functions, "scaler"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^:]+:\w+", value):
                raise ValueError(f"{name}={value!r} is not FILE:NAME; write it as 'train.py:{name}'")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}; use auto, cpu or cuda")
        if self.export is not None and self.companions is None:
            raise ValueError(f"export={self.export!r} names a companion, and there is no 'companions'")
        if self.budget.ranks_exact and self.budget.batch % self.budget.micro_batches:
            raise ValueError(
                "ranks_exact needs a batch that micro_batches divides: the same cut on any number of ranks"
            )


def read_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    Raises:
        InvalidRecipeError: It is missing, or something in it is wrong; names the line, the rule and the way out.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRecipeError(
            f"cannot read {path}: {error.strerror}; make a folder with a recipe by `mosaic retrain init FOLDER`"
        ) from error
    try:
        return parse_toml(Recipe, text, source=str(path))
    except InvalidFileError as error:
        raise InvalidRecipeError(str(error)) from error


def seconds_of(text: str, name: str) -> float:
    """Returns the seconds of a time such as ``90s``, ``5min`` or ``2h``.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{name}={text!r} is no time above 0; write it as '90s', '5min' or '2h'")
    return float(found[1]) * _UNITS[found[2]]


def clock_time(text: str, name: str) -> time:
    """Returns a UTC time of day such as ``05:30Z``; local times would come twice or never in some nights.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)Z", text)
    if found is None:
        raise ValueError(f"{name}={text!r} is no UTC time of day; write it as '05:30Z'")
    return time(int(found[1]), int(found[2]), tzinfo=UTC)


def _next(now: datetime, at: time) -> datetime:
    today = datetime.combine(now.astimezone(UTC).date(), at)
    return today if today > now else today + timedelta(days=1)
