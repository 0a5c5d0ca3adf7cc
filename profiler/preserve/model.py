"""Leaving a model as it was found: tracing and profiling run it, and training must not notice."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from mosaic.errors import UnsupportedModelError
from mosaic.profiler.preserve.memory import Memory, WriteWatch
from mosaic.profiler.preserve.process import Process
from mosaic.profiler.preserve.reach import Change, Reach

MAX_COPIED_BYTES = 1 << 22
"""Tensors that are smaller together are copied beforehand."""

MAX_COPIED_UNWATCHED_BYTES = 1 << 28
"""The same where nobody sees what is written; a measurement takes longer than this copy."""


class Seen:
    """What a run of a model was seen to change.

    Attributes:
        written: The storages that it wrote.
        left: Its attributes and containers that had changed in the end, with what they had become.
    """

    def __init__(self) -> None:
        self.written: frozenset[int] = frozenset()
        self.left: tuple[Change, ...] = ()

    def forget(self) -> None:
        """Lets go of what the run left, which may be large."""
        self.left = ()


class RunsAlone(Protocol):
    """A module that is run alone, such as a ``Subject``."""

    @property
    def args(self) -> Any:
        """Positional arguments."""

    @property
    def kwargs(self) -> Any:
        """Keyword arguments."""

    @property
    def seen(self) -> Seen | None:
        """What a run of the whole model was seen to change."""


@contextmanager
def preserved(
    model: nn.Module, given: Any = None, *, alone: Sequence[RunsAlone] = (), elsewhere: bool = False
) -> Iterator[Seen]:
    """Gives back what running a model changes, bit for bit, also after an error or an interrupt.

    That is: parameters, buffers and other tensors that the model reaches, with their gradients and ``requires_grad``;
    attributes of its parts and of objects that these hold, with what is in containers (see ``Reach``); random numbers
    of torch, of every GPU in use, of Python and of numpy, and generators that the model holds; settings of torch.
    Not put back are ``_version`` counters, and what lies in globals and closures of Python's.

    Inside, no tensor has a gradient, and hooks that follow its accumulation are not called.

    Args:
        model: The model.
        given: What it is run on: a batch, or a function that runs it.
        alone: Modules that are run alone. They find the attributes that a run of the whole model leaves them.
        elsewhere: Whether the model runs on other threads too, or is timed. By default the operators of this thread
            are watched, and what they write is copied just before; else what a run was seen to write is copied now.

    Yields:
        What the block is seen to change; complete once it has ended.

    Raises:
        UnsupportedModelError: Something was changed that cannot be put back.
    """
    for failure in _reshard(model):
        raise UnsupportedModelError(failure)
    known = {one.seen for one in alone if one.seen is not None}
    reach, process = Reach(model, given, [(one.args, one.kwargs) for one in alone]), Process()
    limit = MAX_COPIED_UNWATCHED_BYTES if elsewhere else MAX_COPIED_BYTES
    written = frozenset(key for seen in known for key in seen.written)
    memory = Memory(reach.tensors, buffers=reach.buffers, written=written, limit_bytes=limit)
    now = Seen()

    def put_back() -> list[str]:
        with _interrupts_wait():
            return [*_reshard(model), *reach.put_back(), *memory.put_back(), *process.put_back()]

    try:
        memory.set_gradients_aside()
        for found, kind, became in (change for seen in known for change in seen.left):
            if reach.reaches(found):  # else nobody would put it back
                kind.put_back(found, became)
        with nullcontext() if elsewhere else WriteWatch(memory):
            yield now
        now.written, now.left = frozenset(memory.written), tuple(reach.changed())
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
