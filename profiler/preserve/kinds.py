"""The kinds of Python objects that change in place: how one is kept, and how it is put back with its identity."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import is_, length_hint
from types import CellType, CodeType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn

MAX_ARRAY_BYTES = 1 << 26
"""A larger array of numpy's is taken for a table that is only read."""


class CannotPutBackError(Exception):
    """Something has moved and cannot be moved back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    keep: Callable[[Any], Any]
    """Returns what it is now."""
    is_same: Callable[[Any, Any], bool]
    """Whether an object still is what was kept."""
    put_back: Callable[[Any, Any], Any]
    """Makes an object what was kept."""
    inner: Callable[[Any], Any] | None = None
    """Returns the objects inside of what was kept; None for what holds none."""


def _are_same(found: Any, kept: Any) -> bool:
    return len(found) == len(kept) and all(map(is_, found, kept))


def _named(of: Callable[[Any], dict[Any, Any]], put: Any, delete: Any, *, is_ordered: bool = False) -> Kind:
    """Returns the kind of what holds the values by name that ``of`` returns; the order of names may count."""

    def is_same(found: Any, kept: dict[Any, Any]) -> bool:
        now = of(found)
        return _are_same(now, kept) and all(map(is_, now.values(), kept.values()))

    def put_back(found: Any, kept: dict[Any, Any]) -> None:
        now = of(found)
        for name in now if is_ordered and not _are_same(now, kept) else now.keys() - kept.keys():
            delete(found, name)
        for name, value in kept.items():
            put(found, name, value)

    return Kind(of, is_same, put_back, dict.values)


def _mapping(base: Any, copy: Callable[[Any], dict[Any, Any]]) -> Kind:
    """Returns the kind of dicts, to be read and written by the methods of ``base``, whatever a subclass has."""
    named = _named(copy, base.__setitem__, base.__delitem__, is_ordered=True)

    def is_same(found: Any, kept: dict[Any, Any]) -> bool:
        return named.is_same(found, kept) if kept else not base.__len__(found)  # empty, as most dicts of a part are

    return replace(named, is_same=is_same)


def _state(read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Kind:
    return Kind(read, lambda found, kept: False, write)


def _holder(held: Callable[[Any], tuple[Any, ...]]) -> Kind:
    """Returns the kind of what does not change itself."""
    return Kind(held, lambda found, kept: True, lambda found, kept: None, iter)


def _of_class(found: type) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if not name.startswith("__")}


def _of_slots(found: Any) -> dict[str, Any]:
    state = object.__getstate__(found)  # type: ignore[attr-defined]  # of what has slots: its dict, and they
    return state[1] if type(state) is tuple else {}


def _of_cell(found: CellType) -> dict[str, Any]:
    try:
        return {"cell_contents": found.cell_contents}
    except ValueError:  # nothing is in it yet
        return {}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _of_globals(found: FunctionType) -> dict[str, Any]:
    known = found.__globals__
    return {name: known[name] for name in _names_in(found.__code__) if name in known}


def _keep_array(found: Any) -> Any:
    return found.copy() if found.flags.writeable and found.nbytes <= MAX_ARRAY_BYTES else None


def _is_same_array(found: Any, kept: Any) -> bool:
    return kept is None or found.tobytes() == kept.tobytes()


def _position(found: Any) -> Any:
    """Returns where an iterator stands, as far as it shows."""
    if isinstance(found, GeneratorType):
        frame = found.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    return repr(found) if isinstance(found, itertools.count) else length_hint(found)


def _cannot_move_back(found: Any, kept: Any) -> None:
    raise CannotPutBackError(f"the {type(found).__name__} went on and cannot go back; keep a number or a list instead")


CLASS = _named(_of_class, type.__setattr__, type.__delattr__)
"""The attributes of a class."""
SLOTS = _named(_of_slots, object.__setattr__, object.__delattr__)
"""The attributes of an object that has slots."""
GLOBALS = _named(
    _of_globals,
    lambda found, *item: found.__globals__.__setitem__(*item),
    lambda found, name: found.__globals__.pop(name),
)
"""The globals that a function names."""
ITERATOR = Kind(_position, lambda found, kept: _position(found) == kept, _cannot_move_back)
"""What can only be seen to have moved."""

ITERATORS: tuple[type, ...] = (
    *(GeneratorType, itertools.count),
    *map(type, (iter([]), iter(()), iter(range(0)), iter({}))),
)

_KINDS: dict[type, Kind] = {
    OrderedDict: _mapping(OrderedDict, lambda found: dict(OrderedDict.items(found))),  # whose order is its own
    dict: _mapping(dict, dict.copy),
    list: Kind(list, _are_same, lambda found, kept: list.__setitem__(found, slice(None), kept), iter),
    tuple: _holder(tuple),
    deque: Kind(list, _are_same, lambda found, kept: (deque.clear(found), deque.extend(found, kept)), iter),
    set: Kind(set, set.__eq__, lambda found, kept: (set.clear(found), set.update(found, kept)), iter),
    bytearray: Kind(bytes, bytearray.__eq__, lambda found, kept: found.__setitem__(slice(None), kept)),
    torch.Generator: _state(torch.Generator.get_state, torch.Generator.set_state),
    random.SystemRandom: _holder(lambda found: ()),
    random.Random: _state(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _state(lambda found: found.get_state(legacy=False), np.random.RandomState.set_state),
    np.random.Generator: _holder(lambda found: (found.bit_generator,)),
    np.random.BitGenerator: _state(lambda found: found.state, lambda found, kept: setattr(found, "state", kept)),
    np.ndarray: Kind(_keep_array, _is_same_array, lambda found, kept: found.__setitem__(..., kept)),
    CellType: _named(_of_cell, CellType.__setattr__, CellType.__delattr__),
    # A module's class; its attributes are a dict of their own.
    nn.Module: Kind(type, lambda f, kept: type(f) is kept, lambda f, kept: object.__setattr__(f, "__class__", kept)),
}
"""The first that fits counts."""


def kind_of(found: type) -> Kind | None:
    """Returns how objects of a type are kept; None for those that hold nothing or of which nothing is known."""
    return next((kind for base, kind in _KINDS.items() if issubclass(found, base)), None)
