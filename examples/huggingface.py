"""Hugging Face models in three loops, with one line more: the one that ends in ``# <- mosaic``.

CLIP; LLaVA, whose vision tower's features are merged into the token stream; Qwen2-Audio, a Whisper encoder before a
language model. From configurations: nothing is downloaded. In a bare loop, through accelerate, and through Trainer.

    python examples/huggingface.py --model llava --loop trainer                # seconds, on CPU cores
    python examples/huggingface.py --model clip --size full --device cuda      # ViT-B/32
    python examples/huggingface.py --model audio --loop accelerate --bf16
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import mosaic

Batch = dict[str, Any]
Draw = Callable[[torch.Generator], Batch]


def tower(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def make_clip(size: str) -> tuple[nn.Module, Draw]:
    tiny = size == "tiny"
    image, words, rows = (16, 12, 4) if tiny else (224, 77, 128)
    ids = {"vocab_size": 100, "bos_token_id": 98, "eos_token_id": 99, "pad_token_id": 0} if tiny else {}
    vision = tower(48, 2, 2, patch_size=8) if tiny else tower(768, 12, 12, patch_size=32)
    text = tower(32, 2, 2) if tiny else tower(512, 12, 8)
    config = CLIPConfig(
        text_config={**text, **ids, "max_position_embeddings": words},
        vision_config={**vision, "image_size": image},
        projection_dim=24 if tiny else 512,
    )
    end = config.text_config.eos_token_id

    def draw(generator: torch.Generator) -> Batch:
        input_ids = torch.randint(1, config.text_config.vocab_size - 2, (rows, words), generator=generator)
        input_ids[:, -1] = end
        pixels = torch.randn(rows, 3, image, image, generator=generator)
        return {"input_ids": input_ids, "pixel_values": pixels, "return_loss": True}

    return CLIPModel(config), draw


def make_llava(size: str) -> tuple[nn.Module, Draw]:
    tiny = size == "tiny"
    image, patch, words, rows = (16, 8, 12, 3) if tiny else (336, 14, 256, 4)
    vocabulary = 100 if tiny else 32064
    vision = tower(48, 2, 2) if tiny else tower(1024, 24, 16)
    text = tower(64, 2, 2, num_key_value_heads=2) if tiny else tower(2048, 16, 16, num_key_value_heads=8)
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vision, "image_size": image, "patch_size": patch},
        text_config={"model_type": "llama", **text, "vocab_size": vocabulary, "max_position_embeddings": 4096},
        image_token_index=vocabulary - 1,
    )
    model = LlavaForConditionalGeneration(config)
    model.config.text_config.use_cache = False  # as for every training; a cache of keys is for generating
    seen = (image // patch) ** 2

    def draw(generator: torch.Generator) -> Batch:
        input_ids = torch.randint(1, vocabulary - 1, (rows, words + seen), generator=generator)
        labels = input_ids.clone()
        input_ids[:, 1 : 1 + seen] = vocabulary - 1
        labels[:, : 1 + seen] = -100
        pixels = torch.randn(rows, 3, image, image, generator=generator)
        mask = torch.ones_like(input_ids)
        return {"input_ids": input_ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}

    return model, draw


def make_audio(size: str) -> tuple[nn.Module, Draw]:
    tiny = size == "tiny"
    mels, frames, words, rows = (16, 32, 8, 3) if tiny else (128, 3000, 128, 4)
    vocabulary = 100 if tiny else 151936
    width, layers, heads = (48, 2, 2) if tiny else (1280, 32, 20)
    text = tower(64, 2, 2, num_key_value_heads=2) if tiny else tower(2048, 24, 16, num_key_value_heads=16)
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": width,
            "encoder_layers": layers,
            "encoder_attention_heads": heads,
            "encoder_ffn_dim": 4 * width,
            "num_mel_bins": mels,
            "max_source_positions": frames // 2,
        },
        text_config={"model_type": "qwen2", **text, "vocab_size": vocabulary, "max_position_embeddings": 4096},
        audio_token_index=vocabulary - 1,
    )
    model = Qwen2AudioForConditionalGeneration(config)
    model.config.text_config.use_cache = False
    heard = frames // 4

    def draw(generator: torch.Generator) -> Batch:
        input_ids = torch.randint(1, vocabulary - 1, (rows, words + heard), generator=generator)
        labels = input_ids.clone()
        input_ids[:, 1 : 1 + heard] = vocabulary - 1
        labels[:, : 1 + heard] = -100
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "input_features": torch.randn(rows, mels, frames, generator=generator),
            "feature_attention_mask": torch.ones(rows, frames, dtype=torch.long),
            "labels": labels,
        }

    return model, draw


def on(device: str, batch: Batch) -> Batch:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


Trained = tuple[torch.optim.Optimizer, list[float]]


def bare_loop(model: nn.Module, batches: list[Batch], *, device: str, bf16: bool) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(**on(device, batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


def accelerate_loop(model: nn.Module, batches: list[Batch], *, device: str, bf16: bool) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="bf16" if bf16 else "no", gradient_accumulation_steps=2
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**on(device, batch)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer.optimizer, losses


def trainer_loop(model: nn.Module, batches: list[Batch], *, device: str, bf16: bool) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=len(batches),
            per_device_train_batch_size=1,  # what a batch holds is decided above
            use_cpu=device == "cpu",
            bf16=bf16,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            dataloader_num_workers=0,
        )
        trainer = Trainer(model, options, train_dataset=batches, data_collator=lambda items: items[0])
        trainer.train()
    return trainer.optimizer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


MODELS = {"clip": make_clip, "llava": make_llava, "audio": make_audio}
LOOPS = {"bare": bare_loop, "accelerate": accelerate_loop, "trainer": trainer_loop}


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="clip")
    parser.add_argument("--loop", choices=LOOPS, default="bare")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model, draw = MODELS[args.model](args.size)
    model.to(args.device).train()
    generator = torch.Generator().manual_seed(1)
    batches = [draw(generator) for _ in range(args.steps)]

    def first() -> Any:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            return model(**on(args.device, batches[0]))

    mosaic.colocate(model, sample=first)  # <- mosaic

    optimizer, losses = LOOPS[args.loop](model, batches, device=args.device, bf16=args.bf16)
    return model, optimizer, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
