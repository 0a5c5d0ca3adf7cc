"""Each operator of torch's OpInfo database, applied between modules to pending results of lanes.

``python -m bench.sweep --operators``; the database needs the package ``expecttest``. A model calls two towers, applies
the operator to their results, and calls a third module on what that returns. Inputs are the first samples of the
database: all from one tower, then from both; with and without gradients. The worst sample decides an outcome.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import mosaic
from bench.record import Figure, one_line
from bench.sweep.session import Case
from bench.sweep.tables import CRASHED, DIFFERENT, FAULTS, IN_PLACE, NO_PLAIN, ON_LANES
from bench.sweep.verdict import figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Handle, Options, find_modules
from mosaic.plan import plan_from_quotas

# With torch 2.11 the import of op_db forbids the whole process to set flags.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
WORST_FIRST = (CRASHED, DIFFERENT, IN_PLACE, ON_LANES)
MAX_SAMPLES = 3
MODULES = ["a", "b", "c"]
Operator = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]


class Scaled(nn.Module):
    """Multiplies arguments other than integers by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t * self.scale.to(t.dtype) if t.is_floating_point() or t.is_complex() else t.clone() for t in tensors]


class Between(nn.Module):
    """Two towers, an operator on their results, and a module on what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scaled(), Scaled(), Scaled()
        self.operator: Operator = lambda left, right: left[0] + right[0]

    def forward(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> Any:
        results = self.operator(self.a(*first), self.b(*second))
        leaves, spec = pytree.tree_flatten(results)
        plain = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
        for index, leaf in zip(plain, self.c(*[leaves[i] for i in plain]) if plain else [], strict=True):
            leaves[index] = leaf
        return pytree.tree_unflatten(leaves, spec)


def operator_cases() -> list[Case]:
    """Returns a case for each operator; ``judge_operator`` runs it."""
    names = dict.fromkeys(_name(operator) for operator in op_db if "empty" not in operator.name)  # these have no values
    return [Case(name=name, kind="operators") for name in names]


def judge_operator(case: Case) -> Iterator[Figure]:
    """Compares results and gradients of an operator's samples with the plain model's, bit for bit."""
    plain, model, sample = Between(), Between(), ([torch.ones(2)], [torch.ones(2)])
    yield figure(case, CRASHED, reason="the process died")  # unless it comes back
    backend = HostBackend(num_slots=3, num_threads=1)
    graph = find_modules(model, sample, include=MODULES).graph
    plan = plan_from_quotas([{"a": 1, "b": 1}, {"c": 1}], graph=graph, device=backend.device)
    options = Options(trial=None, cache=None)
    handle = mosaic.colocate(model, sample, plan=plan, backend=backend, modules=MODULES, options=options)
    counts: Counter[str] = Counter()
    first_reason = ""
    for call, inputs in _samples(case.name):
        for both in (False, True) if len(inputs) > 1 else (False,):
            for grad in (True, False):
                plain.operator = model.operator = lambda left, right, call=call: call([*left, *right])
                first, second = (inputs[:1], inputs[1:]) if both else (inputs, [])
                outcome, reason = _compare(plain, model, handle, first, second, grad)
                counts[outcome] += 1
                if outcome != ON_LANES and (not first_reason or outcome in FAULTS):
                    first_reason = f"{'two lanes' if both else 'one lane'}, {'' if grad else 'no '}gradients: {reason}"
    outcome = next((outcome for outcome in WORST_FIRST if counts[outcome]), NO_PLAIN)
    yield figure(
        case,
        outcome,
        reason=first_reason if outcome != ON_LANES else "",
        counts="samples equal on lanes",
        value=counts[ON_LANES],
        samples=str(counts.total()),
    )


def _compare(
    plain: Between, model: Between, handle: Handle, first: list[Any], second: list[Any], grad: bool
) -> tuple[str, str]:
    try:
        expected = _run(plain, first, second, grad)
        assert_close(_run(plain, first, second, grad), expected, rtol=0, atol=0, equal_nan=True)
    except Exception as error:  # of any kind: it is no use between modules, or differs from itself
        return NO_PLAIN, one_line(error)
    assert handle._attachment.placed is not None
    for site in handle._attachment.placed.sites.values():
        site.shapes, site.obstacle = None, None  # each sample has shapes of its own, and an operator none of the last
    try:
        _run(model, first, second, grad)  # lanes learn
        launched = handle._executor.num_launched
        ours = _run(model, first, second, grad)
        is_on_lanes = handle._executor.num_launched > launched
    except Exception as error:  # of any kind: the plain model raises none
        return CRASHED, one_line(error)
    try:
        assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    except Exception as error:  # of any kind: some layouts cannot be compared where they differ
        return DIFFERENT, one_line(error)
    return (ON_LANES, "") if is_on_lanes else (IN_PLACE, "no call went to a lane")


def _run(model: Between, first: list[Any], second: list[Any], grad: bool) -> list[Any]:
    """Runs the model; returns its results' leaves and the gradients of its inputs and parameters."""
    torch.manual_seed(0)
    model.zero_grad()
    inputs = [
        [t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex())) for t in tensors]
        for tensors in (first, second)
    ]
    with torch.set_grad_enabled(grad):
        leaves = pytree.tree_leaves(model(*inputs))
        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if wanted:
            sum(leaf.to_dense().abs().sum() if leaf.is_sparse else leaf.abs().sum() for leaf in wanted).backward()
    tensors = [*inputs[0], *inputs[1], *model.parameters()]
    gradients = [torch.zeros(0) if tensor.grad is None else tensor.grad for tensor in tensors]
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else torch.zeros(0) for leaf in leaves] + gradients


def _samples(name: str) -> Iterator[tuple[Callable[[list[Any]], Any], list[torch.Tensor]]]:
    """Yields functions that call the operator on tensors in the place of a sample's, and those tensors."""
    for operator in (operator for operator in op_db if _name(operator) == name):
        dtypes = operator.supported_dtypes("cpu")
        order = (torch.float32, torch.complex64, torch.int64, torch.bool)
        dtype = next((dtype for dtype in order if dtype in dtypes), torch.float32)
        for sample in islice(operator.sample_inputs("cpu", dtype, requires_grad=False), MAX_SAMPLES):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]

            def call(tensors: list[Any], operator=operator, leaves=leaves, spec=spec, at=at) -> Any:
                own = copy.copy(leaves)
                for index, tensor in zip(at, tensors, strict=True):
                    own[index] = tensor
                first, args, kwargs = pytree.tree_unflatten(own, spec)
                return operator(first, *args, **kwargs)

            if at:
                yield call, [leaves[index] for index in at]


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)
