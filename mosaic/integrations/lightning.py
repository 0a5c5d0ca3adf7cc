"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

import lightning
from torch import nn

from mosaic.engine import Handle
from mosaic.errors import UnsupportedModelError
from mosaic.integrations.first_call import FirstCall, metrics_to_log


class MosaicCallback(lightning.Callback):
    """Colocates the model after its first batch, and logs ``handle.metrics()`` every ``log_every_n_steps``.

    Use it as ``lightning.Trainer(callbacks=[MosaicCallback()])``. Weights keep their names, so Lightning's checkpoints
    are those of the plain model.

    Args:
        module: The attribute of the ``LightningModule`` that holds the model, with dots for submodules.
        arguments: Keywords of ``mosaic.colocate``, except ``sample``.

    Attributes:
        handle: The handle; None before the end of the first batch.

    Raises:
        UnsupportedModelError: Training starts on several ranks, or the module does not exist.
    """

    def __init__(self, module: str = "model", **arguments: Any) -> None:
        self.handle: Handle | None = None
        self._module = module
        self._arguments = arguments
        self._first_call: FirstCall | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.handle is not None:
            return
        modules: dict[str, nn.Module] = dict(pl_module.named_modules())
        if self._module not in modules:
            names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise UnsupportedModelError(
                f"{type(pl_module).__name__} has no module {self._module!r} for MosaicCallback; "
                f"name one of its modules: MosaicCallback(module=...) (its children: {names})"
            )
        self._first_call = FirstCall(modules[self._module], self._arguments)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *batch: Any, **others: Any
    ) -> None:
        if self.handle is None and self._first_call is not None:
            self.handle = self._first_call.colocate()
        elif self.handle is not None and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log_dict(metrics_to_log(self.handle))
