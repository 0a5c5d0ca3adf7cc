"""Gradients that are summed over ranks in one collective: in memory that is kept for them, or where they lie.

Memory that was just given back to the system costs more to get again than a sum costs: a page fault for every 4 KiB.
So a bucket keeps its memory from step to step, and gradients become views of it, as in DistributedDataParallel with
``gradient_as_bucket_view``. Unlike there, memory in which somebody else still has a tensor, such as a gradient of an
earlier step, is left to them. Gradients are divided before they are summed, as there, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

_LARGE_BYTES = 2**25
"""On the host a gradient of so many bytes is summed where it lies: the allocator of glibc (mallopt(3),
M_MMAP_THRESHOLD) gets each such piece from the system anew, so that a copy saves no page faults."""


class Bucket(Protocol):
    """Gradients that are summed together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose."""

    def take(self, parameter: torch.Tensor) -> None:
        """Takes a gradient that has just been made."""

    def gather(self) -> torch.Tensor:
        """Returns what is to be summed, divided; a gradient that is not there counts as zeros."""

    def hand_out(self, mean: torch.Tensor, there: Container[int]) -> list[torch.Tensor]:
        """Puts what became of it into the gradients.

        Args:
            mean: What ``gather`` returned, summed.
            there: Ids of the parameters that have a gradient on any rank; others keep none.

        Returns:
            Gradients that were not there before.
        """


class Together:
    """Gradients of one type that are copied into one piece of memory, with room for flags behind.

    Args:
        like: A parameter of that type.
        num_ranks: What they are divided by.

    Attributes:
        num_flags: How many more numbers there is room for.
    """

    def __init__(self, like: nn.Parameter, num_ranks: int) -> None:
        self.parameters: list[nn.Parameter] = []
        self.num_flags = 0
        self._like = like
        self._num_ranks = num_ranks
        self._flat: torch.Tensor | None = None
        self._starts: dict[int, int] = {}
        self._taken: set[int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def take(self, parameter: torch.Tensor) -> None:
        """Copies a gradient to its place, and makes it a view of that unless others have it too."""
        grad = parameter.grad
        assert grad is not None
        taken, place = self._begun(), self._place(parameter)
        torch.div(grad.detach(), self._num_ranks, out=place)
        if _is_sole_user(grad):
            parameter.grad = place
        taken.add(id(parameter))

    def gather(self) -> torch.Tensor:
        """Takes what was not taken yet; returns all of it, with the flags behind."""
        taken = self._begun()
        for parameter in self.parameters:
            if parameter.grad is None:
                self._place(parameter).zero_()
            elif id(parameter) not in taken:
                self.take(parameter)
        assert self._flat is not None
        return self._flat

    def hand_out(self, mean: torch.Tensor, there: Container[int]) -> list[torch.Tensor]:
        """Copies what is not a view; makes views of gradients that were not there."""
        self._taken = None
        made = []
        for parameter in self.parameters:
            if parameter.grad is not None and not self._holds(parameter):
                parameter.grad.detach().copy_(self._place(parameter))
            elif parameter.grad is None and id(parameter) in there:
                parameter.grad = self._place(parameter)
                made.append(parameter.grad)
        return made

    def _begun(self) -> set[int]:
        """Returns what was taken for the next sum; for the first one sees to memory in which nobody else is."""
        if self._taken is None:
            self._taken = set()
            if self._flat is None or self._flat.dtype != self._like.dtype or self._is_kept(self._flat):
                sizes = [parameter.numel() for parameter in self.parameters]
                self._starts = {id(p): sum(sizes[:index]) for index, p in enumerate(self.parameters)}
                self._flat = self._like.detach().new_empty(sum(sizes) + self.num_flags)
        return self._taken

    def _is_kept(self, flat: torch.Tensor) -> bool:
        """Whether anybody has a tensor in the memory but its parameters."""
        return _num_users(flat) > 1 + sum(map(self._holds, self.parameters))

    def _holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient is in its place."""
        assert self._flat is not None
        start = self._flat.data_ptr() + self._starts[id(parameter)] * self._flat.element_size()
        return parameter.grad is not None and parameter.grad.data_ptr() == start

    def _place(self, parameter: torch.Tensor) -> torch.Tensor:
        assert self._flat is not None
        start = self._starts[id(parameter)]
        return self._flat[start : start + parameter.numel()].view(parameter.shape)


