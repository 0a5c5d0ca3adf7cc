"""The arguments of a module that have a row for each sample, found by running it on some of the rows.

The same trial finds modules whose rows depend on each other, which would compute something else on parts of a batch:
in the mode in which the module trains, and in the one in which it is evaluated. Its rows have to differ, or a mean over
them would pass; where the sample's do not, as in a sample of one row, others are made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.engine.finding.find import uncompiled
from mosaic.errors import UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.find.structure import flatten, unflatten
from mosaic.profiler import Subject

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest value: rows computed beside fewer others differ by rounding by no more than this."""
_COARSE = 1e-2
"""The same for bfloat16 and float16, and on GPUs, which may round float32."""
_MAX_LEFT_OUT = 2
"""Arguments that may have the batch's size by accident, such as a mask as wide as the batch."""


def rows_of(subject: Subject) -> tuple[bool, ...]:
    """Returns for each argument of a module's call whether its leading dimension is the batch."""
    leaves = flatten((subject.args, subject.kwargs))[0]
    trains = any(part.training for part in subject.module.modules())
    runs = [_Runs(subject, training=training) for training in ((True, False) if trains else (False,))]
    whole = runs[0](leaves)
    for batched in _choices(leaves, whole):
        if all(each.splits(leaves, batched) for each in runs):
            return batched
    raise UnsupportedModelError(
        f"{subject.name!r} cannot be split over ranks: run on some of its rows, of arguments {_shapes(leaves)}, it "
        f"does not return these rows of its results {_shapes(whole)}; either one of them has no row for each sample, "
        "rows depend on each other, it draws numbers by their values, or it keeps statistics of them in buffers; leave "
        f"it where it is called: colocate(..., exclude=[{subject.name!r}])"
    )


class _Runs:
    """Runs of a module in one mode, each from the same state.

    Attributes:
        written: The buffers that the last one wrote to.
    """

    def __init__(self, subject: Subject, *, training: bool) -> None:
        self._subject = subject
        self._training = training
        self._spec = flatten((subject.args, subject.kwargs))[1]
        self.written: list[torch.Tensor] = []

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        args, kwargs = unflatten(list(leaves), self._spec)
        module = self._subject.module
        settings = self._subject.settings if self._subject.settings is not None else nullcontext
        with preserved(module, alone=(self._subject,)), torch.no_grad(), settings(), uncompiled():
            for part in module.modules():
                part.training = part.training and self._training
            versions = {id(buffer): buffer._version for buffer in module.buffers()}
            with sdpa_kernel(SDPBackend.MATH), _ConstantDraws():  # fused attention draws by itself
                results = flatten(module(*args, **kwargs))[0]
            after = [buffer for part in module.modules() for buffer in part._buffers.values() if buffer is not None]
            self.written = [buffer.clone() for buffer in after if versions.get(id(buffer)) != buffer._version]
            return results

    def splits(self, leaves: Sequence[Any], batched: Sequence[bool]) -> bool:
        """True if some rows of the arguments give these rows of the results."""
        many, rows, taken = _rows_that_differ(leaves, batched)
        try:
            whole, written = self(many), self.written
            results = self([leaf[:taken] if cut else leaf for leaf, cut in zip(many, batched, strict=True)])
        except Exception:  # of any kind: the module was called with what it may not be made for
            return False
        if any(isinstance(leaf, torch.Tensor) and len(leaf) != rows for leaf in whole):
            return False
        wanted = [leaf[:taken] if isinstance(leaf, torch.Tensor) else leaf for leaf in whole]
        tolerance = _tolerance([*many, *whole, *self._subject.module.parameters()])
        return _are_alike([*results, *self.written], [*wanted, *written], tolerance)


def _rows_that_differ(leaves: Sequence[Any], batched: Sequence[bool]) -> tuple[list[Any], int, int]:
    """Returns arguments with rows that differ, how many these are, and an odd number of them to try alone."""
    cut = [leaf for leaf, has_rows in zip(leaves, batched, strict=True) if has_rows]
    rows = len(cut[0])
    taken = max(1, (rows // 2 - 1) | 1)
    if any(not torch.equal(leaf, leaf[:1].expand_as(leaf)) for leaf in cut):
        return list(leaves), rows, taken
    rest = max(1, rows - taken)

    def differing(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf[:taken], _another(leaf[:1]).expand(rest, *leaf.shape[1:])])

    results = [differing(leaf) if has_rows else leaf for leaf, has_rows in zip(leaves, batched, strict=True)]
    return results, taken + rest, taken


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns a row that differs from one, and can be taken for one of the same data."""
    turned = row.flip(tuple(range(1, row.dim())))
    if row.is_floating_point():
        return turned * 0.5 + 0.1
    if row.dtype == torch.bool or not torch.equal(turned, row):
        return turned
    return torch.where(row > 0, row - 1, row + 1)


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


def _are_alike(results: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> bool:
    return len(results) == len(wanted) and all(
        a.shape == b.shape and _is_close(a, b, tolerance)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b)
        for a, b in zip(results, wanted, strict=True)
    )


def _tolerance(tensors: Sequence[Any]) -> float:
    """Returns how far rounding may go, as a part of the largest value."""
    floats = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]
    if torch.is_autocast_enabled("cpu") or any(tensor.device.type != "cpu" for tensor in floats):
        return _COARSE
    return max((_TOLERANCES.get(tensor.dtype, _COARSE) for tensor in floats), default=_COARSE)


def _is_close(result: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    if not result.is_floating_point():
        return True  # an index of the largest value may change by rounding
    result, wanted = result.double(), wanted.double()
    finite = wanted[wanted.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(result, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _shapes(leaves: Sequence[Any]) -> str:
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)) or "no tensors"


class _ConstantDraws(TorchDispatchMode):
    """Has operators that draw make constants, or dropout would look like interaction."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs an operator; replaces what it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:  # the dropout of GPUs
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        drawn = func(*args, **kwargs)
        if func.__name__.startswith("randperm"):  # the identity would hide that rows change places
            return drawn.copy_(drawn.sort().values.roll(-1))
        if not isinstance(drawn, torch.Tensor) or _reads_values(func):
            return drawn  # it depends on more than on what is drawn, so the module is refused
        return drawn.fill_(0.5 if drawn.is_floating_point() else drawn.dtype == torch.bool)


def _reads_values(func: Any) -> bool:
    """True if what an operator draws may depend on tensors' values, unlike that of ``normal_`` or ``rand_like``."""
    tensors = [argument for argument in func._schema.arguments if isinstance(argument.type, torch.TensorType)]
    is_written = [tensor.alias_info is not None and tensor.alias_info.is_write for tensor in tensors]
    return is_written not in ([], [True]) and not func.__name__.partition(".")[0].endswith("_like")
