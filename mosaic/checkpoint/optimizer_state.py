"""An optimizer's state by the names of parameters: their numbers differ between ranks and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mosaic.checkpoint.manifest import TensorEntry
from mosaic.checkpoint.model_tensors import ModelTensors
from mosaic.checkpoint.plain_data import from_plain, kept_in, to_plain
from mosaic.checkpoint.tensor_file import dtype_of
from mosaic.errors import InvalidCheckpointError

PREFIX = "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer's state on one rank, or merged over all."""

    kind: str
    """Name of its class."""
    groups: list[list[str]]
    """Names of the parameters of each group."""
    settings: list[Any]
    """Learning rate and all else of each group, as JSON can hold it; the same on every rank."""
    states: dict[str, Any]
    """What it keeps of each parameter, with keys in the place of tensors."""
    more: Any
    """What a wrapping optimizer adds to its ``state_dict``."""

    def to_json(self) -> dict[str, Any]:
        """Returns what a JSON file holds."""
        return {name: getattr(self, name) for name in self.__slots__}


def names_of(optimizer: Optimizer, model: ModelTensors) -> list[list[str]]:
    """Returns the names of an optimizer's parameters, group by group.

    Raises:
        ValueError: One is not the model's.
    """
    by_id = {id(tensor): name for name, tensor in model.tensors.items()}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in by_id:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {index} (shape {tuple(parameter.shape)}) is not the "
                    "model's, so nobody saves it; make it a parameter of the model"
                )
        found.append([by_id[id(parameter)] for parameter in group["params"]])
    return found


def kind_of(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer's class."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate wraps


def collect(
    optimizer: Optimizer, model: ModelTensors, label: str = ""
) -> tuple[OptimizerState, dict[str, torch.Tensor]]:
    """Returns an optimizer's state, and its tensors by the keys that stand for them; no copy is made.

    Of parameters that are on other ranks only, nothing is taken.

    Args:
        optimizer: The optimizer.
        model: The tensors of its model.
        label: Its name, where there are several.
    """
    prefix = f"{PREFIX}{label}/" if label else PREFIX
    groups = names_of(optimizer, model)
    flat = [name for group in groups for name in group]
    found = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, where: str) -> str:
        tensors[where] = tensor.detach()
        return where

    states = {}
    for index, state in found["state"].items():
        if not isinstance(index, int) or index >= len(flat):
            raise TypeError(f"the optimizer keeps state of {index!r}, which is no parameter; it cannot be saved")
        name = flat[index]
        if not model.tensors[name].is_meta:
            states[name] = {key: to_plain(value, f"{prefix}{name}/{key}", keep) for key, value in state.items()}
    settings = [
        to_plain({key: value for key, value in group.items() if key != "params"}, f"the optimizer's group {index}")
        for index, group in enumerate(found["param_groups"])
    ]
    more = {key: value for key, value in found.items() if key not in ("state", "param_groups")}
    more_plain = to_plain(more, "the optimizer's state_dict()")
    return OptimizerState(
        kind=kind_of(optimizer), groups=groups, settings=settings, states=states, more=more_plain
    ), tensors


def merged_groups(told: Sequence[list[list[str]]]) -> list[list[str]]:
    """Returns the groups over all ranks, some of whose optimizers may have only what is there."""
    if len({len(groups) for groups in told}) > 1:
        each = "; ".join(f"rank {rank}: {len(groups)}" for rank, groups in enumerate(told))
        raise ValueError(f"the ranks' optimizers have different numbers of groups ({each}); make the same on all ranks")
    return [list(dict.fromkeys(name for groups in told for name in groups[index])) for index in range(len(told[0]))]


