"""Applies each operator of torch's OpInfo database between modules, to results that lanes are still computing.

``python -m bench.sweep.operators [--only NAME] [--part I/N] [--out FILE]``

A model calls two towers, applies the operator to their results and gives what it returns to a third module. Inputs are
the first samples of the database: all from one tower, then from both; with and without gradients. Results and gradients
are compared with the plain model's, bit for bit. A file that is there is continued. The database needs the package
``expecttest``.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import mosaic
from bench.harness import study_of
from bench.processes import PartFailedError, within
from bench.record import Figure, Study, one_line
from bench.sweep.tables import CRASHED, DIFFERENT, FAULTS, IN_PLACE, NO_PLAIN, ON_LANES, OPERATORS_STUDY
from mosaic.artifact import load, save
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Handle, Options, find_modules
from mosaic.plan import plan_from_quotas
from mosaic.profiler import ForeignLoad

# With torch 2.11 the import of op_db forbids the whole process to set flags.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
OUTCOMES = (ON_LANES, IN_PLACE, DIFFERENT, CRASHED, NO_PLAIN)
"""From the best to the worst of the samples; ``no plain loop`` where none of them runs plainly."""
MAX_SAMPLES = 3
CHUNK = 10
"""Operators of one process."""
MAX_SECONDS = 40.0
"""Of an operator."""

Operator = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]


class Scaled(nn.Module):
    """Returns its arguments, multiplied by a parameter where they are no integers."""

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


def main() -> None:
    """Runs the sweep; ends with 1 if an operator is different or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="*", help="the operators of this name or pattern")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="every N-th operator, from the I-th")
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args()
    index, count = map(int, options.part.split("/"))
    names = [name for name in dict.fromkeys(map(_name, op_db)) if fnmatchcase(name, options.only)]
    result = sweep(names[index - 1 :: count], path=options.out)
    sys.exit(any(figure.labels["outcome"] in FAULTS for figure in result.figures))


def sweep(names: Sequence[str], *, path: Path | None) -> Study:
    """Judges operators by name, prints a line for each that is not equal on lanes, and writes the file as it goes."""
    foreign = ForeignLoad()
    figures = list(load(Study, path).figures) if path is not None and path.exists() else []
    left = [name for name in names if name not in {figure.labels["operator"] for figure in figures}]
    while True:
        study = study_of(OPERATORS_STUDY, figures, foreign)
        if path is not None:
            save(study, path)
        if not left:
            break
        chunk = left[:CHUNK]
        for figure in _chunk(chunk):
            figures.append(figure)
            left.remove(figure.labels["operator"])
            if figure.labels["outcome"] != ON_LANES:
                print(f"{figure.labels['outcome']:15} {figure.labels['operator']}: {figure.reason}", flush=True)
    counted = Counter(figure.labels["outcome"] for figure in figures)
    print(", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES if counted[outcome]))
    return study


def _chunk(names: Sequence[str]) -> Iterator[Figure]:
    """Judges operators in a process of their own; one that ends it is crashed."""
    left = list(names)
    try:
        for figure in within(lambda: _judged(names), MAX_SECONDS * len(names)):
            left.remove(figure.labels["operator"])
            yield figure
    except PartFailedError as error:
        yield _figure(left[0], Counter({CRASHED: 1}), str(error), 0)


def _judged(names: Sequence[str]) -> Iterator[Figure]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    plain, model, sample = Between(), Between(), ([torch.ones(2)], [torch.ones(2)])
    backend = HostBackend(num_slots=3, num_threads=1)
    graph = find_modules(model, sample, include=["a", "b", "c"]).graph
    plan = plan_from_quotas([{"a": 1, "b": 1}, {"c": 1}], graph=graph, device=backend.device)
    options = Options(trial=None, cache=None)
    handle = mosaic.colocate(model, sample, plan=plan, backend=backend, modules=["a", "b", "c"], options=options)
    for name in names:
        yield _judge(name, plain, model, handle)


def _judge(name: str, plain: Between, model: Between, handle: Handle) -> Figure:
    counts: Counter[str] = Counter()
    reason, launched = "", 0
    for sample, inputs in _samples(name):
        for both in (False, True) if len(inputs) > 1 else (False,):
            for grad in (True, False):
                plain.operator = model.operator = lambda left, right, sample=sample: sample([*left, *right])
                first, second = (inputs[:1], inputs[1:]) if both else (inputs, [])
                outcome, said = _compare(plain, model, handle, first, second, grad)
                launched += int(outcome == ON_LANES)
                counts[outcome] += 1
                if outcome != ON_LANES and (not reason or outcome in FAULTS):
                    reason = f"{'two lanes' if both else 'one lane'}, {'' if grad else 'no '}gradients: {said}"
    return _figure(name, counts, reason, launched)


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
        spans = handle._executor.num_launched
        ours = _run(model, first, second, grad)
        is_on_lanes = handle._executor.num_launched > spans
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
    inputs = [[_leaf(tensor, grad) for tensor in tensors] for tensors in (first, second)]
    with torch.set_grad_enabled(grad):
        leaves = pytree.tree_leaves(model(*inputs))
        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if wanted:
            sum(leaf.to_dense().abs().sum() if leaf.is_sparse else leaf.abs().sum() for leaf in wanted).backward()
    tensors = [*inputs[0], *inputs[1], *model.parameters()]
    gradients = [torch.zeros(0) if tensor.grad is None else tensor.grad for tensor in tensors]
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else torch.zeros(0) for leaf in leaves] + gradients


def _leaf(tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    wants = grad and (tensor.is_floating_point() or tensor.is_complex())
    return tensor.detach().clone().requires_grad_(wants)


def _samples(name: str) -> Iterator[tuple[Callable[[list[Any]], Any], list[torch.Tensor]]]:
    """Yields samples: what calls the operator on tensors in the place of the sample's, and those."""
    for operator in op_db:
        if _name(operator) == name:
            dtypes = operator.supported_dtypes("cpu")
            order = (torch.float32, torch.complex64, torch.int64, torch.bool)
            dtype = next((dtype for dtype in order if dtype in dtypes), torch.float32)
            for sample in islice(operator.sample_inputs("cpu", dtype, requires_grad=False), MAX_SAMPLES):
                leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
                at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]
                if at:
                    yield _calling(operator, leaves, spec, at), [leaves[index] for index in at]


def _calling(operator: Any, leaves: list[Any], spec: pytree.TreeSpec, at: list[int]) -> Callable[[list[Any]], Any]:
    def call(tensors: list[Any]) -> Any:
        own = copy.copy(leaves)
        for index, tensor in zip(at, tensors, strict=True):
            own[index] = tensor
        first, args, kwargs = pytree.tree_unflatten(own, spec)
        return operator(first, *args, **kwargs)

    return call


def _figure(name: str, counts: Counter[str], reason: str, launched: int) -> Figure:
    judged = [outcome for outcome in OUTCOMES[:-1] if counts[outcome]]
    outcome = judged[-1] if judged else NO_PLAIN
    return Figure(
        name=f"{name}: samples equal on lanes",
        source="measured",
        value=float(launched),
        reason=reason if outcome != ON_LANES else "",
        labels={"operator": name, "outcome": outcome, "samples": str(counts.total())},
    )


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)


if __name__ == "__main__":
    main()
