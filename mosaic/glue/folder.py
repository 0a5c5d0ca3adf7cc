"""Saves multimodal models as a Hugging Face folder per model, and ``glue.json``.

::

    folder/glue.json                      classes, tokens, projectors, names of callbacks, frozen modules
    folder/language_model/                config.json, model.safetensors, as transformers writes them
    folder/vision/                        the same
    folder/vision/projector.safetensors

Nothing is pickled, and loading runs no code from the folder: classes are those of transformers, or modules that the
caller passes. ``glue.json`` is written last, so a folder without it is incomplete.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from mosaic.errors import InvalidCheckpointError, UnsupportedModelError

RECORD = "glue.json"
PROJECTOR = "projector.safetensors"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """A tower without its weights."""

    name: str
    model: str
    """Class of its model, ``module:name``; empty if the caller passes the model."""
    projector: str
    """Name of its projector, ``own`` or ``none``."""
    token: int
    width: int | None
    callbacks: tuple[str, ...]
    """Names of its callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Content of ``glue.json``."""

    schema_version: int = 2
    language_model: str
    """Class, like a tower's."""
    towers: tuple[TowerRecord, ...]
    frozen: tuple[str, ...]
    still: tuple[str, ...]
    """Names of parameters that never train; transformers does not save them."""


@dataclass(frozen=True, slots=True)
class OwnObjects:
    """The caller's objects that are not in a folder, by name; each is used once."""

    modules: dict[str, nn.Module]
    callbacks: dict[str, Callable[..., Any]]

    def take(self, kind: str, name: str) -> Any:
        """Returns an object; raises ValueError if the caller did not pass it."""
        objects: dict[str, Any] = getattr(self, kind)
        if name not in objects:
            raise ValueError(
                f"the model was saved with {kind} that are not in the folder: pass {kind}={{{name!r}: ...}}"
            )
        return objects.pop(name)

    def check_taken(self) -> None:
        """Raises ValueError if the caller passed objects without a use."""
        for kind, objects in (("modules", self.modules), ("callbacks", self.callbacks)):
            if objects:
                raise ValueError(f"{kind} has {', '.join(objects)}, which the saved model lacks; leave them out")


def save_part(name: str, model: Any, folder: Path) -> str:
    """Writes a model; returns its class in transformers as ``module:name``, or an empty string."""
    from transformers import PreTrainedModel

    own = type(model)
    if any(type(part).__module__.startswith("peft.") for part in model.modules()):
        raise UnsupportedModelError(
            f"{name} has adapters of peft; call merge_and_unload() first, or save the adapters with peft and the model "
            "before adding them"
        )
    folder.mkdir(exist_ok=True)
    if isinstance(model, PreTrainedModel) and own.__module__.startswith("transformers."):
        model.save_pretrained(folder)
        return f"{own.__module__}:{own.__qualname__}"
    save_model(model, str(folder / WEIGHTS))
    return ""


def load_part(name: str, kind: str, folder: Path, own: OwnObjects) -> nn.Module:
    """Reads a model of a class of transformers, or into one that the caller passes."""
    if not kind:
        model: nn.Module = own.take("modules", name)
        with _held_by(folder, repr(name)):
            load_model(model, folder / WEIGHTS)
        return model
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    with _held_by(folder, repr(name)):
        model, problems = _class_of(name, kind).from_pretrained(folder, **options)
    if mismatches := {problem: sorted(map(str, keys)) for problem, keys in problems.items() if keys}:
        raise InvalidCheckpointError(f"{folder} does not have the weights of {kind}: {mismatches}; save it again")
    return model


def save_projector(projector: nn.Module | None, folder: Path) -> None:
    """Writes a projector's weights."""
    if projector is not None:
        save_file({key: value.contiguous() for key, value in projector.state_dict().items()}, folder / PROJECTOR)


def load_projector(name: str, projector: nn.Module | None, folder: Path) -> None:
    """Reads the weights of a tower's projector, in their saved dtype."""
    if projector is not None:
        with _held_by(folder / PROJECTOR, f"the projector of {name!r}"):
            projector.load_state_dict(load_file(folder / PROJECTOR), assign=True)


@contextmanager
def _held_by(path: Path, content: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InvalidCheckpointError(f"{path} does not have {content}: {error}; save it again") from error


def _class_of(name: str, kind: str) -> Any:
    """Returns a model's class in transformers; rejects other names."""
    from transformers import PreTrainedModel

    module, _, own = kind.partition(":")
    model_class = None
    if module.startswith("transformers.models."):
        with suppress(ImportError):
            model_class = getattr(importlib.import_module(module), own, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise UnsupportedModelError(
            f"{name} was saved as {kind}, which this version of transformers does not have; install the version "
            "that saved it"
        )
    return model_class
