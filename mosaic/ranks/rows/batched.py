"""Which arguments of a module have a row for each sample: tried out, by running it on half of them.

The same trial finds modules whose rows depend on each other, which would compute something else on parts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.errors import UnsupportedModelError
from mosaic.profiler import Subject, preserved

_TOLERANCE = 1e-2
"""Of the largest value: rows computed beside fewer others differ by rounding, in bfloat16 by this much."""
_MAX_LEFT_OUT = 2
"""How many arguments may have the batch's size by accident, such as a mask as wide as the batch."""


def rows_of(model: nn.Module, subject: Subject) -> tuple[bool, ...]:
    """Returns for each argument of a module's call whether its leading dimension is the batch.

    Raises:
        UnsupportedModelError: No choice of arguments splits the module's results by rows.
    """
    leaves, spec = flatten((subject.args, subject.kwargs))
    with preserved(model, alone=(subject,)), _settings(subject), _evaluating(subject.module), torch.no_grad():

        def call(given: Sequence[Any]) -> list[Any]:
            args, kwargs = unflatten(list(given), spec)
            return flatten(subject.module(*args, **kwargs))[0]

        whole = call(leaves)
        for batched in _choices(leaves, whole):
            if _splits(call, leaves, whole, batched):
                return batched
    given, made = _shapes(leaves), _shapes(whole)
    raise UnsupportedModelError(
        f"{subject.name!r} cannot be split over ranks: run on half of its rows, of arguments {given}, it does not "
        f"return half of its results {made}; either one of them has no row for each sample, or rows depend on each "
        f"other; leave it where it is called: colocate(..., exclude=[{subject.name!r}])"
    )


def with_batch(model: nn.Module, subject: Subject) -> Subject:
    """Returns a module that knows how many samples its batch has.

    Raises:
        UnsupportedModelError: As ``rows_of``.
    """
    leaves = flatten((subject.args, subject.kwargs))[0]
    rows = next(len(leaf) for leaf, cut in zip(leaves, rows_of(model, subject), strict=True) if cut)
    return replace(subject, batch=rows)


def _choices(leaves: Sequence[Any], whole: Sequence[Any]) -> Iterator[tuple[bool, ...]]:
    """Yields choices of arguments, the likeliest first: those that are as long as all results are."""
    lengths = {len(leaf) for leaf in whole if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(lengths) != 1 or any(isinstance(leaf, torch.Tensor) and not leaf.dim() for leaf in whole):
        return
    (rows,) = lengths
    fitting = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows
    ]
    for count in range(min(_MAX_LEFT_OUT, len(fitting) - 1) + 1 if fitting else 0):
        for left_out in combinations(fitting, count):
            yield tuple(index in fitting and index not in left_out for index in range(len(leaves)))


def _splits(
    call: Callable[[Sequence[Any]], list[Any]], leaves: Sequence[Any], whole: Sequence[Any], batched: Sequence[bool]
) -> bool:
    rows = next(len(leaf) for leaf, cut in zip(leaves, batched, strict=True) if cut)
    take: Callable[[torch.Tensor], torch.Tensor] = (
        (lambda tensor: tensor[: rows // 2]) if rows > 1 else lambda tensor: torch.cat([tensor, tensor])
    )
    given = [take(leaf) if cut else leaf for leaf, cut in zip(leaves, batched, strict=True)]
    try:
        made = call(given)
    except Exception:  # of any kind: the module was called with what it may not be made for
        return False
    wanted = [take(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in whole]
    if not _are_alike(made, wanted, lambda a, b: a.shape == b.shape):
        return False
    # A module that draws random numbers differs from itself: its shapes have to do.
    return _are_alike(made, wanted, _is_close) or not _are_alike(call(leaves), whole, torch.equal)


def _are_alike(made: Sequence[Any], wanted: Sequence[Any], same: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    return len(made) == len(wanted) and all(
        same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else type(a) is type(b)
        for a, b in zip(made, wanted, strict=True)
    )


def _is_close(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not made.is_floating_point():
        return True  # an index of the largest value may change by rounding
    made, wanted = made.float(), wanted.float()
    finite = wanted[wanted.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(made, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module into the mode without dropout, part by part, and back."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def _settings(subject: Subject) -> Iterator[None]:
    with ExitStack() as stack:
        if subject.settings is not None:
            stack.enter_context(subject.settings())
        yield


def _shapes(leaves: Sequence[Any]) -> str:
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)) or "no tensors"
