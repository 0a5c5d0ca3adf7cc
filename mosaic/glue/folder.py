"""Glued models as folders that other tools can read: a Hugging Face folder for each model, and ``glue.json``.

::

    folder/glue.json                      classes, tokens, projectors, names of callbacks, what is frozen
    folder/language_model/                config.json, model.safetensors, as transformers writes them
    folder/vision/                        the same
    folder/vision/projector.safetensors

Nothing is pickled, and loading runs no code of the folder's: classes are those of transformers, or modules that the
caller hands over. ``glue.json`` is written last, so that a folder without it was not finished.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from mosaic.artifact import load, save
from mosaic.errors import InvalidCheckpointError, UnsupportedModelError
from mosaic.glue.tower import CALLBACKS, PROJECTORS, Tower

RECORD = "glue.json"
PROJECTOR = "projector.safetensors"
LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """A tower, without its weights."""

    name: str
    """Under which it is a child."""
    model: str
    """Class of its model, ``module:name``; empty for one that is handed over."""
    projector: str
    """Name of its projector, ``own`` or ``none``."""
    token: int | None
    """Its placeholder."""
    width: int | None
    """Of what the projector gets."""
    callbacks: tuple[str, ...]
    """Names of those that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueRecord:
    """What ``glue.json`` holds."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = 1
    language_model: str
    """Class, as a tower's model."""
    has_before: bool
    """Whether features are put into the text by a function of the user's."""
    towers: tuple[TowerRecord, ...]
    """In order."""
    frozen: tuple[str, ...]
    """Names of modules."""
    still: tuple[str, ...]
    """Names of parameters that do not train though nothing froze them; transformers forgets them when it loads."""


