"""Stories: models and loops of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from story_models import assert_same_bits, make_batch, make_model, make_target, train_twin
from torch import Tensor, nn

import mosaic
from mosaic.glue import Glue, Tower


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Lets each loop make its own Accelerator, whose state is the process's."""
    state = pytest.importorskip("accelerate.state", reason="needs the extra examples").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore")  # of the library's own
def test_a_loop_of_accelerate_keeps_its_numbers():
    from accelerate import Accelerator

    def loop(model: nn.Module) -> list[Tensor]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(1)
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for step in range(6):
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(**make_batch(step)), make_target(step))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model = make_model()
    losses, weights = train_twin(model, loop)
    handle = mosaic.colocate(model, sample=make_batch(0), options=mosaic.Options(trial=None))
    assert loop(model) == losses
    assert_same_bits(model, weights)
    handle.remove()


IMAGE, PATCHES = 30, 4


def make_glued() -> Glue:
    from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    vision = SiglipVisionConfig(**sizes, image_size=8, patch_size=4, vision_use_head=False)
    text = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=IMAGE, use_cache=False)
    tower = Tower(SiglipVisionModel(vision), projector="mlp", token=IMAGE)
    return Glue(language_model=LlamaForCausalLM(text), vision=tower)


def make_pictures(step: int, rows: int = 4) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    pixels = torch.randn(rows, 3, 8, 8, generator=draw)
    words = torch.arange(6).repeat(rows, 1)
    ids = torch.cat((torch.full((rows, PATCHES), IMAGE), words), dim=1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "vision": {"pixel_values": pixels}}


@pytest.mark.filterwarnings("ignore")  # of the library's own
def test_a_model_glued_out_of_an_encoder_and_a_language_model_learns():
    pytest.importorskip("transformers", reason="needs the extra transformers")

    def loop(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
        losses = []
        for step in range(8):
            loss = model(**make_pictures(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model = make_glued().freeze("vision.model")
    losses, weights = train_twin(model, loop)
    handle = mosaic.colocate(model, sample=make_pictures(0), options=mosaic.Options(trial=None))
    assert set(handle.graph.names) == {"vision", "language_model"}
    assert loop(model) == losses
    assert losses[-1] < losses[0] / 2
    assert_same_bits(model, weights)
    handle.remove()
