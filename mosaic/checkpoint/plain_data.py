"""Plain data as JSON: settings of optimizers, schedulers, the user's ``extra``.

JSON has no tuples, counters, number keys or tensors; these become objects with a ``$`` key, and reading returns equal
values. Reading constructs these types only and never looks up a class by name.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from mosaic.checkpoint.tensor_file import TensorSpec, bytes_of, dtype_of

MAX_TENSOR_BYTES = 1 << 20
"""Size limit of a tensor inside JSON."""

Keep = Callable[[torch.Tensor, str], str]
"""Stores a tensor outside the JSON under its position; returns the key."""


def to_plain(value: Any, where: str, keep: Keep | None = None) -> Any:
    """Returns a value as JSON data.

    Args:
        value: Nested dicts, lists and tuples of numbers, strings, None and tensors.
        where: Its name, for errors.
        keep: Stores a tensor elsewhere; by default it becomes part of the JSON.

    Raises:
        TypeError: The value contains another type; names it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.Tensor):
        return {"$": "kept", "key": keep(value, where)} if keep is not None else _inline(value, where)
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
    """Inverts ``to_plain``.

    Args:
        value: JSON data.
        stored: Returns a tensor stored elsewhere, by its key.
    """
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
        content, dtype = bytearray(base64.b64decode(value["base64"])), dtype_of(value["dtype"])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    raise ValueError(f"{kind!r} is no kind of value in a checkpoint of this version")


def kept_in(value: Any) -> list[str]:
    """Returns the keys of the tensors stored elsewhere."""
    if isinstance(value, list):
        return [key for item in value for key in kept_in(item)]
    if not isinstance(value, dict):
        return []
    if value.get("$") == "kept":
        return [value["key"]]
    return [key for item in value.values() for key in kept_in(item)]


def _inline(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    spec = TensorSpec.of(where, tensor)
    if tensor.is_meta:
        raise TypeError(f"{where} is a tensor without content (on the meta device); leave it out")
    if spec.num_bytes > MAX_TENSOR_BYTES:
        raise TypeError(
            f"{where} is a tensor of {spec.num_bytes} bytes, and {MAX_TENSOR_BYTES} fit into the JSON of a "
            "checkpoint; make it a buffer of the model"
        )
    text = base64.b64encode(bytes_of(tensor)).decode()
    return {"$": "tensor", "dtype": spec.dtype, "shape": list(spec.shape), "base64": text}
