"""What a decoder writes: several targets in one sequence, each of which sees itself only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted(targets: Tensor) -> Tensor:
    """Returns what the decoder has read before each of its targets: (batch, tokens, ...), a zero in front."""
    before = [0, 0] * (targets.dim() - 2) + [1, 0]
    return F.pad(targets[:, :-1], before)


def target_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns which token may see which, (tokens, tokens) of bool: those before it in its own target, and itself.

    ::

        lengths (2, 3)   1 . . . .
                         1 1 . . .
                         . . 1 . .
                         . . 1 1 .
                         . . 1 1 1
    """
    target = torch.repeat_interleave(
        torch.arange(len(lengths), device=device),
        torch.tensor(lengths, device=device),
        output_size=sum(lengths),
    )
    return (target.unsqueeze(1) == target).tril()
