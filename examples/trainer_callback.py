"""CLIP in Hugging Face's Trainer with Mosaic's callback: the line that ends in ``# <- mosaic``.

From a configuration: nothing is downloaded. Training goes on from the trainer's own checkpoints.

    python examples/trainer_callback.py                                  # seconds, on CPU cores
    python examples/trainer_callback.py --folder out --steps 12          # keeps checkpoints, goes on from the last one
    python examples/trainer_callback.py --report-to tensorboard          # or wandb, mlflow
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mosaic.integrations.transformers import MosaicCallback

ROWS, WORDS, IMAGE, END = 4, 12, 16, 99


def make_model() -> nn.Module:
    tower = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 100, "bos_token_id": 98, "eos_token_id": END, "pad_token_id": 0, **tower}
    return CLIPModel(
        CLIPConfig(
            text_config={"hidden_size": 32, "intermediate_size": 128, "max_position_embeddings": WORDS, **text},
            vision_config={"hidden_size": 48, "intermediate_size": 192, "image_size": IMAGE, "patch_size": 8, **tower},
            projection_dim=24,
        )
    )


def make_pairs(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 97, (count, WORDS), generator=generator)
    words[:, -1] = END
    images = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
    return [{"input_ids": w, "pixel_values": i} for w, i in zip(words, images, strict=True)]


def collate(pairs: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {**{name: torch.stack([pair[name] for pair in pairs]) for name in pairs[0]}, "return_loss": True}


def train(folder: str, args: argparse.Namespace) -> Trainer:
    options = TrainingArguments(
        folder,
        max_steps=args.steps,
        per_device_train_batch_size=ROWS,
        use_cpu=args.device == "cpu",
        logging_steps=2,
        save_steps=5,
        report_to=args.report_to,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(make_model(), options, train_dataset=make_pairs(8 * ROWS), data_collator=collate)
    MosaicCallback().add_to(trainer)  # <- mosaic
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None)
    return trainer


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", help="where checkpoints are kept")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--report-to", nargs="*", default=[])
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = train(args.folder or temporary, args)
    return trainer.model, trainer.optimizer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
