"""Intercepts calls to the model and its placed modules and sends them to the active plan's lanes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mosaic.engine.calls.attach import attach, detach
from mosaic.engine.calls.hidden import Parts, Rewind
from mosaic.engine.calls.placed_module import PendingBackwards
from mosaic.engine.calls.thread_state import on_user_stream
from mosaic.engine.finding.find import Finding
from mosaic.engine.host.executor import detach_parts
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import Session
from mosaic.engine.trial import Trial
from mosaic.errors import ModuleContractError, MosaicError, UnforeseenError
from mosaic.find.structure import tensors_in


class Attachment:
    """Intercepts the calls of a model and its placed modules; belongs to a handle."""

    def __init__(self, model: nn.Module, finding: Finding, *, before_call: Callable[[], None]) -> None:
        self.placed: PlacedPlan | None = None  # the active plan; None while the model runs as it was
        self.trial: Trial | None = None
        self.enabled = True  # whether lanes may be used: not inside of ``disabled()``
        self.num_steps = 0  # steps of the optimizer that holds the model's parameters
        self._model = model
        self._finding = finding
        self._before_call = before_call
        self._taken: list[nn.Module] = []
        self._root: nn.Module | None = None
        self._parts: Parts | None = None  # of the model, if its last call changed none
        self._hook: RemovableHandle | None = None  # on optimizers' steps
        self._is_watched = False  # plans are switched on the host, but not while a backward is due
        self._pending: PendingBackwards | None = None
        self._depth = 0
        self._lock = threading.RLock()
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._is_called = False  # since the last step of an optimizer

    def begin(self, placed: PlacedPlan | None, trial: Session | None = None) -> None:
        """Intercepts the calls, to run them on a plan or to try several; with neither the model stays as it is."""
        self.placed = placed
        try:
            if placed is not None or trial is not None:
                self._is_watched = trial is not None and trial.request.backend.device.kind == "host"
                self.take_modules()
                if not any(module is self._model for module in self._taken):
                    attach(self._model, self._whole_call)
                    self._root = self._model
            if trial is not None:
                self.trial = Trial(self, trial)
                self.trial.open_all()
            self._hook = self._watch_optimizers()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Restores the plain classes of modules and ends the lanes; a second call does nothing."""
        self.release_modules()
        if self._root is not None:
            detach(self._root)
            self._root = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.trial is not None:
            self.trial.stop()
        if self.placed is not None:
            self.placed.executor.close()

    def _watch_optimizers(self) -> RemovableHandle:
        before = weakref.WeakMethod(self._before_optimizer)  # torch's table of hooks must not keep the model alive
        return register_optimizer_step_pre_hook(lambda optimizer, *_: (step := before()) and step(optimizer))

    def settle(self) -> None:
        if self.placed is not None:
            self.placed.executor.settle()

    @property
    def is_busy(self) -> bool:
        """Returns True if a call waits for a backward that needs what runs the model now."""
        return bool(self._pending) or (self.placed is not None and self.placed.is_in_flight)

    def release_modules(self) -> None:
        """Restores the plain classes of placed modules, and of parts that an executor attached."""
        for module in self._taken:
            detach(module)
        detach_parts(self._model)
        self._taken.clear()
        self._pending = None

    def switch_to(self, placed: PlacedPlan | None) -> None:
        """Runs the model on other lanes from now on, or in the plain way; nothing may be in flight."""
        if placed is not self.placed:
            self.settle()
            self.placed = placed

    def take_modules(self) -> None:
        self._pending = PendingBackwards() if self._is_watched else None
        for subject in self._finding.subjects:
            attach(subject.module, partial(self._placed_call, subject.name), partial(self._reach, subject.name))
            self._taken.append(subject.module)

    def _placed_call(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_called, placed = True, self.placed
        if placed is None:
            result = plain(*args, **kwargs)
        elif not self.enabled:
            result = placed.executor.call_plainly(placed.sites[name], plain, args, kwargs)
        elif not placed.on_streams or not on_user_stream():
            result = placed.executor.call(placed.sites[name], plain, args, kwargs)
        elif not self._lock.acquire(blocking=False):  # the other thread may be waiting for this one
            raise ModuleContractError(
                f"{name!r} is called by one thread while another is in a call of the model, whose lanes one thread "
                f"at a time can use; call the whole model in each thread, or leave it out: colocate(..., "
                f"exclude=[{name!r}])"
            )
        else:
            try:
                result = placed.executor.call(placed.sites[name], plain, args, kwargs)
            finally:
                self._lock.release()
        if self._pending is not None:
            self._pending.note(tensor for tensor in tensors_in(result) if type(tensor) is not LaneTensor)
        return result

    def _whole_call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the model; threads take turns, unless this is part of a call, or of a backward, that one is in."""
        with self._lock if on_user_stream() else nullcontext():
            self._is_called, trial = True, self.trial
            if self._depth or self._hook is None or trial is None or not trial.is_running:
                return self._run_whole(plain, args, kwargs)
            shapes = [tensor.shape for tensor in tensors_in((args, kwargs))]
            trial.before_call((torch.is_grad_enabled(), *shapes))
            self._depth += 1
            try:
                return self._run_whole(plain, args, kwargs)
            except BaseException as error:
                trial.note_error(error)
                raise
            finally:
                self._depth -= 1

    def _run_whole(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before_call()
        placed = self.placed
        if placed is None or not self.enabled:
            return plain(*args, **kwargs)
        if not placed.executor.calls_again:
            return placed.executor.whole(plain, args, kwargs)
        unforeseen: UnforeseenError | None = None  # after a call whose draws in Python were not noted
        while True:  # each turn but the last finds a module that stays in place from then on
            parts = self._parts if self._parts is not None and self._parts.is_now() else Parts(self._model)
            data = [each for each in (*args, *kwargs.values()) if not callable(each)]  # a function may reach anything
            rewind, self._parts = Rewind(parts, data), None
            try:
                result = placed.executor.whole(plain, args, kwargs)
            except UnforeseenError as error:
                if not rewind.undo():
                    raise
                unforeseen = unforeseen if parts.draws_in_python else error
            except Exception as error:  # of any kind: the model's own, or one that a lane's has led to
                if isinstance(error, MosaicError) or not placed.executor.has_failed or not rewind.undo():
                    raise
                return self._run_without_lanes(placed, plain, args, kwargs)
            else:
                if placed.executor.has_failed and rewind.undo():  # the model has caught an error
                    return self._run_without_lanes(placed, plain, args, kwargs)
                parts.draws_in_python = rewind.draws_in_python()
                if parts.draws_in_python and unforeseen is not None:
                    raise unforeseen
                self._parts = parts if parts.is_now() else None  # what was in attributes may keep a whole step alive
                return result
            placed.forget_calls()

    def _run_without_lanes(self, placed: PlacedPlan, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call again in which a lane has raised an error, which comes later than in the plain loop."""
        placed.forget_calls()
        self.enabled = False
        try:
            return plain(*args, **kwargs)
        finally:
            self.enabled = True

    def _reach(self, name: str) -> None:
        if self.placed is not None:
            self.placed.executor.reach(self.placed.sites[name])

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Branches that the loop calls itself may still be running when the optimizer changes their weights."""
        self.settle()
        if self._holds(optimizer) and (self._is_called or not self._taken):  # not a second one in the same step
            self._is_called = False
            self.num_steps += 1
            if self.trial is not None:
                self.trial.boundary()

    def _holds(self, optimizer: Optimizer) -> bool:
        """Returns True if an optimizer holds a parameter of the model."""
        num_groups, holds = self._held.get(optimizer, (None, False))
        if num_groups != len(optimizer.param_groups):
            own = set(map(id, self._model.parameters()))
            holds = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            self._held[optimizer] = len(optimizer.param_groups), holds
        return holds
