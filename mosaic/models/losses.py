"""The zoo's two losses: which rows belong together, and which token comes next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
