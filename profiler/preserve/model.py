"""Leaving a model as it was found: tracing and profiling run it, and training must not notice."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mosaic.errors import UnsupportedModelError
from mosaic.find.torch_settings import SETTINGS, put_back, read
from mosaic.profiler.preserve.memory import Memory, WriteWatch
from mosaic.profiler.preserve.reach import Reach, Seen, Where, path_of
from mosaic.profiler.subject import Subject

MAX_COPIED_BYTES = 1 << 22
"""Tensors that are smaller together are copied beforehand."""

MAX_COPIED_UNWATCHED_BYTES = 1 << 28
"""The same where nobody sees what is written; a measurement takes longer than this copy."""

_Step = tuple[Where, Callable[[], Any]]
"""What is put back, and how."""


@contextmanager
def preserved(
    model: nn.Module, given: Any = None, *, alone: Sequence[Subject] = (), elsewhere: bool = False
) -> Iterator[Seen]:
    """Gives back what running a model changes, bit for bit, also after an error or an interrupt.

    That is: parameters, buffers and other tensors that the model reaches, with their gradients and ``requires_grad``;
    attributes of its parts and of objects that these hold, with what is in containers; what its methods and hooks
    enclose, and the globals that they name (see ``Reach``); random numbers of torch, of every GPU in use, of Python and
    of numpy, and generators that the model holds; settings of torch. Not put back are ``_version`` counters.

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
    failures = _failures_of(_reshard(model))
    if failures:
        raise UnsupportedModelError("; ".join(failures))
    known = {one.seen for one in alone if one.seen is not None}
    settings = read(SETTINGS)
    dice = torch.default_generator, torch.cuda.default_generators, random._inst, np.random.mtrand._rand
    reach = Reach(model, given, [(one.args, one.kwargs) for one in alone], dice)
    memory = Memory(
        reach.tensors,
        buffers=reach.buffers,
        written=[key for seen in known for key in seen.written],
        limit_bytes=MAX_COPIED_UNWATCHED_BYTES if elsewhere else MAX_COPIED_BYTES,
    )
    now = Seen()

    def steps_back() -> Iterator[_Step]:
        yield from _reshard(model)
        yield from reach.steps_back()
        yield from memory.steps_back()
        for setting, before in zip(SETTINGS, settings, strict=True):
            yield (None, setting.name), partial(put_back, setting, before)
        yield (None, "autocast's cache"), torch.clear_autocast_cache  # it may hold weights as they were inside

    try:
        memory.set_gradients_aside()
        for found, kind, became in (change for seen in known for change in seen.left):
            if reach.reaches(found):  # else nobody would put it back
                kind.put_back(found, became)
        with nullcontext() if elsewhere else WriteWatch(memory):
            yield now
        now.written, now.left = frozenset(memory.written), tuple(reach.changed())
    except BaseException as error:
        with _interrupts_wait():
            for failure in _failures_of(steps_back()):
                error.add_note(f"colocating could not put back {failure}")
        raise
    with _interrupts_wait():
        failures = _failures_of(steps_back())
    if failures:
        raise UnsupportedModelError(f"running the model changed what cannot be put back: {'; '.join(failures)}")


def _failures_of(steps: Iterator[_Step]) -> list[str]:
    """Takes all steps; says which failed and why."""
    failures = []
    for where, step in steps:
        try:
            step()
        except Exception as error:  # the rest must be put back all the same
            failures.append(f"{path_of(where)}: {error}")
    return failures


def _reshard(model: nn.Module) -> Iterator[_Step]:
    """Yields what lets FSDP2 put its shards back in their places itself, where it has gathered the whole."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in model.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):
            yield (None, f"the shards of a {type(part).__name__}"), part.reshard


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C act once the block has ended, so that nothing is put back by half."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
