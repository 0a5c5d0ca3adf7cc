"""The kinds of Python objects that change in place: how one is kept, and how it is put back with its identity."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_, length_hint
from types import CellType, GeneratorType
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
    put_back: Callable[[Any, Any], None]
    """Makes an object what was kept."""
    inner: Callable[[Any], Any] | None = None
    """Returns the objects inside of what was kept; None for what holds none."""


def _mapping(base: Any) -> Kind:
    items, clear, put = base.items, base.clear, base.__setitem__

    def keep(found: Any) -> dict[Any, Any]:
        return dict(found if type(found) is base else items(found))

    def is_same(found: Any, kept: dict[Any, Any]) -> bool:
        if len(found) != len(kept):
            return False
        now = found if type(found) is base else dict(items(found))
        return all(map(is_, now.values(), kept.values())) and all(map(is_, now, kept))

    def put_back(found: Any, kept: dict[Any, Any]) -> None:
        if list(map(id, dict(items(found)))) != list(map(id, kept)):
            clear(found)
        for key, value in kept.items():
            put(found, key, value)

    return Kind(keep, is_same, put_back, lambda kept: kept.values())


def _replace_deque(found: Any, kept: list[Any]) -> None:
    deque.clear(found)
    deque.extend(found, kept)


def _replace_set(found: Any, kept: set[Any]) -> None:
    set.clear(found)
    set.update(found, kept)


def _are_same(found: Any, kept: Any) -> bool:
    return len(found) == len(kept) and all(map(is_, found, kept))


def _always(found: Any, kept: Any) -> bool:
    return True


def _never(found: Any, kept: Any) -> bool:
    return False


def _nothing(found: Any, kept: Any) -> None:
    pass


def _keep_array(found: Any) -> Any:
    return found.copy() if found.flags.writeable and found.nbytes <= MAX_ARRAY_BYTES else None


def _is_same_array(found: Any, kept: Any) -> bool:
    return kept is None or found.tobytes() == kept.tobytes()


def _put_back_array(found: Any, kept: Any) -> None:
    found[...] = kept


def _of_class(found: type) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if not name.startswith("__")}


def _of_slots(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in slots_of(type(found)) if hasattr(found, name)}


def _attributes(of: Callable[[Any], dict[str, Any]], base: Any) -> Kind:
    """Attributes that are in no dict of their own, set and deleted as those of ``base`` are."""

    def is_same(found: Any, kept: dict[str, Any]) -> bool:
        now = of(found)
        return now.keys() == kept.keys() and all(now[name] is value for name, value in kept.items())

    def put_back(found: Any, kept: dict[str, Any]) -> None:
        for name in of(found).keys() - kept.keys():
            base.__delattr__(found, name)
        for name, value in kept.items():
            if of(found).get(name, kept) is not value:
                base.__setattr__(found, name, value)

    return Kind(of, is_same, put_back, lambda kept: kept.values())


def _position(found: Any) -> Any:
    """Returns where an iterator stands, as far as it shows."""
    if isinstance(found, GeneratorType):
        frame = found.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    return repr(found) if isinstance(found, itertools.count) else length_hint(found)


def _cannot_move_back(found: Any, kept: Any) -> None:
    raise CannotPutBackError(f"the {type(found).__name__} went on and cannot go back; keep a number or a list instead")


PART = Kind(
    type, lambda found, kept: type(found) is kept, lambda found, kept: object.__setattr__(found, "__class__", kept)
)
"""A part of a model: its class; its attributes are a dict of their own."""
CLASS = _attributes(_of_class, type)
"""The attributes of a class."""
SLOTS = _attributes(_of_slots, object)
"""The attributes of an object that has slots."""

_KINDS: tuple[tuple[Any, Kind], ...] = (
    (OrderedDict, _mapping(OrderedDict)),
    (dict, _mapping(dict)),
    (list, Kind(list, _are_same, lambda found, kept: list.__setitem__(found, slice(None), kept), iter)),
    (tuple, Kind(lambda found: found, _always, _nothing, iter)),
    (deque, Kind(list, _are_same, _replace_deque, iter)),
    (set, Kind(set, lambda found, kept: found == kept, _replace_set, iter)),
    (bytearray, Kind(bytes, lambda found, kept: found == kept, lambda f, kept: f.__setitem__(slice(None), kept))),
    (torch.Generator, Kind(lambda f: f.get_state(), _never, lambda f, kept: f.set_state(kept))),
    (random.SystemRandom, Kind(id, _always, _nothing)),
    (random.Random, Kind(lambda f: f.getstate(), _never, lambda f, kept: f.setstate(kept))),
    (np.random.RandomState, Kind(lambda f: f.get_state(legacy=False), _never, lambda f, kept: f.set_state(kept))),
    (np.random.Generator, Kind(lambda f: f.bit_generator, _always, _nothing, lambda kept: (kept,))),
    (np.random.BitGenerator, Kind(lambda f: f.state, _never, lambda f, kept: setattr(f, "state", kept))),
    (np.ndarray, Kind(_keep_array, _is_same_array, _put_back_array)),
    (
        CellType,
        Kind(
            lambda f: (f.cell_contents,),
            lambda f, kept: f.cell_contents is kept[0],
            lambda f, kept: setattr(f, "cell_contents", kept[0]),
            iter,
        ),
    ),
    (nn.Module, PART),
)
"""The first that fits counts."""

_ITERATORS: tuple[type, ...] = (
    *(GeneratorType, itertools.count),
    *map(type, (iter([]), iter(()), iter(range(0)), iter({}))),
)
ITERATOR = Kind(_position, lambda found, kept: _position(found) == kept, _cannot_move_back)
"""What can only be seen to have moved."""


def kind_of(found: type) -> Kind | None:
    """Returns how objects of a type are kept; None for those that hold nothing or of which nothing is known."""
    return next((kind for base, kind in _KINDS if issubclass(found, base)), None)


def is_iterator(found: type) -> bool:
    """Whether objects of a type can only be seen to have moved."""
    return issubclass(found, _ITERATORS)


def slots_of(found: type) -> Iterator[str]:
    """Yields the attributes for which a class has slots."""
    for base in found.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
