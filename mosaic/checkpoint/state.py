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


class SavedState:
    """The objects that a run saves and loads, by name; a single one has the name ``""``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OneOrSeveral[Optimizer],
        scheduler: OneOrSeveral[Any],
        scaler: Any,
        companions: Mapping[str, nn.Module] | None,
        generators: Mapping[str, torch.Generator] | None,
    ) -> None:
        self.model = model
        self.optimizers: dict[str, Optimizer] = _named(optimizer, "optimizer")
        self.schedulers = _named(scheduler, "scheduler")
        self.scalers = {} if scaler is None else {"": scaler}
        self.companions: dict[str, nn.Module] = _named(companions or {}, "companions")
        self.generators = dict(generators or {})

    def modules(self) -> dict[str, ModelTensors]:
        """Returns the tensors of the model and its companions, by the prefix of their names in a checkpoint."""
        prefixes = {MODEL: self.model, **{f"{COMPANION}{name}/": module for name, module in self.companions.items()}}
        return {prefix: ModelTensors.of(module) for prefix, module in prefixes.items()}


def _named(objects: Any, argument: str) -> dict[str, Any]:
    if objects is None:
        return {}
    if isinstance(objects, Sequence):
        objects = {str(index): each for index, each in enumerate(objects)}
    elif not isinstance(objects, Mapping):
        objects = {"": objects}
    elif wrong := [name for name in objects if not isinstance(name, str) or not name or "/" in name]:
        raise ValueError(f"{wrong[0]!r} cannot be a name in {argument}=; use a text that is not empty and has no '/'")
    if other := [each for each in objects.values() if not hasattr(each, "state_dict")]:
        raise TypeError(f"{argument}= has a {type(other[0]).__name__}, without a state_dict(); pass the object itself")
    return dict(objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a checkpoint, without the values of its tensors."""

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
            entries={name: describe(name, tensor) for name, tensor in tensors.items()},
            names=[f"{prefix}{name}" for prefix, each in modules.items() for name in each.tensors],
            optimizers=optimizers,
            tied=modules[MODEL].tied,
        )
        return part, tensors


def state_file(state: SavedState, parts: Sequence[Part], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all state except tensors as JSON data, with the optimizers of all ranks."""
    by_kind = {
        "optimizer": {
            label: asdict(OptimizerState.merged([part.optimizers[label] for part in parts]))
            for label in state.optimizers
        },
        "scheduler": {label: to_plain(each.state_dict(), "the scheduler") for label, each in state.schedulers.items()},
        "scaler": {label: to_plain(each.state_dict(), "the scaler") for label, each in state.scalers.items()},
    }
    single = {kind: states.pop("", None) for kind, states in by_kind.items()}
    several = {f"{kind}s": states for kind, states in by_kind.items()}
    names = {"companions": [*state.companions], "generators": [*state.generators]}
    return {**single, **several, **names, "extra": to_plain(dict(extra), "extra")}


def by_label(saved: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the entries of a state file for objects of a kind by name; a single one has the name ``""``."""
    single = saved.get(kind)
    return {**({} if single is None else {"": single}), **saved.get(f"{kind}s", {})}


def to_plain(value: Any, where: str, keep: Callable[[torch.Tensor, str], str] | None = None) -> Any:
    """Returns nested dicts, lists and tuples of numbers, strings, None and tensors as JSON data.

    ``where`` names the value; ``keep`` stores a tensor elsewhere and returns its key. By default it is in the JSON.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
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
        if others := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in by_id]:
            raise ValueError(
                f"a parameter of the optimizer (shape {tuple(others[0].shape)}) is not the model's, and is not saved; "
                "make it a parameter of the model"
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

    def prepare(
        self, optimizer: Optimizer, model: ModelTensors, stored: Callable[..., torch.Tensor], *, new_run: bool
    ) -> Callable[[], None]:
        """Compares this saved state with an optimizer, which may lack parameters that are on other ranks.

        ``stored`` returns a copy of a parameter's tensor by its key. The returned function loads the state, without
        the settings of groups into a new run.
        """
        own, _ = OptimizerState.of(optimizer, model)
        if self.kind != own.kind:
            raise InvalidCheckpointError(
                f"the checkpoint has the state of {self.kind} and the optimizer is {own.kind}; use the saved "
                "optimizer's class, or load without one"
            )
        here = model.here.keys()
        saved, present = ({name: i for i, names in enumerate(each.groups) for name in names} for each in (self, own))
        differing = [name for name in saved | present if name in here and saved.get(name) != present.get(name)]
        if differing or len(self.groups) != len(own.groups):
            listed = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise InvalidCheckpointError(
                f"the groups of the optimizer are not the saved ones, of which there are {len(self.groups)}; they "
                f"differ in {listed or 'their number'}: make the same groups, or load without an optimizer"
            )

        def restore() -> None:
            state_dict = optimizer.state_dict()
            state_dict["state"] = {
                index: from_plain(self.states[name], partial(stored, model.tensors[name]))
                for index, name in enumerate(itertools.chain(*own.groups))
                if name in self.states and not model.tensors[name].is_meta
            }
            if not new_run:
                state_dict |= from_plain(self.more)
                groups = zip(state_dict["param_groups"], from_plain(self.settings), strict=True)
                state_dict["param_groups"] = [{**group, **settings} for group, settings in groups]
            optimizer.load_state_dict(state_dict)

        return restore


def random_state(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
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
        "generators": {name: random_numbers.generator_state(each) for name, each in generators.items()},
    }


def set_random_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Sets the generators to a state from ``random_state``; with another number of GPUs, the current one alone."""
    cpu = ((torch.default_generator, state["torch"]),)
    random_numbers.RandomState(torch=cpu, python=state["python"], numpy=tuple(state["numpy"])).restore()
    if state["cuda"] is not None and torch.cuda.is_available():
        if len(all_cuda := state.get("all_cuda", [])) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(all_cuda)
        else:
            torch.cuda.set_rng_state(state["cuda"])
    for name in generators.keys() & state.get("generators", {}).keys():
        generators[name].set_state(state["generators"][name])