def save_folder(folder: Path, language_model: nn.Module, towers: Mapping[str, Tower], **about: Any) -> None:
    """Writes models, projectors and then the record.

    Args:
        folder: Made where it is missing.
        language_model: The language model.
        towers: By name.
        about: ``has_before``, ``frozen`` and ``still`` of the record.

    Raises:
        UnsupportedModelError: A class's code came with its weights, or adapters of peft are in a model.
    """
    record = GlueRecord(
        language_model=_class_of(LANGUAGE_MODEL, language_model),
        towers=tuple(
            TowerRecord(
                name=name,
                model=_class_of(f"{name}.model", tower.model),
                projector=tower.kind,
                token=tower.token,
                width=tower.width,
                callbacks=tuple(one for one in CALLBACKS if getattr(tower, one) is not None),
            )
            for name, tower in towers.items()
        ),
        **about,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    _save(language_model, record.language_model, folder / LANGUAGE_MODEL)
    for kept in record.towers:
        _save(towers[kept.name].model, kept.model, folder / kept.name)
        projector = towers[kept.name].projector
        if projector is not None:
            weights = {name: value.contiguous() for name, value in projector.state_dict().items()}
            save_file(weights, folder / kept.name / PROJECTOR)
    save(record, folder / RECORD)


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What a folder does not hold; whatever of it is not asked for is an error."""

    modules: Mapping[str, nn.Module]
    """By name, such as ``vision.model`` and ``vision.projector``: their weights are read into them."""
    callbacks: Mapping[str, Callable[..., Any]]
    """By name, such as ``vision.after``, and ``before``."""

    def check(self, record: GlueRecord) -> None:
        """Checks that what the record needs was handed over, and nothing else.

        Raises:
            ValueError: It was not.
        """
        callbacks = {f"{tower.name}.{one}" for tower in record.towers for one in tower.callbacks}
        callbacks |= {"before"} if record.has_before else set()
        modules = {f"{tower.name}.model" for tower in record.towers if not tower.model}
        modules |= {f"{tower.name}.projector" for tower in record.towers if tower.projector == "own"}
        modules |= set() if record.language_model else {LANGUAGE_MODEL}
        for what, needed, given in (("callbacks", callbacks, self.callbacks), ("modules", modules, self.modules)):
            if missing := sorted(needed - given.keys()):
                raise ValueError(
                    f"the model was saved with {what} of its own, which no folder holds: hand over "
                    f"{what}={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
                )
            if strange := sorted(given.keys() - needed):
                raise ValueError(f"{what} has {', '.join(strange)}, and the model was saved without; leave them out")


def load_folder(folder: Path, handed: HandedOver) -> tuple[GlueRecord, nn.Module, dict[str, Tower]]:
    """Reads the record, and the models without their projectors.

    Raises:
        InvalidFileError: There is no ``glue.json``, or it is damaged.
        InvalidCheckpointError: Weights are missing, or not those of the class.
        UnsupportedModelError: A class is none of transformers'.
        ValueError: Something that the folder does not hold was not handed over.
    """
    record: GlueRecord = load(GlueRecord, folder / RECORD)
    handed.check(record)
    language_model = _load(LANGUAGE_MODEL, record.language_model, folder / LANGUAGE_MODEL, handed)
    towers = {}
    for kept in record.towers:
        towers[kept.name] = Tower(
            _load(f"{kept.name}.model", kept.model, folder / kept.name, handed),
            projector={"none": None, "own": handed.modules.get(f"{kept.name}.projector")}.get(
                kept.projector, kept.projector
            ),
            token=kept.token,
            width=kept.width,
            **{one: handed.callbacks[f"{kept.name}.{one}"] for one in kept.callbacks},  # type: ignore[arg-type]
        )
    return record, language_model, towers


def load_projector(folder: Path, name: str, tower: Tower) -> None:
    """Reads the weights of a tower's projector, in the type in which they were saved.

    Raises:
        InvalidCheckpointError: They are missing, or those of another projector.
    """
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
    """Returns a class of transformers as ``module:name``; empty for others."""
    from transformers import PreTrainedModel

    own = type(model)
    if own.__module__.startswith("transformers_modules"):
        raise UnsupportedModelError(
            f"{name} is a {own.__name__}, whose code came with its weights; a folder holds no code: use a class of "
            "transformers, or install its code and hand the module over when you load"
        )
    adapted = next((key for key, part in model.named_modules() if type(part).__module__.startswith("peft.")), None)
    if adapted is not None:
        raise UnsupportedModelError(
            f"{name} has adapters of peft ({adapted or own.__name__}); call merge_and_unload() first, or save the "
            "adapters by peft and the model before they are put in"
        )
    is_theirs = isinstance(model, PreTrainedModel) and own.__module__.startswith("transformers.")
    return f"{own.__module__}:{own.__qualname__}" if is_theirs else ""


def _save(model: nn.Module, kind: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if kind:
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        save_model(model, str(folder / "model.safetensors"))


def _load(name: str, kind: str, folder: Path, handed: HandedOver) -> nn.Module:
    if not kind:
        model = handed.modules[name]
        try:
            load_model(model, folder / "model.safetensors")
        except (OSError, SafetensorError, RuntimeError) as error:
            raise InvalidCheckpointError(f"{folder} does not hold the weights of {name!r}: {error}") from error
        return model
    try:
        found, about = _find(name, kind).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise InvalidCheckpointError(f"{folder} does not hold {name!r}: {error}; save it anew") from error
    if wrong := {what: sorted(map(str, keys)) for what, keys in about.items() if keys}:
        raise InvalidCheckpointError(f"{folder} does not hold the weights of {kind}: {wrong}; save it anew")
    model: nn.Module = found
    return model


def _find(name: str, kind: str) -> Any:
    from transformers import PreTrainedModel

    module, _, own = kind.partition(":")
    found = None
    if module.startswith("transformers.models."):
        try:
            found = getattr(importlib.import_module(module), own, None)
        except ImportError:
            found = None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise UnsupportedModelError(
            f"{name} was saved as {kind}, which is no model of this version of transformers; install the one that it "
            "was saved with"
        )
    return found
