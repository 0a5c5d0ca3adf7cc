"""Loops around the steps of a pipeline, beside the plain loop; each function is one rank's program."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, noop_context_fn

import mosaic
from mosaic.errors import ModuleContractError, UnsplittableError
from mosaic.parts.offload import Offload
from mosaic.pipelining.tasks import memory_peaks
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn
from ranks.graphs import colocated
from ranks.programs.pipeline.trained import begin, check_alike, check_gradients, llama, llava, options, ragged, words


def plain_losses(plain: nn.Module, step: list[dict[str, Any]], *, backward: bool = True) -> torch.Tensor:
    losses = []
    for one in step:
        loss = plain(**one).loss
        if backward:
            (loss / len(step)).backward()
        losses.append(loss.item())
    return torch.tensor(losses)


def under_autocast(rank: int, size: int, place: Path) -> None:
    """Steps in bfloat16, and an evaluation in full precision between them."""
    pipe, model, plain = begin(lambda: llama().float(), words(0), options=options(partition="mixed-v"))
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = pipe.step(words(step))
            wanted = plain_losses(plain, words(step))
        assert torch.allclose(losses, wanted, rtol=1e-2)
        exact = pipe.evaluate(words(step))
        assert torch.allclose(exact, plain_losses(plain, words(step), backward=False), rtol=1e-5)
        assert not torch.equal(exact, losses)
    check_gradients(model, plain, 0.03)
    pipe.remove()


def with_averages(rank: int, size: int, place: Path) -> None:
    """An optimizer from before, a schedule of rates, sums of gradients, averages of weights, and the whole model."""
    torch.manual_seed(1)
    model = llava()
    plain = copy.deepcopy(model)
    loops = []
    for network in (model, plain):
        optimizer = torch.optim.AdamW(network.parameters(), 0.01)
        if network is model:  # an optimizer may be there before the pipeline
            pipe = mosaic.pipeline(model, ragged()[0], trial=False, options=options())
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        loops.append((network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), average))
    for _ in range(3):
        for step in ragged():  # two of them before the optimizer's
            pipe.step(step)
            plain_losses(plain, step)
        for network, optimizer, rates, average in loops:
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            average.update_parameters(network)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loops[0][2].get_last_lr() == loops[1][2].get_last_lr()
    check_alike(loops[0][3].module, loops[1][3].module)
    with pytest.raises(ModuleContractError, match=r"pickle\(\) needs values of .*pipe.save"):
        torch.save(model.state_dict(), io.BytesIO())
    with pytest.raises(ModuleContractError, match=r"needs values of .* on rank.*pipe.evaluate"):
        loops[0][3](**ragged()[0][0])
    pipe.save(place / "kept", step=3, optimizer=loops[0][1], companions={"average": loops[0][3]})
    pipe.remove()
    pipe.remove()
    assert not any(one.is_meta for one in model.state_dict().values())
    check_alike(model, plain)
    one = ragged()[0][0]
    assert torch.allclose(model(**one).loss, plain(**one).loss, rtol=1e-9)


def with_little_memory(rank: int, size: int, place: Path) -> None:
    """Layers recompute a selection of their activations, or the host has them; gradients stay equal, with dropout."""
    step, used = words(0)[:2], Counter[str]()  # of two microbatches either order of gradients has one sum

    def counted(*args: Any, context_fn: Any, **kwargs: Any) -> Any:
        used["recompute" if context_fn is noop_context_fn else "selective"] += 1
        return checkpoint(*args, context_fn=context_fn, **kwargs)

    def offloaded(self: Offload, *args: Any) -> Any:
        used["offload"] += 1
        return run(self, *args)

    make, runs, run = partial(llama, 0.2, hidden_size=128, intermediate_size=3072), [(0, False)], Offload.run
    for memory_bytes, offload in runs:
        chosen = options(partition="mixed-time", offload=offload)
        pipe, model, plain = begin(make, step, options=chosen, memory_bytes=memory_bytes)
        patches = (
            mock.patch("mosaic.parts.chunk_call.checkpoint", counted),
            mock.patch.object(Offload, "run", offloaded),
        )
        with patches[0], patches[1], torch.random.fork_rng():
            losses = pipe.step(step)
        assert torch.equal(losses, plain_losses(plain, step))
        named = dict(plain.named_parameters())
        for name, one in model.named_parameters():
            if not one.is_meta:
                wanted = named[name].grad
                is_tied = "embed_tokens" in name  # the parts of its gradient are summed over ranks
                assert torch.allclose(one.grad, wanted) if is_tied else torch.equal(one.grad, wanted), name
        if not memory_bytes:
            assert not used
            graph, start_ns = pipe.timeline().simulated
            peaks = [peak for peak, _ in memory_peaks(graph, start_ns)]
            base, peak = max(graph.base_bytes), max(peaks)
            runs += [(base + round(0.9 * (peak - base)), offload) for offload in (False, True)]
        pipe.remove()
    everywhere: list[Any] = [None] * size
    for name in ("selective", "offload"):
        dist.all_gather_object(everywhere, used[name])
        assert sum(everywhere), name


def evaluated(rank: int, size: int, place: Path) -> None:
    """Losses without gradients between steps that are planned ahead, of more microbatches and in evaluation mode.

    Dropout begins in the second step, by modules inside of the model, and in the third its rate changes.
    """
    pipe, model, plain = begin(lambda: llava(dropout=0.2), ragged()[0])
    with pytest.raises(ValueError, match="no step has run"):
        pipe.timeline()
    for number, step in enumerate(pipe.ahead([ragged()[0], *ragged()])):
        for network in (model, plain):
            network.model.train(number > 0)
            for module in network.modules():
                if number == 2 and getattr(module, "attention_dropout", 0.0):
                    module.attention_dropout = 0.4
        torch.manual_seed(3)
        losses = pipe.step(step)
        torch.manual_seed(3)
        assert torch.allclose(losses, plain_losses(plain, step), rtol=1e-6)
        for network in (model, plain):
            network.eval()
        more = [*ragged()[0], *ragged()[1]]
        assert torch.allclose(pipe.evaluate(more), plain_losses(plain, more, backward=False), rtol=1e-6)
        for network in (model, plain):
            network.train()
    check_gradients(model, plain, 1e-10)
    assert pipe.metrics()["computing_ms"] > 0
    assert pipe.metrics()["failed_ahead"] == 0
    with pytest.raises(ModuleContractError, match=r"needs values of .* on rank.*pipe.evaluate"):
        model(**ragged()[0][0])
    pipe.remove(gather=False)
    with pytest.raises(ModuleContractError, match=r"needs values of .* on rank"):
        model(**ragged()[0][0])


def exchanged(rank: int, size: int, place: Path) -> None:
    """Checkpoints of a pipeline are gone on from by a colocated model, and back again."""
    torch.manual_seed(1)
    plain = llava()
    models = [copy.deepcopy(plain) for _ in range(3)]
    other = momentum(plain.parameters())
    pipe = mosaic.pipeline(models[0], ragged()[0], trial=False, options=options())
    optimizer = momentum(models[0].parameters())
    in_pipeline(pipe, optimizer)
    pipe.save(place / "kept", step=1, optimizer=optimizer)
    pipe.remove()

    one = ragged()[0][0]
    places = {"model.vision_tower": (0,), "model.multi_modal_projector": (size - 1,)}
    handle = colocated(models[1], one, places, size)
    optimizer = momentum(models[1].parameters())
    assert handle.load(place / "kept", optimizer=optimizer).step == 1
    models[1](**one).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    handle.save(place / "kept", step=2, optimizer=optimizer)
    handle.remove()

    pipe = mosaic.pipeline(models[2], ragged()[0], trial=False, options=options(partition="mixed-time"))
    optimizer = momentum(models[2].parameters())
    assert pipe.load(place / "kept", optimizer=optimizer).step == 2
    in_pipeline(pipe, optimizer)

    for step in (ragged()[0], [one], ragged()[0]):
        plain_losses(plain, step)
        other.step()
        other.zero_grad()
    check_alike(models[2], plain)
    pipe.remove()


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam would make much of gradients that are nothing but rounding."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def in_pipeline(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    pipe.step(ragged()[0])
    optimizer.step()
    optimizer.zero_grad()


class Scaled(nn.Sequential):
    """Reads parameters of its own before and behind its layers."""

    def __init__(self) -> None:
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 2)
        super().__init__(*layers)
        self.shift, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + self.shift) * self.scale


def with_normalized_batches(rank: int, size: int, place: Path) -> None:
    """Frozen normalization over batches is run; in training it is refused, whenever it is switched.

    Later steps have another rate of dropout, and other shapes, which are looked at without other ranks' weights.
    """
    torch.manual_seed(1)
    model = Scaled().double()
    plain = copy.deepcopy(model)
    step = [{"input": torch.randn(3, 4, dtype=torch.float64)} for _ in range(3)]
    pipe = mosaic.pipeline(model, step, loss=lambda output, _: output.square().sum(), trial=False, options=options())
    for rate, rows in ((0.1, 3), (0.5, 3), (0.5, 5)):
        step = [{"input": one["input"].repeat(2, 1)[:rows]} for one in step]
        for each in (model, plain):
            each[3].p = rate
        torch.manual_seed(rows)
        losses = pipe.step(step)
        torch.manual_seed(rows)
        assert torch.allclose(losses, torch.tensor([plain(**one).square().sum().item() for one in step]))
    model.train()
    with pytest.raises(UnsplittableError, match=r"1 is a BatchNorm1d.*eval\(\) after each"):
        pipe.step(step)
    pipe.remove()


def with_padding(rank: int, size: int, place: Path) -> None:
    """Torch's encoder passes no nested tensors between layers, as it does in eval without gradients."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    step = [{"src": torch.ones(2, 3, 8), "src_key_padding_mask": padding}]
    pipe = mosaic.pipeline(model, step, loss=lambda output, _: output[:, 0, 0].sum(), data=1)
    assert torch.allclose(pipe.evaluate(step), pipe.step(step))
    pipe.remove()
    assert torch.backends.mha.get_fastpath_enabled()


on_two_ranks = in_turn(
    under_autocast, with_little_memory, with_averages, evaluated, exchanged, with_normalized_batches, with_padding
)
