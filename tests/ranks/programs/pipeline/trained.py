"""Models of the user's in pipelines, beside the plain loop; each function is one rank's program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

import mosaic
from mosaic import models
from mosaic.backends.host import HostBackend
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.planner import PlannerOptions
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn

IMAGE, PATCHES = 31, 4
_SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 4}
FEW = OrderLimits(rollouts=200)


def llava(dropout: float = 0.0) -> nn.Module:
    vision = CLIPVisionConfig(**_SMALL, image_size=8, patch_size=4, attention_dropout=dropout)
    text = LlamaConfig(
        **_SMALL,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        tie_word_embeddings=True,
        use_cache=False,
        attention_dropout=dropout,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, tie_word_embeddings=True)
    return LlavaForConditionalGeneration(config).double()


def llama(dropout: float = 0.0, **sizes: int) -> nn.Module:
    config = LlamaConfig(
        **(_SMALL | sizes),
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        tie_word_embeddings=True,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).double()


def microbatch(images: int, words: int) -> dict[str, Any]:
    ids = torch.randint(0, IMAGE, (1, PATCHES * images + words))
    ids[0, : PATCHES * images] = IMAGE
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return {**found, "pixel_values": torch.randn(images, 3, 8, 8, dtype=torch.float64)} if images else found


def ragged() -> list[list[dict[str, Any]]]:
    """Steps of 4 and 3 microbatches, some without images."""
    torch.manual_seed(5)
    return [[microbatch(count, 5 + count) for count in step] for step in ((2, 0, 3, 1), (1, 0, 4))]


def options(**chosen: Any) -> PlannerOptions:
    return PlannerOptions(limits=FEW, **chosen)


def check_equal(
    pipe: Pipeline, model: nn.Module, plain: nn.Module, steps: Sequence[Sequence[Mapping[str, Any]]], **loop: Any
) -> None:
    """Trains both, and compares losses, gradients of what is here, and the norm of all."""
    optimizer, other = torch.optim.AdamW(model.parameters(), 0.01), torch.optim.AdamW(plain.parameters(), 0.01)
    for step in pipe.ahead(steps) if loop.get("ahead") else steps:
        torch.manual_seed(11)
        losses = pipe.step(step)
        drawn = torch.get_rng_state()
        torch.manual_seed(11)
        expected = []
        for one in step:
            loss = models.loss_of(plain(**one))
            (loss / len(step)).backward()
            expected.append(loss.item())
        assert torch.equal(drawn, torch.get_rng_state())
        assert torch.allclose(losses, torch.tensor(expected), rtol=1e-6)
        named = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            want = named[name].grad
            if parameter.is_meta or want is None:
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None, name
                want = part_of(want, parameter, pipe)
                assert (parameter.grad - want).norm() <= 1e-11 * (1e-2 + want.norm()), name
        norm = pipe.clip_grad_norm_(0.1)
        assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-10)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


def check_alike(model: nn.Module, plain: nn.Module) -> None:
    """Compares the weights that are here."""
    named = dict(plain.named_parameters())
    for name, one in model.named_parameters():
        assert one.is_meta or (one - named[name]).norm() <= 1e-9 * (1e-3 + named[name].norm()), name


def check_gradients(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    named = dict(plain.named_parameters())
    for name, one in model.named_parameters():
        wanted = named[name].grad
        assert one.grad is None or (one.grad - wanted).norm() <= tolerance * (1e-2 + wanted.norm()), name


def part_of(whole: torch.Tensor, own: torch.Tensor, pipe: Pipeline) -> torch.Tensor:
    """Returns this rank's part of a tensor that tensor ranks share."""
    dim = next((dim for dim in range(own.ndim) if own.shape[dim] != whole.shape[dim]), None)
    return whole if dim is None else whole.split(own.shape[dim], dim)[pipe._runner.grid.tensor]


def begin(
    make: Any, sample: Sequence[Mapping[str, Any]] | None = None, **asked: Any
) -> tuple[Pipeline, nn.Module, nn.Module]:
    """A pipeline of a model, planned by few rollouts and not tried unless it is asked for, and the plain model."""
    torch.manual_seed(1)
    model = make()
    plain = copy.deepcopy(model)
    if sample is None:
        sample = ragged()[0] if make is llava else [microbatch(0, 6)]
    return mosaic.pipeline(model, sample, **{"trial": False, "options": options(), **asked}), model, plain


def on_lanes(rank: int, size: int, place: Path) -> None:
    """The vision tower on a lane of both ranks, beside the backbone."""
    asked = {"options": options(partition="colocated"), "backend": HostBackend(2), "data": 1}
    pipe, model, plain = begin(llava, **asked)
    assert "; lane 1 (50%): vision_tower" in pipe.describe()
    check_equal(pipe, model, plain, ragged(), ahead=True)
    played = pipe.timeline()
    assert len(played.measured[1]) == len(played.measured[0].tasks)
    pipe.remove()
    tried, _, _ = begin(llava, trial=True, backend=HostBackend(2), data=1)
    assert "planned, on lanes" in tried.trial.step_ms
    tried.remove()


