"""Leaving a model as it was found: tracing and profiling run it, and training must not notice."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from mosaic.errors import UnsupportedModelError
from mosaic.profiler.preserve.memory import Memory, WriteWatch
from mosaic.profiler.preserve.process import Process
from mosaic.profiler.preserve.reach import Reach

MAX_COPIED_BYTES = 1 << 22
"""Tensors that are smaller together are copied beforehand."""

MAX_COPIED_UNWATCHED_BYTES = 1 << 28
"""The same where nobody sees what is written; a measurement takes longer than this copy."""


@contextmanager
def preserved(model: nn.Module, given: Any = None, *, written: Collection[int] | None = None) -> Iterator[Memory]:
    """Gives back what running a model changes, bit for bit, also after an error or an interrupt.

    That is: parameters, buffers and other tensors that the model reaches, with their gradients and ``requires_grad``;
    attributes of its parts and of objects that these hold, with what is in containers (see ``Reach``); random numbers
    of torch, of every GPU in use, of Python and of numpy, and generators that the model holds; settings of torch.
    Not put back are ``_version`` counters, and what lies in globals and closures of Python's.

    Inside, no tensor has a gradient, and hooks that follow its accumulation are not called.

    Args:
        model: The model.
        given: What it is run on: a batch, or a function that runs it.
        written: What ``Memory.written`` had after a run of the model, for modules that run on other threads or that
            are timed: it is copied beforehand. By default the operators of this thread are watched, and what they
            write is copied just before.

    Yields:
        The memory of the model, which knows what was written.

    Raises:
        UnsupportedModelError: Something was changed that cannot be put back.
    """
    for failure in _reshard(model):
        raise UnsupportedModelError(failure)
    reach, process = Reach(model, given), Process()
    limit = MAX_COPIED_BYTES if written is None else MAX_COPIED_UNWATCHED_BYTES
    memory = Memory(reach.tensors, buffers=reach.buffers, written=written or (), limit_bytes=limit)

    def put_back() -> list[str]:
        with _interrupts_wait():
            return [*_reshard(model), *reach.put_back(), *memory.put_back(), *process.put_back()]

    try:
        memory.set_gradients_aside()
        with WriteWatch(memory) if written is None else nullcontext():
            yield memory
    except BaseException as error:
        for failure in put_back():
            error.add_note(f"colocating could not put back {failure}")
        raise
    failures = put_back()
    if failures:
        raise UnsupportedModelError(f"running the model changed what cannot be put back: {'; '.join(failures)}")


def _reshard(model: nn.Module) -> Iterator[str]:
    """Lets FSDP2 put its shards back in their places itself, where it has gathered the whole; says what cannot."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in model.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):
            try:
                part.reshard()
            except Exception as error:  # the rest must be put back all the same
                yield f"the shards of a {type(part).__name__}: {error}"


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C act once the block has ended, so that nothing is put back by half."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
