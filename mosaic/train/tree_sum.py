r"""Equal bits on any number of ranks: the gradients of micro-batches are added in one fixed tree.

A sum depends on its order of additions. Here the global batch is always cut into the same micro-batches, which are the
leaves of one binary tree. A rank adds the subtrees that are wholly its own; all ranks gather the others' sums and add
them in the same order (the idea of EasyScale, SC 2023). It costs bandwidth: each rank receives all gradients, not their
sum, and the model is not a DistributedDataParallel.

::

    4 micro-batches      0   1   2   3
                          \ /     \ /        on 2 ranks each adds its pair, and both add the two sums;
                          0-1     2-3        on 4 ranks, each adds all of it
                             \   /
                              0-3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mosaic.train.data.loader import BatchCut

Leaves = tuple[int, int]
"""A subtree: its first leaf, and the leaf after its last."""
BUCKET_BYTES = 16 * 2**20
"""Bytes of gradients in one gather; a rank holds as many of every rank."""


class ExactStep:
    """Sums the gradients of a step to equal bits on any number of ranks.

    ::

        for part in batch.micro_batches:
            seed_step(seed, batch.step, part.index)
            with exact.micro_batch(part.index):
                (loss(model, part.data) * part.weight).backward()
        exact.finish()          # every rank has the gradients of the global batch
        optimizer.step()

    Buffers, such as BatchNorm's running statistics: each micro-batch starts with the buffers from before the step.
    Afterwards all ranks have those of the first micro-batch, as DistributedDataParallel broadcasts those of rank 0. A
    mean would be an invalid state of a queue or of a counter.

    Args:
        model: The same plain model on all ranks, not a DistributedDataParallel.
        cut: Cut of the global batch; the same ``batch`` and ``micro_batches`` on any number of ranks.
        group: The ranks; all of them by default.
    """

    def __init__(self, model: nn.Module, cut: BatchCut, *, group: dist.ProcessGroup | None = None) -> None:
        if not cut.exact:
            raise ValueError(
                "exact=False; equal bits need the same cut on any number of ranks, so use BatchCut(exact=True)"
            )
        self._cut = cut
        self._group = group
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = _Buffers(model)
        self._nodes = _nodes(0, len(cut.rows))
        self._sums: list[tuple[Leaves, list[Tensor | None]]] = []

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Records the gradients of the block's backward as those of one micro-batch.

        Args:
            index: Index of this rank's micro-batches, in order.
        """
        next_index = self._sums[-1][0][1] if self._sums else self._cut.own.start
        if index != next_index or index not in self._cut.own:
            raise ValueError(
                f"micro-batch {index} came after {next_index - 1}; this rank has {self._cut.own}, in order"
            )
        self._buffers.put_back()
        yield
        if index == 0:
            self._buffers.keep()
        self._sums.append(((index, index + 1), [_taken(parameter) for parameter in self._parameters]))
        while len(self._sums) > 1 and (self._sums[-2][0][0], index + 1) in self._nodes:
            ((first, _), left), (_, right) = self._sums[-2:]
            sums = [_added(a, b) for a, b in zip(left, right, strict=True)]
            self._sums[-2:] = [((first, index + 1), sums)]

    def finish(self) -> None:
        """Sets every parameter's gradient to the sum over the global batch, the same on all ranks."""
        if not self._sums or self._sums[-1][0][1] != self._cut.own.stop:
            raise ValueError(f"a step ends after the micro-batches {self._cut.own} of this rank")
        sums, self._sums = self._sums, []
        if self._cut.num_ranks > 1:
            self._gather([grads for _, grads in sums])
        else:
            for parameter, grad in zip(self._parameters, sums[0][1], strict=True):
                _put(parameter, grad)
        self._buffers.finish(self._group if self._cut.num_ranks > 1 else None, self._cut)

    def _gather(self, own: list[list[Tensor | None]]) -> None:
        """Adds up all ranks' subtrees, a bucket of parameters at a time."""
        count = len(self._cut.own)
        whole = (0, len(self._cut.rows))
        subtrees = [_held(whole, range(first, first + count)) for first in range(0, whole[1], count)]
        for bucket in _buckets(self._parameters, self._used(own)):
            sizes = [self._parameters[index].numel() for index in bucket]
            local = self._parameters[bucket[0]].new_zeros((max(map(len, subtrees)), sum(sizes)))
            for row, grads in zip(local, own, strict=False):
                for place, index in zip(row.split(sizes), bucket, strict=True):
                    if (grad := grads[index]) is not None:
                        place.copy_(grad.reshape(-1))
            gathered = [torch.empty_like(local) for _ in subtrees]
            dist.all_gather(gathered, local, group=self._group)
            rows = {nodes[k]: of[k] for nodes, of in zip(subtrees, gathered, strict=True) for k in range(len(nodes))}
            for place, index in zip(_total(whole, rows).split(sizes), bucket, strict=True):
                _put(self._parameters[index], place.view_as(self._parameters[index]))

    def _used(self, own: list[list[Tensor | None]]) -> list[int]:
        """Indices of the parameters that have a gradient on any rank."""
        used = [any(grads[index] is not None for grads in own) for index in range(len(self._parameters))]
        has = torch.tensor(used, dtype=torch.uint8, device=self._parameters[0].device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        return [index for index, there in enumerate(has.tolist()) if there]


class _Buffers:
    """A model's buffers before the step, and after the first micro-batch of the global batch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] | None = None
        self._kept: dict[str, Tensor] | None = None

    def put_back(self) -> None:
        """Restores the buffers from before the step."""
        if self._before is None:
            self._before = self._copies()
        else:
            self._set(self._before)

    def keep(self) -> None:
        """Stores the buffers that the step ends with."""
        self._kept = self._copies()

    def finish(self, group: dist.ProcessGroup | None, cut: BatchCut) -> None:
        """Broadcasts the stored buffers of the first rank."""
        assert self._before is not None
        buffers = self._kept or self._before
        if cut.num_ranks > 1 and buffers:
            bytes_of = {name: buffers[name].reshape(-1).view(torch.uint8) for name in buffers}
            for device in {tensor.device for tensor in buffers.values()}:
                names = [name for name in buffers if buffers[name].device == device]
                sent = torch.cat([bytes_of[name] for name in names])
                dist.broadcast(sent, group_src=0, group=group)
                for name, part in zip(names, sent.split([bytes_of[name].numel() for name in names]), strict=True):
                    buffers[name] = part.clone().view(buffers[name].dtype).view(buffers[name].shape)
        self._set(buffers)
        self._before = self._kept = None

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(values[name])


def _split_at(node: Leaves) -> int:
    """The first leaf of a subtree's right half: after the largest power of two of its leaves."""
    return node[0] + (1 << (node[1] - node[0] - 1).bit_length() - 1)


def _nodes(first: int, last: int) -> set[Leaves]:
    """All subtrees of the tree over some leaves."""
    if last - first == 1:
        return {(first, last)}
    middle = _split_at((first, last))
    return {(first, last)} | _nodes(first, middle) | _nodes(middle, last)


def _held(node: Leaves, own: range) -> list[Leaves]:
    """The largest subtrees that lie wholly within one rank's leaves."""
    if own.start <= node[0] and node[1] <= own.stop:
        return [node]
    if node[1] <= own.start or own.stop <= node[0]:
        return []
    middle = _split_at(node)
    return _held((node[0], middle), own) + _held((middle, node[1]), own)


def _total(node: Leaves, rows: Mapping[Leaves, Tensor]) -> Tensor:
    if node in rows:
        return rows[node]
    middle = _split_at(node)
    return _total((node[0], middle), rows).add_(_total((middle, node[1]), rows))


def _buckets(parameters: list[nn.Parameter], used: list[int]) -> Iterator[list[int]]:
    """Parameters of one type and device together, up to a size."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in used:
        kinds.setdefault((parameters[index].dtype, parameters[index].device), []).append(index)
    for indices in kinds.values():
        bucket, size = [], 0
        for index in indices:
            bucket.append(index)
            size += parameters[index].nbytes
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _taken(parameter: nn.Parameter) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(f"a gradient of layout {grad.layout} cannot be added in a tree; use sparse=False")
    return grad


def _added(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Adds in place; None counts as 0, which turns -0 into 0 as in a gather."""
    if left is None or right is None:
        grad = right if left is None else left
        return None if grad is None else grad.add_(0)
    return left.add_(right)


def _put(parameter: nn.Parameter, grad: Tensor | None) -> None:
    """Sets a gradient in its parameter's layout, because norms are summed in memory order."""
    if grad is not None and grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter).copy_(grad)
    parameter.grad = grad
