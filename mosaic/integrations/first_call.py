"""Captures the first batch of a framework as the sample for ``mosaic.colocate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mosaic
from mosaic.engine import Handle
from mosaic.errors import UnsupportedModelError


class FirstCall:
    """Records arguments and autocast mode of a model's next training call, and colocates the model with them.

    Args:
        model: The model that the framework calls.
        arguments: Keywords of ``mosaic.colocate``.

    Raises:
        UnsupportedModelError: The process is one of several ranks.
    """

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
            raise UnsupportedModelError(
                f"the callback needs one rank, but there are {ranks}, whose models are already wrapped; "
                "call mosaic.colocate(model, sample=...) before you create the trainer"
            )
        self._model = model
        self._arguments = arguments
        self._sample: Callable[[], Any] | None = None
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:  # an evaluation before the first step
            return
        self._hook.remove()
        device = next(model.parameters()).device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

        def sample() -> Any:
            with torch.autocast(device, dtype, enabled=dtype is not None):
                return model(*args, **kwargs)

        self._sample = sample

    def colocate(self) -> Handle | None:
        """Colocates the model between two steps; returns None before its first call."""
        sample, self._sample = self._sample, None  # holds the batch
        return None if sample is None else mosaic.colocate(self._model, sample=sample, **self._arguments)


def metrics_to_log(handle: Handle) -> dict[str, float]:
    """Returns ``handle.metrics()`` with the prefix ``mosaic/``."""
    return {f"mosaic/{name}": value for name, value in handle.metrics().items()}
