"""The recipe, ``retrain.toml``: the model's functions, its data, its budget, and its gate.

Only the four functions and the data folders have no default. A recipe is checked completely before anything runs; an
error names the line, the rule and the way out.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from mosaic.artifact import Ge, Le, StrictFile, parse, read
from mosaic.errors import InvalidFileError, InvalidRecipeError
from mosaic.retrain.data_check import DataCheckSettings
from mosaic.retrain.gate import GateSettings

RECIPE = "retrain.toml"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _seconds(text: object) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", str(text))
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is no time above 0; write it as '90s', '5min' or '2h'")
    return float(match[1]) * _UNITS[match[2]]


def _clock_time(text: object) -> time:
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)Z", str(text))
    if match is None:
        raise ValueError(f"{text!r} is no UTC time of day; write it as '05:30Z'")
    return time(int(match[1]), int(match[2]), tzinfo=UTC)


def _function(text: object) -> object:
    if not re.fullmatch(r"[^:]+:\w+", str(text)):
        raise ValueError(f"{text!r} is not FILE:NAME; write it as 'train.py:make_model'")
    return text


Seconds = Annotated[float, BeforeValidator(_seconds)]
"""A time such as ``90s``, ``5min`` or ``2h``, in seconds."""
ClockTime = Annotated[time, BeforeValidator(_clock_time)]
"""A UTC time of day such as ``05:30Z``; local times occur twice or never in some nights."""
Function = Annotated[str, BeforeValidator(_function)]
"""A function of the user's file, ``FILE:NAME``; the file is relative to the recipe's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData(StrictFile):
    path: str
    """Folder of a day, relative to the recipe's; ``{day}`` stands for its date, as in ``data/{day}``."""
    ready: str = "_SUCCESS"
    """The last file of a folder: a folder without it is ignored."""

    def __post_init__(self) -> None:
        if self.path.count("{day}") != 1:
            raise ValueError(f"path={self.path!r} needs {{day}} once, where the date stands, as in 'data/{{day}}'")
        if Path(self.path).is_absolute() or ".." in Path(self.path).parts:
            raise ValueError(
                f"path={self.path!r} leaves the recipe's folder; link the data into it (ln -s /where/it/is data), and "
                "write 'data/{day}'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(StrictFile):
    share: Annotated[float, Ge(0), Le(0.9)] = 0.3
    """Part of the samples; every replayed row comes equally often."""
    days: Annotated[int, Ge(0)] = 60
    """Number of promoted days, the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources(StrictFile):
    new: NewData
    replay: Replay = field(default_factory=Replay)
    frozen: str
    """Folder of the rows that compare champion and challenger; never trained on."""
    fresh_share: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Part of a day's rows (whole clusters), held out of training for the comparison on fresh rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(StrictFile):
    """The ``[budget]`` table of a recipe: what a day trains with."""

    batch: Annotated[int, Ge(1), Le(2**24)]
    """Samples of a step, over all ranks and micro-batches."""
    micro_batches: Annotated[int, Ge(1)] = 1
    """Micro-batches of a batch; a rank runs its share one after the other."""
    steps: Annotated[int, Ge(1)] | None = None
    """Steps of a day; None: as many as draw each new row once."""
    after: ClockTime | None = None
    """Earliest UTC time of day to start, such as ``01:00Z``; None: at any time until ``until``."""
    until: ClockTime | None = None
    """UTC time of day to release the device, such as ``05:30Z``; None: no limit."""
    judging: Seconds = 600.0
    """Time before ``until`` for the comparison with the champion."""
    save: Seconds = 300.0
    """Time between checkpoints."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints to keep."""
    workers: Annotated[int, Ge(0)] = 2
    """Processes that read samples, for each rank."""
    ranks: Annotated[int, Ge(1)] = 1
    """Processes that train, a device each; started by torchrun on this machine."""
    colocate: bool = True
    """Let Mosaic run the modules side by side."""
    exclude: tuple[str, ...] = ()
    """Names or patterns of modules that stay where they are called."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all random numbers."""

    def __post_init__(self) -> None:
        parts = -(-self.micro_batches // self.ranks) * self.ranks
        if self.batch < parts:
            raise ValueError(
                f"batch={self.batch} is cut into {parts} micro-batches on {self.ranks} ranks; take a batch of {parts} "
                "or more, or fewer ranks or micro-batches"
            )
        if self.after is not None and self.until is None:
            raise ValueError(f"after = {self.after:%H:%MZ} opens a window that nothing closes; set until")

    def deadline(self, now: datetime) -> datetime | None:
        """Returns the time at which a run that begins now must release the device; None for none."""
        return None if self.until is None else _next(now, self.until)

    def opens(self, now: datetime) -> datetime | None:
        """Returns the opening of the window; None if it is open."""
        if self.after is None or self.until is None:
            return None
        opening, closing = _next(now, self.after), _next(now, self.until)
        return opening if opening < closing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote(StrictFile):
    hooks: tuple[str, ...] = ()
    """Commands, run in the recipe's folder with ``MOSAIC_VERSION``, ``MOSAIC_VERSION_FOLDER`` and
    ``MOSAIC_DAY_FOLDER`` set. A hook may run twice for a version; after a failure the next run tries again."""
    timeout: Seconds = 600.0
    """Time limit of a command."""
    tries: Annotated[int, Ge(1)] = 20
    """Most attempts of a command; then the report has a line."""
    keep_versions: Annotated[int, Ge(2)] = 60
    """Versions to keep on disk; champion, anchor and the previous champion always stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(StrictFile):
    """``retrain.toml``."""

    model: Function
    """``make_model() -> nn.Module``."""
    data: Function
    """``make_dataset(folder: Path, train: bool) -> Dataset``, map-style."""
    loss: Function
    """``loss(model, batch) -> Tensor``, a mean over the rows."""
    score: Function
    """``score(model, batch) -> dict``: a value for each row, larger is better, and its cluster, label and slices."""
    optimizer: Function | None = None
    """``make_optimizer(model, num_steps)``: one, several, or (optimizers, schedulers). None: AdamW, warmed up and
    decayed once a day."""
    companions: Function | None = None
    """``make_companions(model) -> dict[str, nn.Module]``: EMA models of the model."""
    update_companions: Function | None = None
    """``update(model, companions)``, called after each step."""
    export: str | None = None
    """Name of the companion to judge and promote instead of the model."""
    collate: Function | None = None
    """``collate(samples) -> batch``; torch's default otherwise."""
    scaler: Function | None = None
    """``make_scaler() -> torch.amp.GradScaler``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: the GPU if there is one."""
    sources: Sources
    budget: Budget
    gate: GateSettings = field(default_factory=GateSettings)
    check: DataCheckSettings = field(default_factory=DataCheckSettings)
    promote: Promote = field(default_factory=Promote)

    @property
    def program(self) -> str:
        return self.model.partition(":")[0]

    def __post_init__(self) -> None:
        if self.export is not None and self.companions is None:
            raise ValueError(f"export={self.export!r} names a companion, and there is no 'companions'")


def read_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe; raises InvalidRecipeError that names the line, the rule and the way out."""
    try:
        tables = tomllib.loads(read(path).decode())
        return parse(Recipe, json.dumps(tables, default=str), source=str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRecipeError(f"{path}: not valid TOML: {error}") from error
    except InvalidFileError as error:
        remedy = "; docs/retraining.md lists the keys" if "Unexpected keyword" in str(error) else ""
        remedy = remedy if path.is_file() else "; make a folder with a recipe by `mosaic retrain init FOLDER`"
        raise InvalidRecipeError(f"{error}{remedy}") from error


def _next(now: datetime, at: time) -> datetime:
    today = datetime.combine(now.astimezone(UTC).date(), at)
    return today if today > now else today + timedelta(days=1)
