"""A language model that reads handwriting and hears speech: unimodal models glued in ten lines, and one line more.

SigLIP, Whisper's encoder and Qwen3 are Hugging Face's own, from small configurations; data are the demo's: three digits
written by hand, the same three spoken, and a caption that is to be predicted. Some batches lack images, some lack
speech. The line that ends in ``# <- mosaic`` puts both towers on lanes. On CPU cores, in half a minute::

    pip install '.[demo,transformers]'
    python examples/glue.py
    python examples/glue.py --freeze vision.model audio.model --save glued      # projectors and language model train
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import mosaic
from mosaic.demo.data import Batch, DigitTriples, batches, load
from mosaic.glue import MultimodalModel, Tower

IMAGE, AUDIO = 30, 31
"""Placeholders, beyond the vocabulary of letters."""
PATCHES, SOUNDS = 12, 12
"""Features of a row: four patches a digit, and eight frames each."""
SENSES = ("sees", "hears")


def make_model() -> MultimodalModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    siglip = SiglipVisionConfig(**sizes, num_channels=1, image_size=8, patch_size=4, vision_use_head=False)
    whisper = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=40,
        max_source_positions=48,
    )
    qwen3 = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=IMAGE)
    return MultimodalModel(
        language_model=Qwen3ForCausalLM(qwen3),
        vision=Tower(SiglipVisionModel(siglip), projector="mlp", token=IMAGE),
        audio=Tower(WhisperEncoder(whisper), projector="linear", token=AUDIO, after=four_by_four, width=4 * 64),
    )


def four_by_four(inputs: dict[str, Any], output: Any) -> Tensor:
    """Four of the encoder's features beside each other are one token: (clips, 48, 64) to (clips, 12, 256)."""
    return output.last_hidden_state.unflatten(1, (-1, 4)).flatten(2)


def to_inputs(drawn: Batch, *, sees: bool = True, hears: bool = True) -> dict[str, Any]:
    """Placeholders, then the caption; an image of three digits becomes three of one digit each."""
    rows = len(drawn["text"])
    placeholders = torch.full((rows, PATCHES * sees + SOUNDS * hears), IMAGE, device=drawn["text"].device)
    ids = [placeholders, drawn["text"]]
    ids[0][:, PATCHES * sees :] = AUDIO
    input_ids = torch.cat(ids, dim=1)
    labels = input_ids.masked_fill((input_ids == 0) | (input_ids >= IMAGE), -100)
    digits = drawn["image"].unflatten(3, (3, 8)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "vision": {"pixel_values": digits} if sees else None,
        "audio": {"input_features": drawn["audio"]} if hears else None,
    }


def make_batches(data: DigitTriples, rows: int, steps: int, device: str) -> Iterator[dict[str, Any]]:
    for step, drawn in enumerate(batches(data.train, rows, seed=1, steps=steps)):
        yield to_inputs(on(device, drawn), sees=step % 5 != 3, hears=step % 5 != 4)


def on(device: str, drawn: Batch) -> Batch:
    return {name: values.to(device) for name, values in drawn.items()}


@torch.no_grad()
def accuracy(model: nn.Module, inputs: dict[str, Any]) -> float:
    """Returns the share of caption letters that the model predicts, on scans and voices that training never saw."""
    model.eval()
    predicted = model(**inputs).logits[:, :-1].argmax(-1)
    model.train()
    labels = inputs["labels"][:, 1:]
    return float((predicted == labels)[labels >= 0].float().mean())


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--freeze", nargs="*", default=[], help="modules that do not train, such as vision.model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = load()
    model = make_model().freeze(*args.freeze).to(args.device)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-3)
    sample = next(make_batches(data, args.rows, 1, args.device))
    mosaic.colocate(model, sample=sample)  # <- mosaic

    losses = []
    for step, batch in enumerate(make_batches(data, args.rows, args.steps, args.device)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")
    (drawn,) = batches(data.test, 128, seed=2, steps=1)
    alone = {"images alone": {"hears": False}, "speech alone": {"sees": False}, "neither": dict.fromkeys(SENSES, False)}
    for modalities, senses in {"both": {}, **alone}.items():
        print(f"accuracy with {modalities}: {accuracy(model, to_inputs(on(args.device, drawn), **senses)):.0%}")
    if args.save:
        model.save_pretrained(args.save)
    return model, optimizer, losses


if __name__ == "__main__":
    main()
