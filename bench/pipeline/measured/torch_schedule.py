"""torch's own ``Schedule1F1B`` on the same ranks: a chain that is written by hand, since torch cannot cut the model."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline

from bench.pipeline.measured.models import Microbatch
from bench.record import one_line


class LlamaStage(nn.Module):
    """Some layers of a ``LlamaForCausalLM``, with what is before the first and behind the last."""

    def __init__(self, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        self.model, self.first, self.end = model, first, end
        self.layers = model.model.layers
        self.is_last = end == len(self.layers)

    def forward(self, given: Tensor) -> Tensor:
        """Takes token ids or what the stage before made; makes logits or what the next stage takes."""
        inner = self.model.model
        hidden = given if self.first else inner.embed_tokens(given)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = inner.rotary_emb(hidden, positions)
        for layer in self.layers[self.first : self.end]:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        return self.model.lm_head(inner.norm(hidden)) if self.is_last else hidden


class TorchSteps:
    """Steps of a chain by ``Schedule1F1B``, on all ranks.

    Args:
        model: A ``LlamaForCausalLM``.
        bounds: For each rank its first layer, and the number of all layers behind that.
        rank: This one.
        num_microbatches: Of a step; all have one shape.
    """

    def __init__(self, model: nn.Module, bounds: Sequence[int], rank: int, num_microbatches: int) -> None:
        self._is_first, self._is_last = rank == 0, rank == len(bounds) - 2
        module = LlamaStage(model, bounds[rank], bounds[rank + 1])
        stage = PipelineStage(module, rank, len(bounds) - 1, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_next_token_loss)

    def run(self, step: Sequence[Microbatch]) -> list[float]:
        """Runs forward and backward; returns the losses on the last rank."""
        whole = {name: torch.cat([one[name] for one in step]) for name in ("input_ids", "labels")}
        losses: list[Tensor] = []
        given = (whole["input_ids"],) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*given, target=whole["labels"], losses=losses)
        else:
            self._schedule.step(*given)
        return [loss.item() for loss in losses]


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def why_not(model: nn.Module, microbatch: Microbatch, cut: str) -> str:
    """Returns what torch says when it is to cut a model before a module itself; empty where it can."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pipeline(model, mb_args=(), mb_kwargs=microbatch, split_spec={cut: SplitPoint.BEGINNING})
    except Exception as error:  # of any kind: it is the reason
        return (
            f"torch.distributed.pipelining.pipeline: {type(error).__name__}: {one_line(str(error)).partition('. ')[0]}"
        )
    finally:
        logging.disable(level)
    return ""
