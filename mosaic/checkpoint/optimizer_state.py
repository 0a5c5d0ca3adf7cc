"""An optimizer's state by the names of parameters: their numbers differ between ranks and plans."""

from __future__ import annotations

import itertools
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
    """Settings of each group as plain data, such as its learning rate; the same on every rank."""
    states: dict[str, Any]
    """State of each parameter, with keys in place of tensors."""
    more: Any
    """Other entries of a wrapping optimizer's ``state_dict``."""

    def to_json(self) -> dict[str, Any]:
        """Returns the state as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def names_of(optimizer: Optimizer, model: ModelTensors) -> list[list[str]]:
    """Returns the names of an optimizer's parameters, group by group.

    Raises:
        ValueError: A parameter is not the model's.
    """
    by_id = {id(tensor): name for name, tensor in model.tensors.items()}
    names = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in by_id:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {index} (shape {tuple(parameter.shape)}) is not the "
                    "model's, and is not saved; make it a parameter of the model"
                )
        names.append([by_id[id(parameter)] for parameter in group["params"]])
    return names


def kind_of(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer's class."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate wraps


def collect(
    optimizer: Optimizer, model: ModelTensors, label: str = ""
) -> tuple[OptimizerState, dict[str, torch.Tensor]]:
    """Returns an optimizer's state, and its tensors by their keys, without a copy.

    Parameters on other ranks only are left out.

    Args:
        optimizer: The optimizer.
        model: The tensors of its model.
        label: Its name if the run has several.
    """
    prefix = f"{PREFIX}{label}/" if label else PREFIX
    groups = names_of(optimizer, model)
    flat = [name for group in groups for name in group]
    state_dict = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, where: str) -> str:
        tensors[where] = tensor.detach()
        return where

    states = {}
    for index, state in state_dict["state"].items():
        if not isinstance(index, int) or index >= len(flat):
            raise TypeError(f"the optimizer has state of {index!r}, which is not a parameter and cannot be saved")
        name = flat[index]
        if not model.tensors[name].is_meta:
            states[name] = {key: to_plain(value, f"{prefix}{name}/{key}", keep) for key, value in state.items()}
    settings = [
        to_plain({key: value for key, value in group.items() if key != "params"}, f"the optimizer's group {index}")
        for index, group in enumerate(state_dict["param_groups"])
    ]
    more = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    more_plain = to_plain(more, "the optimizer's state_dict()")
    return OptimizerState(
        kind=kind_of(optimizer), groups=groups, settings=settings, states=states, more=more_plain
    ), tensors


def merged_groups(by_rank: Sequence[list[list[str]]]) -> list[list[str]]:
    """Returns the union of the ranks' groups."""
    if len({len(groups) for groups in by_rank}) > 1:
        each = "; ".join(f"rank {rank}: {len(groups)}" for rank, groups in enumerate(by_rank))
        raise ValueError(f"the ranks' optimizers have different numbers of groups ({each}); make the same on all ranks")
    return [list(dict.fromkeys(itertools.chain.from_iterable(same_group))) for same_group in zip(*by_rank, strict=True)]


def check_fits(saved: Mapping[str, Any], optimizer: Optimizer, model: ModelTensors) -> None:
    """Raises InvalidCheckpointError, with the difference, if a saved state is of another optimizer."""
    kind = kind_of(optimizer)
    if saved["kind"] != kind:
        raise InvalidCheckpointError(
            f"the checkpoint has the state of {saved['kind']} and the optimizer is {kind}; use the saved optimizer's "
            "class, or load without one"
        )
    group_of = {name: index for index, names in enumerate(saved["groups"]) for name in names}
    own_names = {name for names in names_of(optimizer, model) for name in names}
    left_out = [name for name in group_of if name not in own_names and not model.tensors[name].is_meta]
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
    """Returns the state of the saved optimizers that fits another optimizer, as its saved state.

    Args:
        all_saved: The saved optimizers by name.
        label: The optimizer's name.
        optimizer: The optimizer; its new parameters begin without a state.
        model: The tensors of its model.
        fitting: The saved name of each unchanged parameter.
        with_settings: True if its groups receive the saved settings of their parameters, such as learning rates.
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
    own_states = {name: states[fitting[name]] for name in flat if fitting.get(name) in states}
    if kind == "LBFGS" and (came_from.keys() ^ set(flat)):
        own_states = {}  # it keeps the state of all parameters with the first one
    settings = list(own.settings)
    for index, names in enumerate(groups if with_settings else ()):
        homes = {came_from[fitting[name]] for name in names if fitting.get(name) in came_from}
        if len(homes) == 1:
            (home,) = homes
            settings[index] = alike[home[0]]["settings"][home[1]]
    fits = label in alike and isinstance(alike[label]["more"], dict) and alike[label]["more"].keys() == own.more.keys()
    more = alike[label]["more"] if fits and with_settings else own.more
    return {"kind": kind, "groups": groups, "settings": settings, "states": own_states, "more": more}


def targets(
    saved: Mapping[str, Any], model: ModelTensors, stored: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """Returns empty tensors for the saved state of this rank's parameters, by key."""
    tensors = {}
    for name, state in saved["states"].items():
        parameter = model.tensors[name]
        if parameter.is_meta:
            continue
        for key in kept_in(state):
            entry = stored[key]
            device = parameter.device if entry.shape == tuple(parameter.shape) else torch.device("cpu")
            tensors[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
    return tensors


def restore(
    saved: Mapping[str, Any], optimizer: Optimizer, model: ModelTensors, stored: Callable[[str], torch.Tensor]
) -> None:
    """Loads the saved state of this rank's parameters into an optimizer.

    Args:
        saved: The result of ``OptimizerState.to_json``.
        optimizer: A fitting optimizer, new or not.
        model: The tensors of its model.
        stored: Returns a saved tensor by its key.
    """
    groups = names_of(optimizer, model)
    group_of = {name: index for index, names in enumerate(saved["groups"]) for name in names}
    before = optimizer.state_dict()
    states, param_groups, number = {}, [], 0
    for names, current in zip(groups, before["param_groups"], strict=True):
        settings = from_plain(saved["settings"][group_of[names[0]]]) if names else current
        param_groups.append({**current, **settings, "params": list(range(number, number + len(names)))})
        for index, name in enumerate(names, start=number):
            if name in saved["states"] and not model.tensors[name].is_meta:
                states[index] = from_plain(saved["states"][name], stored)
        number += len(names)
    optimizer.load_state_dict({**before, **from_plain(saved["more"]), "state": states, "param_groups": param_groups})


def some(names: Sequence[str]) -> str:
    """Lists the first few names of many."""
    first_names = ", ".join(names[:5])
    return first_names if len(names) <= 5 else f"{first_names} and {len(names) - 5} more"
