"""The recipe, ``retrain.toml``: the model's functions, its data, its budget, and its gate.

Only the four functions and the data folders have no default. A recipe is checked completely before anything runs; an
error names the line, the rule and the way out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, Le, parse_toml
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidFileError, InvalidRecipeError
from mosaic.retrain.data_check import DataCheckSettings
from mosaic.retrain.gate import GateSettings
from mosaic.train.budget import Budget, seconds_of

RECIPE = "retrain.toml"
"""Name of the recipe in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData:
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

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
class Replay:
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    share: Annotated[float, Ge(0), Le(0.9)] = 0.3
    """Part of the samples; every replayed row comes equally often."""
    days: Annotated[int, Ge(0)] = 60
    """Number of promoted days, the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    new: NewData
    """New data of each day."""
    replay: Replay = field(default_factory=Replay)
    """Earlier data."""
    frozen: str
    """Folder of the rows that compare champion and challenger; never trained on."""
    fresh_share: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Part of a day's rows (whole clusters), held out of training for the comparison on fresh rows."""
    exact: bool = True
    """Refuse an iterable data set without a state; false draws samples again instead."""
    max_unreadable: Annotated[float, Ge(0), Le(1)] = 0.01
    """Part of the samples that may draw an unreadable row before the training fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    hooks: tuple[str, ...] = ()
    """Commands, run in the recipe's folder with ``MOSAIC_VERSION``, ``MOSAIC_VERSION_FOLDER`` and
    ``MOSAIC_DAY_FOLDER`` set. A hook may run twice for a version; after a failure the next run tries again."""
    timeout: str = "10min"
    """Time limit of a command."""
    tries: Annotated[int, Ge(1)] = 20
    """Most attempts of a command; then the report has a line."""
    keep_versions: Annotated[int, Ge(2)] = 60
    """Versions to keep on disk; champion, anchor and the previous champion always stay."""

    def __post_init__(self) -> None:
        _ = self.timeout_s

    @property
    def timeout_s(self) -> float:
        return seconds_of(self.timeout, "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``retrain.toml``; functions are written ``FILE:NAME``, the file relative to the recipe's folder."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

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
    """``make_companions(model) -> dict[str, nn.Module]``: EMA models of the model."""
    update_companions: str | None = None
    """``update(model, companions)``, called after each step."""
    export: str | None = None
    """Name of the companion to judge and promote instead of the model."""
    collate: str | None = None
    """``collate(samples) -> batch``; torch's default otherwise."""
    scaler: str | None = None
    """``make_scaler() -> torch.amp.GradScaler``."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if there is one."""
    sources: Sources
    """Data."""
    budget: Budget
    """Training budget."""
    gate: GateSettings = field(default_factory=GateSettings)
    """Rules of the gate."""
    check: DataCheckSettings = field(default_factory=DataCheckSettings)
    """Limits of a day's data."""
    promote: Promote = field(default_factory=Promote)
    """Actions after a promotion."""

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


def read_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    Raises:
        InvalidRecipeError: It is missing or invalid; names the line, the rule and the way out.
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
