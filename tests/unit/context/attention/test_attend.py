from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from attention_cases import BLOCK, MASKS, attended, dense, inputs_of

from mosaic.context.attention import Attend, ContextBatch, attend
from mosaic.context.attention.exchange import Alone, Pending
from mosaic.context.plan import plan_context

MASK = MASKS["gemma, packed, padded"]


def alone() -> Attend:
    return Attend(plan_context(MASK, 1, block=BLOCK))


def tensors(heads: int = 4, *, q: int = 4, tokens: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    tokens = alone().plan.local_tokens if tokens is None else tokens
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, tokens, 8, generator=draw).to(dtype) for count in (q, heads, heads)]


def test_windows_caps_and_sinks_are_dense_attention_with_them():
    given, sinks, scale = inputs_of(MASK, torch.float64), torch.linspace(-1, 2, 6, dtype=torch.float64), 0.3
    q, k, v, own_sinks = (one.clone().requires_grad_() for one in (*given[:3], sinks))
    scores = 0.7 * torch.tanh(q @ k.repeat_interleave(3, 1).transpose(-1, -2) * scale / 0.7)
    scores = scores.masked_fill(~torch.from_numpy(MASK.dense(40)), -torch.inf)
    shares = torch.cat([scores, own_sinks.view(1, 6, 1, 1).expand(*scores.shape[:3], 1)], -1).softmax(-1)
    expected = shares[..., :-1] @ v.repeat_interleave(3, 1)
    expected.backward(given[3])
    attend, batch = (own := alone()), ContextBatch(attend=own)
    mine = [one.clone().requires_grad_() for one in (*given[:3], sinks)]
    cut = (batch.cut(one, dim=2) for one in mine[:3])
    out = attend(*cut, scale=scale, window=40, softcap=0.7, sinks=mine[3])
    out.backward(batch.cut(given[3], dim=2))
    assert float((out[:, :, : MASK.num_tokens] - expected).detach().abs().max()) < 1e-13
    for one, other in zip(mine, (q, k, v, own_sinks), strict=True):
        assert float((one.grad - other.grad).abs().max()) < 1e-12


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
def test_shorter_types_are_dense_attention_within_their_precision(
    dtype: torch.dtype, within: float, monkeypatch: pytest.MonkeyPatch
):
    given, summed, return_gradient = inputs_of(MASK, torch.float64), set(), Alone.return_gradient
    monkeypatch.setattr(Alone, "return_gradient", lambda own, one: summed.add(one.dtype) or return_gradient(own, one))
    found = attended(alone(), tuple(one.to(dtype) for one in given))
    for own, other in zip(found, dense(MASK, tuple(one.to(dtype).double() for one in given)), strict=True):
        assert own.dtype == dtype
        assert float((own.double() - other).norm() / other.norm()) < within
    assert summed == {torch.float32}  # over tiles and ranks


def test_at_most_two_fetched_heads_and_two_sums_are_alive(monkeypatch: pytest.MonkeyPatch):
    alive: dict[str, weakref.WeakSet[torch.Tensor]] = {"fetched": weakref.WeakSet(), "sums": weakref.WeakSet()}
    most = {"fetched": 0, "sums": 0}

    class Counted(Alone):
        def fetch(self, own: torch.Tensor) -> Pending:
            return self._noted("fetched", own.clone())

        def return_gradient(self, gradient: torch.Tensor) -> Pending:
            return self._noted("sums", gradient)

        def _noted(self, what: str, made: torch.Tensor) -> Pending:
            alive[what].add(made)
            most[what] = max(most[what], len(alive[what]))
            return lambda: made

    monkeypatch.setattr(attend, "Alone", Counted)
    q, k, v = (one.requires_grad_() for one in tensors(6, q=12))
    gc.disable()  # what is no longer needed is let go of at once, not when there is time
    try:
        out = alone()(q, k, v)
        assert (most, len(alive["fetched"])) == ({"fetched": 2, "sums": 0}, 0)
        out.sum().backward()
    finally:
        gc.enable()
    assert most == {"fetched": 2, "sums": 2}
    assert len(alive["fetched"]) == len(alive["sums"]) == 0


def test_local_tensors_alone_are_kept_for_the_backward_pass():
    q, k, v = (one.requires_grad_() for one in tensors())
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        alone()(q, k, v)
    assert {one.data_ptr() for one in kept} == {one.data_ptr() for one in (q, k, v)}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"tokens": 10}, "this rank has 288 places: pass .* A cache of earlier keys is not supported"),
        ({"q": 6}, "6 query heads are not a multiple of 4 heads of keys"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(shapes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        alone()(*tensors(**shapes))
