"""Fine-tuning what is mostly frozen, with one line more: the one that ends in ``# <- mosaic``.

CLIP with its image tower frozen and its text tower trained (locked-image tuning), with the first layers of each frozen,
or with LoRA adapters of peft on both towers. Weights that are frozen cost a module its backward, or most of it, which
is what planning has to know.

    python examples/frozen.py --what lora                         # seconds, on CPU cores
    python examples/frozen.py --size full --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CLIPConfig, CLIPModel

import mosaic


def make(size: str) -> CLIPModel:
    tiny = size == "tiny"
    config = CLIPConfig(
        text_config={
            "hidden_size": 32 if tiny else 768,
            "intermediate_size": 128 if tiny else 3072,
            "num_hidden_layers": 2 if tiny else 12,
            "num_attention_heads": 2 if tiny else 12,
            "max_position_embeddings": 12 if tiny else 77,
            **({"vocab_size": 100, "bos_token_id": 98, "eos_token_id": 99, "pad_token_id": 0} if tiny else {}),
        },
        vision_config={
            "hidden_size": 48 if tiny else 1024,
            "intermediate_size": 192 if tiny else 4096,
            "num_hidden_layers": 2 if tiny else 24,
            "num_attention_heads": 2 if tiny else 16,
            "image_size": 16 if tiny else 224,
            "patch_size": 8 if tiny else 14,
        },
        projection_dim=24 if tiny else 768,
    )
    return CLIPModel(config)


def lock_image(model: CLIPModel) -> nn.Module:
    model.vision_model.requires_grad_(False)
    return model


def freeze_first_layers(model: CLIPModel) -> nn.Module:
    for tower in (model.vision_model, model.text_model):
        tower.embeddings.requires_grad_(False)
        for layer in tower.encoder.layers[: len(tower.encoder.layers) // 2]:
            layer.requires_grad_(False)
    return model


def add_lora(model: CLIPModel) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


WHAT = {"image": lock_image, "first-layers": freeze_first_layers, "lora": add_lora}


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHAT, default="image")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    base = make(args.size)
    text, vision = base.config.text_config, base.config.vision_config
    model = WHAT[args.what](base).to(args.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    rows = 4 if args.size == "tiny" else 64

    def draw() -> dict[str, Any]:
        words = (rows, text.max_position_embeddings)
        input_ids = torch.randint(1, text.vocab_size - 2, words, generator=generator)
        input_ids[:, -1] = text.eos_token_id
        pixels = torch.randn(rows, 3, vision.image_size, vision.image_size, generator=generator)
        return {
            "input_ids": input_ids.to(args.device),
            "pixel_values": pixels.to(args.device),
            "return_loss": True,
        }

    batch = draw()
    mosaic.colocate(model, sample=batch)  # <- mosaic

    losses = []
    for _ in range(args.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        batch = draw()
    return model, optimizer, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
