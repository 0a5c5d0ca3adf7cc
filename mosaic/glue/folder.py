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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from mosaic.artifact import load, save
from mosaic.errors import InvalidCheckpointError, UnsupportedModelError
from mosaic.glue.record import LANGUAGE_MODEL, GlueRecord, HandedOver, TowerRecord
from mosaic.glue.tower import CALLBACKS, PROJECTORS, Tower

RECORD = "glue.json"
PROJECTOR = "projector.safetensors"


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
    about: Mapping[str, Any] = {}
    try:
        if kind:
            options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
            found, about = _find(name, kind).from_pretrained(folder, **options)
        else:
            found = handed.modules[name]
            load_model(found, folder / "model.safetensors")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InvalidCheckpointError(f"{folder} does not hold {name!r}: {error}; save it anew") from error
    if wrong := {what: sorted(map(str, keys)) for what, keys in about.items() if keys}:
        raise InvalidCheckpointError(f"{folder} does not hold the weights of {kind}: {wrong}; save it anew")
    return cast(nn.Module, found)


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
