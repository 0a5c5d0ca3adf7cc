"""A callback for Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mosaic.engine import Handle
from mosaic.integrations.first_call import FirstCall, metrics_to_log


class MosaicCallback(TrainerCallback):
    """Colocates the model after its first step, and logs ``handle.metrics()`` whenever the trainer logs.

    Use it as ``MosaicCallback().add_to(trainer)``. In ``Trainer(callbacks=[...])`` it would run after the trainer's
    loggers, and metrics would only be in ``trainer.state.log_history``. Weights keep their names, so the trainer's
    checkpoints are those of the plain model.

    Args:
        arguments: Keywords of ``mosaic.colocate``, except ``sample``.

    Attributes:
        handle: The handle; None before the end of the first step.

    Raises:
        UnsupportedModelError: Training starts on several ranks.
    """

    def __init__(self, **arguments: Any) -> None:
        self.handle: Handle | None = None
        self._arguments = arguments
        self._first_call: FirstCall | None = None

    def add_to(self, trainer: Trainer) -> MosaicCallback:
        """Adds itself before the trainer's loggers."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any
    ) -> None:
        if self.handle is None:
            self._first_call = FirstCall(trained["model"], self._arguments)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any
    ) -> None:
        if self._first_call is not None and self.handle is None:
            self.handle = self._first_call.colocate()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any) -> None:
        if self.handle is not None and state.log_history:
            metrics = metrics_to_log(self.handle)
            trained["logs"] |= metrics
            state.log_history[-1] |= metrics
