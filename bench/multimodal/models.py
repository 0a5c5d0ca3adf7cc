"""Three shapes of multimodal model: aligned encoders, encoders before a backbone with decoders, and a pair of those."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import nn
from torch.nn import functional

from bench.multimodal.towers import Encoder, Trunk


class Aligned(nn.Module):
    """Encoders into one space, and a contrastive loss of the first with each other one (CLIP, ImageBind)."""

    def __init__(self, encoders: dict[str, Encoder]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.log_scale = nn.Parameter(torch.tensor(2.659))  # ln(1 / 0.07)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Takes a batch of each modality; returns the loss."""
        found = [functional.normalize(tower(inputs[name]).float(), dim=-1) for name, tower in self.encoders.items()]
        scale = self.log_scale.exp()
        goal = torch.arange(found[0].shape[0], device=found[0].device)
        losses = []
        for first, second in combinations(range(len(found)), 2):
            if first == 0:
                logits = scale * found[first] @ found[second].t()
                losses.append(functional.cross_entropy(logits, goal) + functional.cross_entropy(logits.t(), goal))
        return torch.stack(losses).mean() / 2


class Fused(nn.Module):
    """Encoders, a backbone over all their tokens, and decoders over the backbone's (Qwen3-VL, Unified-IO 2, OFASys)."""

    def __init__(self, encoders: dict[str, Encoder], backbone: Trunk, decoders: dict[str, Trunk]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.backbone = backbone
        self.decoders = nn.ModuleDict(decoders)

    def logits(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns (batch, tokens, vocabulary) of every decoder, over as many last tokens as it has targets."""
        tokens = torch.cat([tower(inputs[name]) for name, tower in self.encoders.items()], dim=1)
        hidden = self.backbone(tokens)
        return {
            name: decoder(hidden[:, -inputs[f"{name}_targets"].shape[1] :]) for name, decoder in self.decoders.items()
        }

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Takes a batch of each modality and targets for each decoder; returns the loss."""
        return loss_of(self.logits(inputs), inputs)


class Pair(nn.Module):
    """A small and a large model on the same batch that learn from each other (our stand-in for CTVLM)."""

    def __init__(self, small: Fused, large: Fused) -> None:
        super().__init__()
        self.small = small
        self.large = large

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Takes a batch; returns both models' losses and how far their answers lie apart."""
        small, large = self.small.logits(inputs), self.large.logits(inputs)
        losses = [loss_of(small, inputs), loss_of(large, inputs)]
        for name in small:
            ours, theirs = (answers[name].float().log_softmax(-1) for answers in (small, large))
            losses.append(functional.kl_div(ours, theirs.detach(), reduction="none", log_target=True).sum(-1).mean())
        return torch.stack(losses).sum()


def loss_of(logits: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean cross-entropy over all decoders."""
    losses = [
        functional.cross_entropy(found.flatten(0, 1).float(), inputs[f"{name}_targets"].flatten())
        for name, found in logits.items()
    ]
    return torch.stack(losses).mean()
