"""Watching a plain run: when each module's forward and backward ran, to be drawn beside a colocated one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import tensors_in
from mosaic.timeline import Span, Timeline


class PlainRecorder:
    """Start and end of every forward and backward of some modules; made by ``recorded``."""

    def __init__(self, num_slots: int) -> None:
        self._slots = tuple(range(num_slots))
        self._spans: list[tuple[str, str, int, int, int]] = []
        self._started: dict[str, int] = {}
        self._backward: dict[str, list[int]] = {}
        self._step = 0

    def end_step(self) -> None:
        """Says that the next call belongs to the next training step."""
        for name, times in self._backward.items():
            self._spans.append((name, "backward", self._step, times[0], times[-1]))
        self._backward.clear()
        self._step += 1

    def timeline(self, title: str = "plain") -> Timeline:
        """Returns what was recorded, in milliseconds since the first start."""
        origin = min((start for *_, start, _ in self._spans), default=0)
        return Timeline(
            title=title,
            num_slots=len(self._slots),
            spans=tuple(
                Span(
                    module=name,
                    phase=phase,  # type: ignore[arg-type]
                    slots=self._slots,
                    step=step,
                    start_ms=(start - origin) / 1e6,
                    end_ms=(end - origin) / 1e6,
                )
                for name, phase, step, start, end in sorted(self._spans, key=lambda span: span[3])
            ),
        )

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        """Hooks a module; returns the handles that take the hooks off."""

        def before(*_: Any) -> None:
            self._started[name] = time.perf_counter_ns()

        def after(_module: Any, _args: Any, result: Any) -> None:
            self._spans.append((name, "forward", self._step, self._started[name], time.perf_counter_ns()))
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: tick())

        def tick(*_: torch.Tensor) -> None:
            self._backward.setdefault(name, []).append(time.perf_counter_ns())

        handles: list[Any] = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        handles += [
            p.register_post_accumulate_grad_hook(tick) for p in module.parameters() if p.requires_grad and p.is_leaf
        ]
        return handles


@contextmanager
def recorded(modules: Mapping[str, nn.Module], num_slots: int) -> Iterator[PlainRecorder]:
    """Records modules of a plain run inside the block; call ``end_step`` after every optimizer step.

    A backward lasts from the gradient of the module's output to the last gradient of its parameters.
    """
    recorder = PlainRecorder(num_slots)
    handles = [handle for name, module in modules.items() for handle in recorder.watch(name, module)]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
