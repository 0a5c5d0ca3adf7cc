"""Multimodal models as folders that other tools can read: a Hugging Face folder for each model, and ``glue.json``.

::

    folder/glue.json                      classes, tokens, projectors, names of callbacks, frozen modules
    folder/language_model/                config.json, model.safetensors, as transformers writes them
    folder/vision/                        the same
    folder/vision/projector.safetensors

Nothing is pickled, and loading runs no code from the folder: classes are those of transformers, or modules that the
caller passes. ``glue.json`` is written last: a folder without it is incomplete.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from mosaic.artifact import load, save
from mosaic.errors import InvalidCheckpointError, UnsupportedModelError
from mosaic.glue.tower import CALLBACKS, PROJECTORS, Tower

LANGUAGE_MODEL = "language_model"
RECORD = "glue.json"
PROJECTOR = "projector.safetensors"
NESTED = "mosaic.glue.model:MultimodalModel"
"""Class of a tower's model that is such a folder itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """A tower, without its weights."""

    name: str
    model: str
    """Class of its model, ``module:name``; empty for one that the caller passes."""
    projector: str
    """Name of its projector, ``own`` or ``none``."""
    token: int | None
    width: int | None
    callbacks: tuple[str, ...]
    """Names of its callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Content of ``glue.json``."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = 1
    language_model: str
    """Class, as in a tower."""
    has_before: bool
    """True if a function of the user puts features into the text."""
    towers: tuple[TowerRecord, ...]
    frozen: tuple[str, ...]
    still: tuple[str, ...]
    """Names of parameters that never train; transformers forgets them when it loads."""


def _check(
    folder: Path,
    record: ModelRecord,
    modules: Mapping[str, nn.Module],
    callbacks: Mapping[str, Callable[..., Any]],
) -> None:
    """Raises ValueError if a module or callback that the folder does not hold is missing, or one is unneeded."""
    for kind, needed, objects in zip(
        ("modules", "callbacks"), _needed(folder, record), (modules, callbacks), strict=True
    ):
        if missing := sorted(needed - objects.keys()):
            raise ValueError(
                f"the model was saved with its own {kind}, which a folder does not hold: pass "
                f"{kind}={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
            )
        if unneeded := sorted(objects.keys() - needed):
            raise ValueError(f"{kind} has {', '.join(unneeded)}, and the model was saved without; leave them out")


def _needed(folder: Path, record: ModelRecord) -> tuple[set[str], set[str]]:
    """Returns the names of the modules and of the callbacks that a folder does not hold."""
    modules = set() if record.language_model else {LANGUAGE_MODEL}
    callbacks = {"before"} if record.has_before else set()
    for tower in record.towers:
        callbacks |= {f"{tower.name}.{callback}" for callback in tower.callbacks}
        modules |= {f"{tower.name}.model"} if not tower.model else set()
        modules |= {f"{tower.name}.projector"} if tower.projector == "own" else set()
        if tower.model == NESTED:
            inner = folder / tower.name
            for own, names in zip((modules, callbacks), _needed(inner, load(ModelRecord, inner / RECORD)), strict=True):
                own |= {f"{tower.name}.model.{name}" for name in names}
    return modules, callbacks


def save_folder(folder: Path, language_model: nn.Module, towers: Mapping[str, Tower], **about: Any) -> None:
    """Writes models, projectors and then the record, which ``about`` completes; see ``save_pretrained``."""
    record = ModelRecord(
        language_model=_class_of(LANGUAGE_MODEL, language_model),
        towers=tuple(
            TowerRecord(
                name=name,
                model=_class_of(f"{name}.model", tower.model),
                projector=tower.kind,
                token=tower.token,
                width=tower.width,
                callbacks=tuple(callback for callback in CALLBACKS if getattr(tower, callback) is not None),
            )
            for name, tower in towers.items()
        ),
        **about,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    _save(language_model, record.language_model, folder / LANGUAGE_MODEL)
    for entry, tower in zip(record.towers, towers.values(), strict=True):
        _save(tower.model, entry.model, folder / entry.name)
        if tower.projector is not None:
            weights = {key: value.contiguous() for key, value in tower.projector.state_dict().items()}
            save_file(weights, folder / entry.name / PROJECTOR)
    save(record, folder / RECORD)


def _save(model: Any, kind: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if kind:
        model.save_pretrained(folder)
    else:
        save_model(model, str(folder / "model.safetensors"))


def load_folder(
    folder: Path,
    modules: Mapping[str, nn.Module],
    callbacks: Mapping[str, Callable[..., Any]],
    nested: Callable[..., nn.Module],
) -> tuple[ModelRecord, nn.Module, dict[str, Tower]]:
    """Reads the record, and the models without their projectors; see ``from_pretrained``, as ``nested`` is, too."""
    record: ModelRecord = load(ModelRecord, folder / RECORD)
    _check(folder, record, modules, callbacks)
    language_model = _load(LANGUAGE_MODEL, record.language_model, folder / LANGUAGE_MODEL, modules)
    towers = {}
    for entry in record.towers:
        name, projectors = entry.name, {"none": None, "own": modules.get(f"{entry.name}.projector")}
        towers[name] = Tower(
            nested(folder / name, modules=_inside(name, modules), callbacks=_inside(name, callbacks))
            if entry.model == NESTED
            else _load(f"{name}.model", entry.model, folder / name, modules),
            projector=projectors.get(entry.projector, entry.projector),
            token=entry.token,
            width=entry.width,
            **{callback: callbacks[f"{name}.{callback}"] for callback in entry.callbacks},  # type: ignore[arg-type]
        )
    return record, language_model, towers


def _inside(tower: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects for a tower's nested model, by their names in it."""
    prefix = f"{tower}.model."
    return {name.removeprefix(prefix): own for name, own in objects.items() if name.startswith(prefix)}