def with_dropout(rank: int, size: int, place: Path) -> None:
    """Dropped elements are those that the plain loop drops, with layers made again and encoders cut apart, too."""
    for partition, memory in (("mixed-v", 0), ("separated", 350_000)):
        asked = {"options": options(partition=partition), "memory_bytes": memory}
        pipe, model, plain = begin(lambda: llava(dropout=0.2), ragged()[0], **asked)
        assert "encoders take whole microbatches, since these draw" in pipe.describe()
        check_equal(pipe, model, plain, ragged())
        pipe.remove()


def text_to_video(rank: int, size: int, place: Path) -> None:
    """The zoo's T2V: a frozen encoder of latents, a text encoder and a DiT that attends to it."""
    model = models.build("t2v", freeze=models.find_model("t2v").frozen).double()
    plain = copy.deepcopy(model)
    drawn = [models.make_batch("t2v", batch=1, seed=seed) for seed in range(6)]
    samples = [{k: v.double() if v.is_floating_point() else v for k, v in sample.items()} for sample in drawn]
    pipe = mosaic.pipeline(model, samples[:3], loss=lambda output, _: output["loss"], options=options(), trial=False)
    assert "transformer.blocks" in pipe.describe()
    check_equal(pipe, model, plain, [samples[:3], samples[3:]])
    assert len({parameter.is_meta for parameter in model.parameters()}) == 2  # each rank has a part of the model
    pipe.remove()


def with_a_scaler(rank: int, size: int, place: Path) -> None:
    """Losses are scaled, one infinite gradient skips the step on all ranks, and torch's clipping works."""
    pipe, model, plain = begin(llama)
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2))
    for step in range(3):
        pipe.step(words(step), scaler=scaler)
        for one in words(step):
            plain_scaler.scale(plain(**one).loss / 3).backward()
        for network in (model, plain):
            norm = network.model.norm.weight
            if step == 1 and not norm.is_meta:
                norm.grad = torch.full_like(norm, torch.inf)
        for each, scales, network in ((optimizer, scaler, model), (other, plain_scaler, plain)):
            scales.unscale_(each)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            scales.step(each)
            scales.update()
            each.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale() == (64.0 if step < 1 else 32.0)
    check_alike(model, plain)
    pipe.remove()


def of_one_schedule(rank: int, size: int, place: Path) -> None:
    """Steps of one schedule whose messages have other shapes: 8 tokens in one row, and in two."""
    pipe, model, plain = begin(llama)
    steps = []
    for rows in (1, 2, 1):
        ids = torch.randint(0, IMAGE, (rows, 8 // rows))
        steps.append([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}] * 3)
    check_equal(pipe, model, plain, steps)
    pipe.remove()


def drops() -> nn.Module:
    return llama(dropout=0.2)


def saved(rank: int, size: int, place: Path) -> None:
    """Two steps, then a checkpoint with the optimizer's state."""
    pipe, model, _ = begin(drops)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(7)
    train(pipe, optimizer, 2)
    pipe.save(place.parents[1] / "kept", step=2, optimizer=optimizer)
    pipe.finish_saving()
    pipe.remove()


def resumed(rank: int, size: int, place: Path) -> None:
    """Another number of ranks goes on from it, as the plain loop does that was never cut; so do random numbers."""
    pipe, model, plain = begin(drops)
    optimizer, other = torch.optim.AdamW(model.parameters(), 0.01), torch.optim.AdamW(plain.parameters(), 0.01)
    torch.manual_seed(rank)
    assert pipe.load(place.parents[1] / "kept", optimizer=optimizer).step == 2
    train(pipe, optimizer, 1, first=2)
    torch.manual_seed(7)
    for step in range(3):
        for one in words(step):
            (plain(**one).loss / 3).backward()
        other.step()
        other.zero_grad()
    check_alike(model, plain)
    pipe.remove()


def words(step: int) -> list[dict[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(100 + step)
        return [microbatch(0, length) for length in (5, 9, 6)]


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        pipe.step(words(step))
        optimizer.step()
        optimizer.zero_grad()


def too_large_for_a_rank(rank: int, size: int, place: Path) -> None:
    """A model without memory, and weights from a file, of which each rank reads its layers."""
    torch.manual_seed(1)
    plain = llava()
    if rank == 0:
        save_file({name: value.clone() for name, value in plain.state_dict().items()}, place / "weights.safetensors")
    model = copy.deepcopy(plain)
    for module in model.modules():  # buffers are real, as by accelerate's init_empty_weights(include_buffers=False)
        for name, one in module._parameters.items():
            if one is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(one, device="meta"))
    model.tie_weights()
    pipe = mosaic.pipeline(model, ragged()[0], options=options())
    assert {"planned", "1f1b", "data parallel"} <= set(pipe.trial.step_ms)
    with pytest.raises(ValueError, match="give it weights by"):
        pipe.step(ragged()[0])
    pipe.load_weights(place / "weights.safetensors")
    check_equal(pipe, model, plain, ragged())
    pipe.remove()


on_two_ranks = in_turn(with_dropout, of_one_schedule, too_large_for_a_rank, saved, on_lanes, text_to_video)
on_three_ranks = in_turn(with_a_scaler, resumed)
