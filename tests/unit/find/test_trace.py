"""Labels of a traced run go where values go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mosaic.find.trace import Tracer

X, Y = frozenset("x"), frozenset("y")


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(4, 2)
    rows[:2] = x
    torch.add(rows[2:], y, out=rows[2:])
    return rows[:1]


CASES: dict[str, tuple[Callable[..., torch.Tensor], frozenset[str]]] = {
    "an operator": (lambda x, y: (x + y).relu(), X | Y),
    "a view": (lambda x, y: x.view(4)[1:], X),
    "memory that is written in parts": (written, X | Y),
    "its shape": (lambda x, y: torch.ones_like(x) + x.new_zeros(2) + y.shape[0], frozenset()),
    "another data type": (lambda x, y: x.bfloat16().data, X),
    "a sparse tensor": (lambda x, y: torch.sparse.mm(x.to_sparse(), y), X | Y),
}


@pytest.mark.parametrize("without", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_a_result_has_the_labels_of_the_values_that_it_stems_from(name: str, without: Callable[..., object]):
    run, labels = CASES[name]
    tracer = Tracer(frozenset())
    with without():
        x, y = torch.randn(2, 2), torch.randn(2, 2)
        tracer.mark(x, X)
        tracer.mark(y, Y)
        with tracer.following({}):
            result = run(x, y)
    assert tracer.labels([result]) == labels