def load_projector(folder: Path, name: str, tower: Tower) -> None:
    """Reads the weights of a tower's projector, in their saved dtype."""
    if tower.projector is None:
        return
    path = folder / name / PROJECTOR
    try:
        weights = load_file(path)
        if tower.kind in PROJECTORS:
            tower.projector.to(next(iter(weights.values())).dtype)
        tower.projector.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InvalidCheckpointError(
            f"{path} does not hold the projector of {name!r}: {error}; save it anew"
        ) from error


def _class_of(name: str, model: nn.Module) -> str:
    """Returns a class of transformers as ``module:name``, ``NESTED``, or an empty text for others."""
    from transformers import PreTrainedModel

    own = type(model)
    if own.__module__.startswith("transformers_modules"):
        raise UnsupportedModelError(
            f"{name} is a {own.__name__}, whose code came with its weights; a folder holds no code: use a class of "
            "transformers, or install its code and pass the module when you load"
        )
    adapted = next((key for key, part in model.named_modules() if type(part).__module__.startswith("peft.")), None)
    if adapted is not None:
        raise UnsupportedModelError(
            f"{name} has adapters of peft ({adapted or own.__name__}); call merge_and_unload() first, or save the "
            "adapters with peft and the model before adding them"
        )
    if any(f"{kind.__module__}:{kind.__name__}" == NESTED for kind in own.__mro__):
        return NESTED
    from_transformers = isinstance(model, PreTrainedModel) and own.__module__.startswith("transformers.")
    return f"{own.__module__}:{own.__qualname__}" if from_transformers else ""


def _load(name: str, kind: str, folder: Path, modules: Mapping[str, nn.Module]) -> nn.Module:
    problems: Mapping[str, Any] = {}
    try:
        if kind:
            options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
            model, problems = _find(name, kind).from_pretrained(folder, **options)
        else:
            model = modules[name]
            load_model(model, folder / "model.safetensors")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InvalidCheckpointError(f"{folder} does not hold {name!r}: {error}; save it anew") from error
    if mismatches := {problem: sorted(map(str, keys)) for problem, keys in problems.items() if keys}:
        raise InvalidCheckpointError(f"{folder} does not hold the weights of {kind}: {mismatches}; save it anew")
    return cast(nn.Module, model)


def _find(name: str, kind: str) -> Any:
    """Returns a model's class in transformers, and nothing else that a record may name."""
    from transformers import PreTrainedModel

    module, _, own = kind.partition(":")
    model_class = None
    if module.startswith("transformers.models."):
        with suppress(ImportError):
            model_class = getattr(importlib.import_module(module), own, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise UnsupportedModelError(
            f"{name} was saved as {kind}, which is not a model of this version of transformers; install the version "
            "that saved it"
        )
    return model_class
