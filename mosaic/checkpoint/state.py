"""The state of a training run: the objects that hold it, and their state as JSON with tensors apart.

Tuples (Adam's ``betas``), counters (``MultiStepLR``), number keys and tensors become objects with a ``$`` key; reading
constructs these types only. The state of an optimizer goes by the names of parameters, because their numbers differ
between ranks and plans.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.checkpoint.folder import COMPANION, MODEL, OPTIMIZER, RANDOM, TensorEntry
from mosaic.checkpoint.tensors import DTYPES, ModelTensors, bytes_of, describe
from mosaic.errors import InvalidCheckpointError
from mosaic.find import random_numbers

T = TypeVar("T")
OneOrSeveral: TypeAlias = T | Sequence[T] | Mapping[str, T] | None
"""One, or several in a fixed order or by name, or none."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The objects that a run saves and loads; a single optimizer or scheduler has the name ``""``."""

    model: nn.Module
    optimizer: OneOrSeveral[Optimizer] = None
    scheduler: OneOrSeveral[Any] = None
    scaler: Any = None
    companions: Mapping[str, nn.Module] | None = None
    generators: Mapping[str, torch.Generator] | None = None

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return _named(self.optimizer, "optimizer")

    @property
    def schedulers(self) -> dict[str, Any]:
        return _named(self.scheduler, "scheduler")

    def modules(self) -> dict[str, ModelTensors]:
        """Returns the tensors of the model and its companions, by the prefix of their names in a checkpoint."""
        companions = _named(self.companions or {}, "companions")
        prefixes = {MODEL: self.model, **{f"{COMPANION}{name}/": module for name, module in companions.items()}}
        return {prefix: ModelTensors.of(module) for prefix, module in prefixes.items()}


