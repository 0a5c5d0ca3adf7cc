"""Loops of libraries round a colocated model: transformers' Trainer, accelerate, Lightning, generation."""

from __future__ import annotations

import tempfile

import lightning
import torch
import transformers as tf
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.sweep.device import device, moved
from bench.sweep.models import find
from bench.sweep.nets.pieces import Two, batch, squared, tower, train
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
        given = tf.TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=3, report_to=[], logging_steps=1,
            use_cpu=device().type == "cpu", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            **settings,
        )  # fmt: skip
        trainer = tf.Trainer(model, given, train_dataset=pairs)
        trainer.remove_callback(tf.PrinterCallback)
        trainer.train()
    session.note([(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history])


def _accelerator() -> str:
    return "gpu" if device().type == "cuda" else "cpu"


def _on_host(rows: int):
    return [part.cpu() for part in batch(0, rows)]


def trainer_with_accumulation_and_bfloat16(session: Session):
    _trainer(session, "llava", gradient_accumulation_steps=2, bf16=True, max_grad_norm=0.1)


def trainer_with_checkpoints_of_layers(session: Session):
    _trainer(session, "whisper", gradient_checkpointing=True, lr_scheduler_type="cosine")


def accelerate_loop(session: Session):
    accelerator = Accelerator(cpu=device().type == "cpu", mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    session.colocate(model, batch(0, 16))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(*_on_host(96)), 16))
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = model(*inputs).float().square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        session.note(loss.item())


def lightning_fit(session: Session):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Two(tower(nn.Dropout(0.1)))

        def training_step(self, inputs, index):
            loss = squared(self.net, inputs)
            session.note(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    session.colocate(module.net, batch(0, 16))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator=_accelerator(), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*_on_host(64)), 16))


def fabric_loop(session: Session):
    fabric = lightning.Fabric(accelerator=_accelerator(), devices=1)
    plain = Two()
    session.colocate(plain, batch(0))
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 1e-2))
    for step in range(4):
        optimizer.zero_grad()
        loss = squared(model, batch(step))
        fabric.backward(loss)
        optimizer.step()
        session.note(loss.item())


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