class _Alone:
    """One gradient, left where it is until it is summed.

    Args:
        parameter: Whose.
        num_ranks: What it is divided by.
    """

    def __init__(self, parameter: nn.Parameter, num_ranks: int) -> None:
        self.parameters: Sequence[nn.Parameter] = (parameter,)
        self._num_ranks = num_ranks

    def take(self, parameter: torch.Tensor) -> None:
        """Leaves it where it is."""


class InPlace(_Alone):
    """One large gradient, summed where it lies."""

    def gather(self) -> torch.Tensor:
        """Returns the gradient itself, flat; a copy where others are in its memory, or it has gaps."""
        (parameter,) = self.parameters
        grad = parameter.grad
        if grad is None:
            return parameter.detach().new_zeros(parameter.numel())
        if grad.is_contiguous() and _is_sole_user(grad):
            return grad.detach().view(-1).div_(self._num_ranks)
        return grad.detach().reshape(-1).div(self._num_ranks)

    def hand_out(self, mean: torch.Tensor, there: Container[int]) -> list[torch.Tensor]:
        """Puts a copy's outcome back; the gradient itself has its own already."""
        (parameter,) = self.parameters
        if parameter.grad is not None:
            if parameter.grad.data_ptr() != mean.data_ptr():
                parameter.grad.detach().copy_(mean.view(parameter.shape))
            return []
        if id(parameter) not in there:
            return []
        parameter.grad = mean.view(parameter.shape)
        return [parameter.grad]


class Sparse(_Alone):
    """The gradient of a table that is looked up with ``sparse=True``."""

    def gather(self) -> torch.Tensor:
        """Returns a copy of the gradient, or one without elements."""
        (parameter,) = self.parameters
        if parameter.grad is not None:
            return parameter.grad.detach().coalesce().div(self._num_ranks)
        return torch.zeros_like(parameter, layout=torch.sparse_coo, requires_grad=False).coalesce()

    def hand_out(self, mean: torch.Tensor, there: Container[int]) -> list[torch.Tensor]:
        """Replaces the gradient; where no rank has elements, one that is not there stays away."""
        (parameter,) = self.parameters
        parameter.grad = mean if mean._nnz() or parameter.grad is not None else None
        return []


def buckets_of(
    parameters: Iterable[nn.Parameter], bucket_bytes: int, sparse: Container[int], num_ranks: int
) -> list[Bucket]:
    """Returns the buckets of some parameters in the order in which they start; the last one has room for flags of all.

    Args:
        parameters: In the order of the module; the last one's gradient comes first.
        bucket_bytes: The most that is summed together.
        sparse: Ids of those whose gradients are sparse.
        num_ranks: What gradients are divided by.
    """
    found: list[Bucket] = []
    filling: dict[torch.dtype, Together] = {}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in reversed(trained):
        if id(parameter) in sparse:
            found.append(Sparse(parameter, num_ranks))
            continue
        if parameter.nbytes >= _LARGE_BYTES and not parameter.is_cuda:
            found.append(InPlace(parameter, num_ranks))
            continue
        if parameter.dtype in filling and filling[parameter.dtype].num_bytes + parameter.nbytes > bucket_bytes:
            found.append(filling.pop(parameter.dtype))
        filling.setdefault(parameter.dtype, Together(parameter, num_ranks)).parameters.append(parameter)
    if not trained:
        return []
    *others, last = filling.values() or [Together(trained[0], num_ranks)]
    last.num_flags = len(trained)
    return [*found, *others, last]


def _num_users(tensor: torch.Tensor) -> int:
    """Returns how many tensors lie in a tensor's memory, this one counted."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def _is_sole_user(grad: torch.Tensor) -> bool:
    """Whether no other tensor lies in a gradient's memory: what two gradients share would be summed twice."""
    return grad.untyped_storage().nbytes() == grad.nbytes and _num_users(grad) == 1