def check_fits(saved: Mapping[str, Any], optimizer: Optimizer, model: ModelTensors) -> None:
    """Raises InvalidCheckpointError if a saved state is of another optimizer; says in what."""
    kind = kind_of(optimizer)
    if saved["kind"] != kind:
        raise InvalidCheckpointError(
            f"the checkpoint has the state of {saved['kind']} and the optimizer is {kind}; make the optimizer that was "
            "saved, or load without one"
        )
    group_of = {name: index for index, names in enumerate(saved["groups"]) for name in names}
    given = {name for names in names_of(optimizer, model) for name in names}
    left_out = [name for name in group_of if name not in given and not model.tensors[name].is_meta]
    if left_out:
        raise InvalidCheckpointError(
            f"the optimizer that was saved had {some(left_out)}; give it the same parameters, or load without one"
        )
    for index, names in enumerate(names_of(optimizer, model)):
        new = [name for name in names if name not in group_of]
        if new:
            raise InvalidCheckpointError(
                f"the optimizer that was saved did not have {some(new)}; give it the same parameters, or load without "
                "an optimizer"
            )
        if len({group_of[name] for name in names}) > 1:
            raise InvalidCheckpointError(
                f"group {index} of the optimizer has parameters that were in several groups when it was saved; make "
                "the same groups"
            )


def adapted(
    all_saved: Mapping[str, Mapping[str, Any]],
    label: str,
    optimizer: Optimizer,
    model: ModelTensors,
    fitting: Mapping[str, str],
    *,
    with_settings: bool,
) -> dict[str, Any]:
    """Returns what of saved optimizers fits another one, as if it had been saved: state by parameter, in any of them.

    Args:
        all_saved: The saved optimizers by name.
        label: The optimizer's name.
        optimizer: The optimizer; what is new in it begins without a state.
        model: The tensors of its model.
        fitting: For each parameter that is as it was, its name then.
        with_settings: Whether its groups get the settings, such as learning rates, that their parameters had.
    """
    kind, groups = kind_of(optimizer), names_of(optimizer, model)
    own, _ = collect(optimizer, model)
    alike = {name: saved for name, saved in all_saved.items() if saved["kind"] == kind}
    states = {name: state for saved in alike.values() for name, state in saved["states"].items()}
    came_from = {
        name: (label, index)
        for label, saved in alike.items()
        for index, names in enumerate(saved["groups"])
        for name in names
    }
    flat = [name for names in groups for name in names]
    taken = {name: states[fitting[name]] for name in flat if fitting.get(name) in states}
    if kind == "LBFGS" and (came_from.keys() ^ set(flat)):
        taken = {}  # it keeps what it knows of all parameters with the first one
    settings = list(own.settings)
    for index, names in enumerate(groups if with_settings else ()):
        homes = {came_from[fitting[name]] for name in names if fitting.get(name) in came_from}
        if len(homes) == 1:
            (home,) = homes
            settings[index] = alike[home[0]]["settings"][home[1]]
    fits = label in alike and isinstance(alike[label]["more"], dict) and alike[label]["more"].keys() == own.more.keys()
    more = alike[label]["more"] if fits and with_settings else own.more
    return {"kind": kind, "groups": groups, "settings": settings, "states": taken, "more": more}


def targets(
    saved: Mapping[str, Any], model: ModelTensors, stored: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """Returns room for the saved tensors of the parameters that this rank has, by their keys."""
    made = {}
    for name, state in saved["states"].items():
        parameter = model.tensors[name]
        if parameter.is_meta:
            continue
        for key in kept_in(state):
            entry = stored[key]
            device = parameter.device if entry.shape == tuple(parameter.shape) else torch.device("cpu")
            made[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
    return made


def restore(
    saved: Mapping[str, Any], optimizer: Optimizer, model: ModelTensors, kept: Callable[[str], torch.Tensor]
) -> None:
    """Gives an optimizer the saved state of the parameters that this rank has.

    Args:
        saved: What ``OptimizerState.to_json`` returned.
        optimizer: One that fits, new or not.
        model: The tensors of its model.
        kept: Returns a saved tensor by its key.
    """
    groups = names_of(optimizer, model)
    group_of = {name: index for index, names in enumerate(saved["groups"]) for name in names}
    before = optimizer.state_dict()
    states, made, number = {}, [], 0
    for names, current in zip(groups, before["param_groups"], strict=True):
        settings = from_plain(saved["settings"][group_of[names[0]]]) if names else current
        made.append({**current, **settings, "params": list(range(number, number + len(names)))})
        for index, name in enumerate(names, start=number):
            if name in saved["states"] and not model.tensors[name].is_meta:
                states[index] = from_plain(saved["states"][name], kept)
        number += len(names)
    optimizer.load_state_dict({**before, **from_plain(saved["more"]), "state": states, "param_groups": made})


def some(names: Sequence[str]) -> str:
    """Names the first few of many."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