def _named(objects: Any, argument: str) -> dict[str, Any]:
    if objects is None:
        return {}
    if isinstance(objects, Sequence):
        return {str(index): each for index, each in enumerate(objects)}
    if not isinstance(objects, Mapping):
        return {"": objects}
    for name in objects:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"{name!r} cannot be a name in {argument}=; use a text that is not empty and has no '/'")
    return dict(objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a checkpoint, without the values of its tensors."""

    labels: tuple[list[str], list[str], list[str]]
    """Names of optimizers, companions and generators."""
    entries: dict[str, TensorEntry]
    """This rank's tensors."""
    names: list[str]
    """Tensors of the model and its companions on any rank."""
    optimizers: dict[str, OptimizerState]
    tied: dict[str, str]

    @staticmethod
    def of(state: SavedState, rank: int) -> tuple[Part, dict[str, torch.Tensor]]:
        """Reads the state of a run on this rank; returns also its tensors, not copied."""
        modules = state.modules()
        tensors = {f"{prefix}{name}": tensor for prefix, each in modules.items() for name, tensor in each.here.items()}
        optimizers = {}
        for label, optimizer in state.optimizers.items():
            optimizers[label], own = OptimizerState.of(optimizer, modules[MODEL], label)
            tensors |= own
        text = json.dumps(to_plain(random_state(state.generators), "the random state")).encode()
        tensors[f"{RANDOM}{rank}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        part = Part(
            labels=([*optimizers], list(state.companions or {}), list(state.generators or {})),
            entries={name: describe(name, tensor) for name, tensor in tensors.items()},
            names=[f"{prefix}{name}" for prefix, each in modules.items() for name in each.tensors],
            optimizers=optimizers,
            tied=modules[MODEL].tied,
        )
        return part, tensors


def state_file(state: SavedState, parts: Sequence[Part], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all state except tensors as JSON data, with the optimizers of all ranks."""
    optimizers = {label: [part.optimizers[label] for part in parts] for label in parts[0].optimizers}
    merged = {label: asdict(OptimizerState.merged(by_rank)) for label, by_rank in optimizers.items()}
    schedulers = {
        label: to_plain(each.state_dict(), f"scheduler {label}".strip()) for label, each in state.schedulers.items()
    }
    return {
        "optimizer": merged.pop("", None),
        "optimizers": merged,
        "scheduler": schedulers.pop("", None),
        "schedulers": schedulers,
        "scaler": None if state.scaler is None else to_plain(state.scaler.state_dict(), "scaler"),
        "companions": parts[0].labels[1],
        "generators": parts[0].labels[2],
        "extra": to_plain(dict(extra), "extra"),
    }


def by_label(saved: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the entries of a state file for objects of a kind by name; a single one has the name ``""``."""
    single = saved.get(kind)
    return {**({} if single is None else {"": single}), **saved.get(f"{kind}s", {})}


def to_plain(value: Any, where: str, keep: Callable[[torch.Tensor, str], str] | None = None) -> Any:
    """Returns nested dicts, lists and tuples of numbers, strings, None and tensors as JSON data.

    ``where`` names the value; ``keep`` stores a tensor elsewhere and returns its key. By default it is in the JSON.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # NumPy's float64 is a float
    if isinstance(value, torch.Tensor):
        if keep is not None:
            return {"$": "kept", "key": keep(value, where)}
        if value.is_meta:
            raise TypeError(f"{where} is a tensor without content (on the meta device); leave it out")
        entry, content = describe(where, value), base64.b64encode(bytes_of(value)).decode()
        return {"$": "tensor", "dtype": entry.dtype, "shape": list(entry.shape), "base64": content}
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{where}[{index}]", keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [(key, to_plain(item, f"{where}[{key!r}]", keep)) for key, item in value.items()]
        if not isinstance(value, Counter) and all(isinstance(key, str) for key in value) and "$" not in value:
            return dict(pairs)
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {"$": kind, "items": [[to_plain(key, f"a key of {where}"), item] for key, item in pairs]}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; give "
        "numbers, strings, None, tensors, and lists, tuples and dicts of these (of an object, its state_dict())"
    )


def from_plain(value: Any, stored: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Inverts ``to_plain``; ``stored`` returns a tensor stored elsewhere, by its key."""
    if isinstance(value, list):
        return [from_plain(item, stored) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: from_plain(item, stored) for key, item in value.items()}
    if kind == "tuple":
        return tuple(from_plain(item, stored) for item in value["items"])
    if kind in ("dict", "counter"):
        mapping = {from_plain(key): from_plain(item, stored) for key, item in value["items"]}
        return Counter(mapping) if kind == "counter" else mapping
    if kind == "kept" and stored is not None:
        return stored(value["key"])
    if kind == "tensor":
        content, dtype = bytearray(base64.b64decode(value["base64"])), DTYPES[value["dtype"]]
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    raise ValueError(f"{kind!r} is no kind of value in a checkpoint of this version")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer's state as plain data, on one rank or merged over all."""

    kind: str
    """Name of its class."""
    groups: list[list[str]]
    """Names of the parameters of each group."""
    settings: list[Any]
    """Of each group, such as its learning rate; the same on every rank."""
    states: dict[str, Any]
    """Of each parameter, with keys in place of tensors."""
    more: Any
    """Other entries of a wrapping optimizer's ``state_dict``."""

    @staticmethod
    def of(
        optimizer: Optimizer, model: ModelTensors, label: str = ""
    ) -> tuple[OptimizerState, dict[str, torch.Tensor]]:
        """Reads the state of this rank's parameters; returns also its tensors by key, without a copy."""
        prefix = f"{OPTIMIZER}{label}/" if label else OPTIMIZER
        by_id = {id(tensor): name for name, tensor in model.tensors.items()}
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in by_id:
                    raise ValueError(
                        f"parameter {place} of the optimizer's group {index} (shape {tuple(parameter.shape)}) is not "
                        "the model's, and is not saved; make it a parameter of the model"
                    )
        groups = [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        names = [name for group in groups for name in group]
        state_dict = dict(optimizer.state_dict())
        tensors: dict[str, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, where: str) -> str:
            tensors[where] = tensor.detach()
            return where

        states = {}
        for index, state in state_dict.pop("state").items():
            if not isinstance(index, int) or index >= len(names):
                raise TypeError(f"the optimizer has state of {index!r}, which is not a parameter and cannot be saved")
            name = names[index]
            if not model.tensors[name].is_meta:
                states[name] = {key: to_plain(value, f"{prefix}{name}/{key}", keep) for key, value in state.items()}
        settings = [
            to_plain({key: value for key, value in group.items() if key != "params"}, f"the optimizer's group {index}")
            for index, group in enumerate(state_dict.pop("param_groups"))
        ]
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate wraps
        more = to_plain(state_dict, "the optimizer's state_dict()")
        return OptimizerState(kind=kind, groups=groups, settings=settings, states=states, more=more), tensors

    @staticmethod
    def merged(by_rank: Sequence[OptimizerState]) -> OptimizerState:
        groups = zip(*(state.groups for state in by_rank), strict=True)
        return replace(
            by_rank[0],
            groups=[list(dict.fromkeys(itertools.chain(*same))) for same in groups],
            states={name: state for each in by_rank for name, state in each.states.items()},
        )

    def check_fits(self, own: OptimizerState, model: ModelTensors) -> None:
        """Refuses an optimizer unlike the saved one by their difference; parameters on other ranks may be missing."""
        remedy = "give it the same parameters, or load without an optimizer"
        if self.kind != own.kind:
            raise InvalidCheckpointError(
                f"the checkpoint has the state of {self.kind} and the optimizer is {own.kind}; use the saved "
                "optimizer's class, or load without one"
            )
        saved, present = ({name: i for i, names in enumerate(each.groups) for name in names} for each in (self, own))
        here = model.here
        missing = [name for name in saved if name not in present and name in here]
        new = [name for name in present if name not in saved]
        for verb, names in (("had", missing), ("did not have", new)):
            if names:
                listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise InvalidCheckpointError(f"the optimizer that was saved {verb} {listed}; {remedy}")
        for index, names in enumerate(own.groups):
            if len({saved[name] for name in names}) > 1:
                raise InvalidCheckpointError(
                    f"group {index} of the optimizer has parameters that were in several groups when it was saved; "
                    "make the same groups"
                )

    def restore(
        self,
        optimizer: Optimizer,
        own: OptimizerState,
        model: ModelTensors,
        stored: Callable[[torch.Tensor, str], torch.Tensor],
        *,
        with_settings: bool,
    ) -> None:
        """Loads this saved state, with the settings of groups or without, into an optimizer whose state is ``own``.

        ``stored`` returns a tensor of a parameter's state by its key.
        """
        state_dict = optimizer.state_dict()
        state_dict["state"] = {
            index: from_plain(self.states[name], partial(stored, model.tensors[name]))
            for index, name in enumerate(itertools.chain(*own.groups))
            if name in self.states and not model.tensors[name].is_meta
        }
        if with_settings:
            settings = {name: each for names, each in zip(self.groups, self.settings, strict=True) for name in names}
            state_dict |= from_plain(self.more)
            state_dict["param_groups"] = [
                {**group, **(from_plain(settings[names[0]]) if names else {})}
                for group, names in zip(state_dict["param_groups"], own.groups, strict=True)
            ]
        optimizer.load_state_dict(state_dict)


def random_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Returns the states of this process's default generators, and of others by name."""
    state = random_numbers.random_state()
    (_, cpu), *gpus = state.torch
    numpy_kind, words, *rest = state.numpy
    return {
        "torch": cpu,
        "cuda": gpus[torch.cuda.current_device()][1] if gpus else None,
        "all_cuda": [gpu for _, gpu in gpus],
        "python": state.python,
        "numpy": [numpy_kind, [int(word) for word in words], *rest],
        "generators": {name: random_numbers.generator_state(each) for name, each in (generators or {}).items()},
    }


def set_random_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Sets the generators to a state from ``random_state``; with another number of GPUs, the current one alone."""
    kind, words, *rest = state["numpy"]
    numpy_state = kind, np.array(words, dtype=np.uint32), *rest
    cpu = ((torch.default_generator, state["torch"]),)
    random_numbers.RandomState(torch=cpu, python=state["python"], numpy=numpy_state).restore()
    if state["cuda"] is not None and torch.cuda.is_available():
        if len(all_cuda := state.get("all_cuda", [])) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(all_cuda)
        else:
            torch.cuda.set_rng_state(state["cuda"])
    saved = state.get("generators", {})
    for name, each in (generators or {}).items():
        if name in saved:
            each.set_state(saved[name])
