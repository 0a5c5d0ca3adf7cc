"""A rank's part of a batch, cut from the whole sequence after the labels are shifted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mosaic.context.attention.attend import Attend

IGNORED = -100
"""Label of tokens without one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextBatch:
    """Cuts tensors along a sequence by a plan, for one rank.

    Encoders run on the whole sequence, and their outputs are merged into embeddings before these are cut.
    """

    attend: Attend
    """Attention of the sequence."""

    def cut(self, values: torch.Tensor, *, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Returns this rank's places of a tensor along its tokens; gradients flow back to the whole.

        Empty places have the value ``fill``.

        Raises:
            ValueError: The tensor's number of tokens, in dimension ``dim``, differs from the plan.
        """
        plan = self.attend.plan
        if values.shape[dim] != plan.mask.num_tokens:
            raise ValueError(
                f"the tensor of shape {tuple(values.shape)} has {values.shape[dim]} tokens in dimension {dim} and the "
                f"mask {plan.mask.num_tokens}; cut whole sequences, each once"
            )
        order = torch.from_numpy(plan.order_of(self.attend.rank)).to(values.device)
        local = values.index_select(dim, order.clamp_min(0))
        shape = [1] * values.ndim
        shape[dim] = -1
        return local.masked_fill((order < 0).view(shape), fill)

    def shift(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the label of each token's successor in its document, -100 without one, for the whole sequence."""
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

        Its loss is this rank's part of the sum over all tokens of the sequence divided by their number: losses and
        gradients of ranks are added, never averaged.

        Args:
            input_ids: Of the whole sequence, (batch, tokens); or
            inputs_embeds: its embeddings, with encoders' outputs merged in, (batch, tokens, width).
            labels: Of the whole sequence, not shifted.
            position_ids: Of the whole sequence, tokens last; None: from 0 in each document.

        Raises:
            ValueError: Ids and embeddings are both given or both missing, or a tensor's number of tokens differs.
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
    """Returns a Hugging Face model's keywords for labels of whole sequences: this rank's labels, and their number."""
    shifted = batch.shift(labels)
    own = batch.cut(shifted, fill=IGNORED)
    return {"labels": own, "shift_labels": own, "num_items_in_batch": (shifted != IGNORED).sum()}
