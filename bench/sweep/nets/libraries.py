"""Loops of libraries round a colocated model: transformers' Trainer, accelerate, Lightning, generation."""

from __future__ import annotations

import tempfile

import torch
import transformers as tf
from torch import nn
from torch.utils.data import Dataset

from bench.sweep.device import device, moved
from bench.sweep.models import find
from bench.sweep.nets.pieces import Two, train
from bench.sweep.session import Session


class _Pairs(Dataset):
    def __init__(self, draw) -> None:
        drawn = draw(torch.Generator().manual_seed(1))
        self.parts = {name: part for name, part in drawn.items() if isinstance(part, torch.Tensor)}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return {name: part[index] for name, part in self.parts.items()}


def _trainer(session, name, **settings):
    model, draw = find(name)()
    pairs = _Pairs(draw)
    session.colocate(model, moved({name: part[:2] for name, part in pairs.parts.items()}))
    with tempfile.TemporaryDirectory() as folder:
        arguments = tf.TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=3, report_to=[], logging_steps=1,
            use_cpu=device().type == "cpu", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            **settings,
        )  # fmt: skip
        trainer = tf.Trainer(model, arguments, train_dataset=pairs)
        trainer.remove_callback(tf.PrinterCallback)
        trainer.train()
    session.note([(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history])


def trainer_with_accumulation_and_bfloat16(session: Session):
    _trainer(session, "llava", gradient_accumulation_steps=2, bf16=True, max_grad_norm=0.1)


def trainer_with_checkpoints_of_layers(session: Session):
    _trainer(session, "whisper", gradient_checkpointing=True, lr_scheduler_type="cosine")


def generation_in_between(session: Session):
    model, draw = find("voxtral")()
    session.colocate(model, moved(draw(torch.Generator().manual_seed(0))))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        inputs = moved(draw(torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        model.eval()
        inputs.pop("labels")
        session.note(loss.item(), model.generate(**inputs, max_new_tokens=4, do_sample=step % 2 == 0))
        model.train()


def data_parallel_wrapper(session: Session):
    train(session, nn.DataParallel(Two()))
