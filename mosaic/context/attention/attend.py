"""Attention of one sequence over ranks, one key head at a time; the next is fetched during the computation.

As in Llama 3 and Cornstarch (section 5.3), keys and values are sent and queries stay::

    head of keys       0           1           2
    fetch          [ 0 ][ 1 ]     [ 2 ]                  asynchronous, into a second buffer
    attention           [ 0     ][ 1     ][ 2     ]
    return                        (backward: gradients of keys and values of each head, asynchronous too)

At most two fetched heads are in memory, and only local tensors between forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from mosaic.context.attention.exchange import Alone, FetchNeeded, Pending
from mosaic.context.attention.kernels import BlockRows, FlexKernel, Scores, make_kernel
from mosaic.context.plan import ContextPlan
from mosaic.errors import RankFailedError

IGNORED = -100
"""Label of tokens without one."""


class Attend:
    """The attention of all layers over one sequence; created once per sequence on every rank of the group.

    The constructor is collective: ranks compare their plans. Gradients of keys and values are sums over ranks, so their
    last bits depend on the number of ranks. On CPU cores, outputs and gradients of queries have the same bits on any
    number of ranks.

    Args:
        plan: Plan of the sequence, the same on all ranks.
        group: Process group of the context ranks; None: the default group, or no group for one rank.
        device: Device of the tensors: compiled FlexAttention on CUDA, plain torch elsewhere.
        agreed: True if ranks have already compared their plans.

    Raises:
        RankFailedError: Ranks have different plans; lists these ranks.
        ValueError: The size of the group differs from the plan.
    """

    def __init__(
        self,
        plan: ContextPlan,
        group: Any = None,
        *,
        device: torch.device | str = "cpu",
        agreed: bool = False,
    ) -> None:
        self.plan, self.device = plan, torch.device(device)
        self.group, self.rank = group, 0
        self.calls: dict[int | None, int] = {}
        """Number of calls by window."""
        if plan.ranks > 1 or group is not None:
            self.rank = dist.get_rank(group) if agreed else _check_agreement(plan, group, self.device)
        self.layers: dict[int | None, AttendLayer] = {}
        for window in {None, *plan.windows}:  # in a call, torch.compile would trace numpy's code
            self.layer(window)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of this rank's tokens, shape (batch, query heads, local tokens, value width).

        Under autocast it computes in autocast's dtype, like torch's attention.

        Args:
            q: Queries of this rank's tokens in the order of ``plan.order_of``: (batch, heads, local tokens, width).
            k: Keys: (batch, heads, local tokens, width); each head has the same number of query heads.
            v: Values: (batch, heads, local tokens, value width).
            scale: Scale of the scores; None: one over the square root of the width.
            window: Sliding window of the layer, in tokens; see ``MaskWords.sees``. Only its keys are fetched.
            softcap: Scores become ``softcap * tanh(score / softcap)``.
            sinks: Shape (query heads,): scores in each head's softmax without a value. A rank's gradient is that of its
                own queries.

        Meta and fake tensors return a tensor of their kind.

        Raises:
            ValueError: Shapes do not match each other or the plan.
        """
        kind = q.device.type
        if torch.is_autocast_enabled(kind):
            to = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):  # otherwise only the forward pass would use that dtype
                cast = (each if each.dtype == torch.float64 else each.to(to) for each in (q, k, v))
                return self(*cast, scale=scale, window=window, softcap=softcap, sinks=sinks)
        self._check(q, k, v, sinks)
        if isinstance(q, FakeTensor):  # shape inference, perhaps on this rank only: no communication
            return q.new_empty(*q.shape[:-1], v.shape[-1])
        self.calls[window] = self.calls.get(window, 0) + 1
        scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        out: torch.Tensor = _Attention.apply(q, k, v, sinks, self, self.layer(window), scores)
        return out

    def layer(self, window: int | None) -> AttendLayer:
        """Returns the cached exchange and kernel of layers with a window."""
        if window not in self.layers:
            plan = self.plan.windowed(window)
            alone = plan.ranks == 1
            exchange = Alone(plan) if alone else FetchNeeded(plan, self.group, self.rank, self.device)
            self.layers[window] = AttendLayer(exchange, make_kernel(plan, self.rank, exchange, self.device))
        return self.layers[window]

    def __repr__(self) -> str:
        """Returns the plan's sizes, equal for all sequences of one length."""
        return f"Attend({self.plan.local_tokens} tokens on rank {self.rank} of {self.plan.ranks})"

    def prefetched(self, layer: AttendLayer, k: torch.Tensor, v: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the blocks of each head, to be freed by the caller, and fetches the next head meanwhile."""
        heads = zip(k.split(1, 1), v.split(1, 1), strict=True)
        by_block = (torch.cat(both, -1).unflatten(2, (-1, self.plan.blocks.block)) for both in heads)
        fetches = map(layer.exchange.fetch, (blocks.permute(2, 0, 1, 3, 4).contiguous() for blocks in by_block))
        pending: Pending | None = next(fetches)
        while pending is not None:
            fetched = [pending()]
            pending = next(fetches, None)
            yield fetched.pop()  # otherwise this frame would hold the blocks

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
        tokens = self.plan.local_tokens
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if any(each.ndim != 4 or each.shape[2] != tokens for each in (q, k, v)):
            raise ValueError(
                f"{shapes}; this rank has {tokens} places: pass (batch, heads, {tokens}, width), tokens as "
                "ContextBatch cuts them. A cache of earlier keys is not supported: call the model with use_cache=False"
            )
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"{shapes}; use equal batches, heads of keys and values, and widths of queries and keys")
        if q.shape[1] % k.shape[1] != 0:
            raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} heads of keys and values")
        if sinks is not None and sinks.shape != (q.shape[1],):
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}; pass one for each of {q.shape[1]} query heads")
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; use one dtype")


@dataclass(frozen=True, slots=True)
class AttendLayer:
    """The exchange and kernel of layers with one window."""

    exchange: Alone
    kernel: BlockRows | FlexKernel


def _check_agreement(plan: ContextPlan, group: Any, device: torch.device) -> int:
    """Compares the plans of all ranks of a group by their hashes; returns this rank's index in the group."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != plan.ranks:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, but the group has {size}; plan with ranks={size}, or pass the group "
            "of the ranks that share this sequence"
        )
    own = torch.tensor([int(plan.digest()[:15], 16)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    hashes = [int(each) for each in gathered]
    usual = Counter(hashes).most_common(1)[0][0]
    others = [place for place, each in enumerate(hashes) if each != usual]
    if others:
        raise RankFailedError(
            f"ranks {others} of the context group have a different mask, block size or distribution; all "
            "ranks of a context group need the same sequence: load data by the data-parallel rank, not by the global "
            "one",
            ranks=others,
        )
    return int(rank)


class _Attention(torch.autograd.Function):
    """Forward and backward of ``Attend``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        attend: Attend,
        layer: AttendLayer,
        scores: Scores,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ahead, ctx.saved_by_head = attend.prefetched(layer, k, v), []
        for own in _query_heads(q, k):
            kv = next(ahead)
            out[:, own], saved = layer.kernel.forward(q[:, own], kv, scores.of(own, sinks))
            ctx.saved_by_head.append(saved)
            del kv
        ctx.save_for_backward(q, k, v, sinks)
        ctx.call = attend, layer, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        attend, layer, scores = ctx.call
        dsinks = None if sinks is None else torch.empty_like(sinks)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ahead, back = attend.prefetched(layer, k, v), None
        for head, (own, saved) in enumerate(zip(_query_heads(q, k), ctx.saved_by_head, strict=True)):
            kv = next(ahead)
            dq[:, own], dkv, *more = layer.kernel.backward(
                saved, q[:, own], kv, gradient[:, own], scores.of(own, sinks)
            )
            if dsinks is not None:
                dsinks[own] = more[0]
            del kv
            _store(back, dk, dv)  # the last head's gradients were sent during this computation
            back = head, layer.exchange.return_gradient(dkv)
            del dkv
        _store(back, dk, dv)
        return dq, dk, dv, dsinks, None, None, None


def _query_heads(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    """Returns the query heads of each key head."""
    share = q.shape[1] // k.shape[1]
    return [slice(head * share, (head + 1) * share) for head in range(k.shape[1])]


def _store(back: tuple[int, Pending] | None, dk: torch.Tensor, dv: torch.Tensor) -> None:
    if back is not None:
        head, pending = back
        both = pending()[:, :, 0].transpose(0, 1).flatten(1, 2)
        dk[:, head], dv[:, head] = both.tensor_split([dk.shape[-1]], -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextBatch:
    """A rank's part of a batch, cut from the whole sequence after shifting the labels.

    Encoders run on the whole sequence, and their outputs are merged into the embeddings before the cut.
    """

    attend: Attend

    def cut(self, values: torch.Tensor, *, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Returns this rank's places of a tensor along its tokens; differentiable.

        Empty places are ``fill``.
        """
        plan = self.attend.plan
        if values.shape[dim] != plan.mask.num_tokens:
            raise ValueError(
                f"the tensor of shape {tuple(values.shape)} has {values.shape[dim]} tokens in dimension {dim}, but the "
                f"mask has {plan.mask.num_tokens}; cut whole sequences, each once"
            )
        order = torch.from_numpy(plan.order_of(self.attend.rank)).to(values.device)
        local = values.index_select(dim, order.clamp_min(0))
        shape = [1] * values.ndim
        shape[dim] = -1
        return local.masked_fill((order < 0).view(shape), fill)

    def shift(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the label of each token's successor in its document (-100 without one), for the whole sequence."""
        documents = self.attend.plan.mask.documents
        follows = np.r_[(documents[1:] == documents[:-1]) & (documents[1:] >= 0), False]
        shifted = torch.cat([labels[:, 1:], labels[:, :1]], 1)
        return shifted.masked_fill(~torch.from_numpy(follows).to(labels.device), IGNORED)

    def inputs(
        self,
        *,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Returns the keywords of a Hugging Face language model on this rank.

        The model's loss is this rank's part of the mean over all tokens of the sequence: losses and gradients of ranks
        are summed, not averaged.

        Args:
            input_ids: Of the whole sequence, (batch, tokens); or
            inputs_embeds: its embeddings, with encoders' outputs merged in, (batch, tokens, width).
            labels: Of the whole sequence, not shifted.
            position_ids: Of the whole sequence, tokens last; None: from 0 in each document.

        Raises:
            ValueError: Both or none of ids and embeddings are passed, or a tensor's number of tokens differs.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds of the whole sequence")
        if position_ids is None:
            position_ids = torch.from_numpy(self.attend.plan.mask.positions())[None].to(self.attend.device)
        keywords: dict[str, Any] = {"context": self.attend, "use_cache": False}
        keywords["position_ids"] = self.cut(position_ids, dim=position_ids.ndim - 1)
        if input_ids is not None:
            keywords["input_ids"] = self.cut(input_ids)
        if inputs_embeds is not None:
            keywords["inputs_embeds"] = self.cut(inputs_embeds)
        return keywords if labels is None else keywords | shifted_labels(self, labels)


def shifted_labels(batch: ContextBatch, labels: torch.Tensor) -> dict[str, Any]:
    """Returns a Hugging Face model's keywords for labels of whole sequences: this rank's labels and their number."""
    shifted = batch.shift(labels)
    own = batch.cut(shifted, fill=IGNORED)
    return {"labels": own, "shift_labels": own, "num_items_in_batch": (shifted != IGNORED).sum()}
