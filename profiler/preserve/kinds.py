"""The kinds of Python objects that change in place: how one is kept, and how it is put back with its identity."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def _mapping(base: Any) -> Kind:
    """Returns the kind of dicts whose own methods are those of ``base``, whatever a subclass makes of them."""

    def keep(found: Any) -> dict[Any, Any]:
        return dict(found if type(found) is base else base.items(found))

    def is_same(found: Any, kept: dict[Any, Any]) -> bool:
        now = found if type(found) is base else keep(found)
        return _are_same(now, kept) and all(map(is_, now.values(), kept.values()))

    def put_back(found: Any, kept: dict[Any, Any]) -> None:
        if not _are_same(keep(found), kept):
            base.clear(found)
        for key, value in kept.items():
            base.__setitem__(found, key, value)

    return Kind(keep, is_same, put_back, dict.values)


def _attributes(of: Callable[[Any], dict[str, Any]], put: Any, delete: Any) -> Kind:
    """Returns the kind of what ``of`` an object lies in no dict of its own."""

    def is_same(found: Any, kept: dict[str, Any]) -> bool:
        now = of(found)
        return now.keys() == kept.keys() and all(now[name] is value for name, value in kept.items())

    def put_back(found: Any, kept: dict[str, Any]) -> None:
        now = of(found)
        for name in now.keys() - kept.keys():
            delete(found, name)
        for name, value in kept.items():
            if name not in now or now[name] is not value:
                put(found, name, value)

    return Kind(of, is_same, put_back, dict.values)


def _state(read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Kind:
    return Kind(read, lambda found, kept: False, write)


def _holder(held: Callable[[Any], tuple[Any, ...]]) -> Kind:
    """Returns the kind of what does not change itself."""
    return Kind(held, lambda found, kept: True, lambda found, kept: None, iter)


def _filled(clear: Callable[[Any], None], fill: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def put_back(found: Any, kept: Any) -> None:
        clear(found)
        fill(found, kept)

    return put_back


def _of_class(found: type) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if not name.startswith("__")}


def _of_slots(found: Any) -> dict[str, Any]:
    state = object.__getstate__(found)  # type: ignore[attr-defined]  # of what has slots: its dict, and they
    return state[1] if type(state) is tuple else {}


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


def _position(found: Any) -> Any:
    """Returns where an iterator stands, as far as it shows."""
    if isinstance(found, GeneratorType):
        frame = found.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    return repr(found) if isinstance(found, itertools.count) else length_hint(found)


def _cannot_move_back(found: Any, kept: Any) -> None:
    raise CannotPutBackError(f"the {type(found).__name__} went on and cannot go back; keep a number or a list instead")


CLASS = _attributes(_of_class, type.__setattr__, type.__delattr__)
"""The attributes of a class."""
SLOTS = _attributes(_of_slots, object.__setattr__, object.__delattr__)
"""The attributes of an object that has slots."""
GLOBALS = _attributes(
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

_KINDS: tuple[tuple[Any, Kind], ...] = (
    (OrderedDict, _mapping(OrderedDict)),
    (dict, _mapping(dict)),
    (list, Kind(list, _are_same, lambda found, kept: list.__setitem__(found, slice(None), kept), iter)),
    (tuple, _holder(tuple)),
    (deque, Kind(list, _are_same, _filled(deque.clear, deque.extend), iter)),
    (set, Kind(set, lambda found, kept: found == kept, _filled(set.clear, set.update), iter)),
    (bytearray, Kind(bytes, lambda found, kept: found == kept, lambda f, kept: f.__setitem__(slice(None), kept))),
    (torch.Generator, _state(lambda found: found.get_state(), lambda found, kept: found.set_state(kept))),
    (random.SystemRandom, _holder(lambda found: ())),
    (random.Random, _state(lambda found: found.getstate(), lambda found, kept: found.setstate(kept))),
    (
        np.random.RandomState,
        _state(lambda found: found.get_state(legacy=False), lambda found, kept: found.set_state(kept)),
    ),
    (np.random.Generator, _holder(lambda found: (found.bit_generator,))),
    (np.random.BitGenerator, _state(lambda found: found.state, lambda found, kept: setattr(found, "state", kept))),
    (
        np.ndarray,
        Kind(
            _keep_array,
            lambda found, kept: kept is None or found.tobytes() == kept.tobytes(),
            lambda found, kept: found.__setitem__(..., kept),
        ),
    ),
    (
        CellType,
        Kind(
            lambda found: (found.cell_contents,),
            lambda found, kept: found.cell_contents is kept[0],
            lambda found, kept: setattr(found, "cell_contents", kept[0]),
            iter,
        ),
    ),
    (
        nn.Module,  # its class; its attributes are a dict of their own
        Kind(type, lambda f, kept: type(f) is kept, lambda f, kept: object.__setattr__(f, "__class__", kept)),
    ),
)
"""The first that fits counts."""


def kind_of(found: type) -> Kind | None:
    """Returns how objects of a type are kept; None for those that hold nothing or of which nothing is known."""
    return next((kind for base, kind in _KINDS if issubclass(found, base)), None)
