"""Targets: losses, and a decoder's targets in one sequence, each of which sees itself only."""

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
    # Filled on the device: a copy of the lengths could not be captured in a CUDA graph.
    target = torch.cat([torch.full((length,), number, device=device) for number, length in enumerate(lengths)])
    return (target.unsqueeze(1) == target).tril()


def contrastive_loss(left: Tensor, right: Tensor, scale: Tensor | float) -> Tensor:
    """Returns the symmetric InfoNCE of two modalities (CLIP), in float32.

    Args:
        left: (batch, width), rows of length one.
        right: The same samples in the other modality.
        scale: Inverse temperature.
    """
    logits = scale * left.float() @ right.float().t()
    goal = torch.arange(len(left), device=left.device)
    return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.t(), goal)) / 2


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of (batch, tokens, vocabulary) and ids (batch, tokens), without -100; float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns ``token_loss`` of every token's logits with the token after it."""
    return token_loss(logits[:, :-1], labels[:, 1:])
