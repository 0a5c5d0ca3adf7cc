"""Intercepts calls to the model and its placed modules and sends them to the active plan's lanes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mosaic.engine.calls.attach import attach, detach
from mosaic.engine.calls.hidden import Rewind
from mosaic.engine.calls.placed_module import PendingBackwards
from mosaic.engine.finding.find import Finding
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import Session
from mosaic.engine.streams.tensor import on_user_stream
from mosaic.engine.trial import StepUnit, Trial, outer_shapes
from mosaic.errors import ModuleContractError, UnforeseenError
from mosaic.find.structure import tensors_in


class Attachment:
    """Intercepts the calls of a model and its placed modules; belongs to a handle."""

    def __init__(self, model: nn.Module, finding: Finding, *, before_call: Callable[[], None]) -> None:
        self.placed: PlacedPlan | None = None  # the active plan; None while the model runs as it was
        self.trial: Trial | None = None
        self.enabled = True  # whether lanes may be used: not inside of ``disabled()``
        self.num_steps = 0  # steps of the optimizer that holds the model's parameters
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._model = model
        self._finding = finding
        self._before_call = before_call
        self._taken: list[nn.Module] = []
        self._root: nn.Module | None = None
        self._hooks: list[RemovableHandle] = []
        self._pending: PendingBackwards | None = None
        self._depth = 0
        self._measure_again: Callable[[], bool] | None = None
        self._step_begins = False
        self._lock = threading.RLock()
        self._caller: int | None = None  # the thread that is in a call of the whole model
        self._unit = StepUnit(model)

    def begin(
        self, placed: PlacedPlan | None, trial: Session | None = None, measure_again: Callable[[], bool] | None = None
    ) -> None:
        """Intercepts the calls, to run them on a plan or to try several; with neither the model stays as it is.

        ``measure_again`` is called before the first call of each step. If it returns True the model was planned anew,
        which ends this attachment.
        """
        self.placed, self._measure_again = placed, measure_again
        if placed is None and trial is None and measure_again is None:
            self._hooks = [_step_hook(self)]
            return
        try:
            if placed is not None or trial is not None:
                self.take_modules(track=False)
            self._take_root()
            if trial is not None and trial.trial_settings is not None:
                self.trial = Trial(self, trial, trial.trial_settings)
                self.trial.open_all()
            self._hooks = [_step_hook(self)]
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Gives the modules their plain classes back and ends the lanes; calling it again does nothing."""
        self.release_modules()
        if self._root is not None:
            detach(self._root)
            self._root = None
        for hook in self._hooks:
            hook.remove()
        if self.trial is not None:
            self.trial.stop()
        if self.placed is not None:
            self.placed.close()

    def settle(self) -> None:
        """Orders what the caller does next behind all that the lanes were given."""
        if self.placed is not None:
            self.placed.executor.settle()

    # For the trial.

    @property
    def has_pending(self) -> bool:
        """Returns True if a call that ran in the plain way waits for its backward."""
        return bool(self._pending)

    def take_modules(self, *, track: bool) -> None:
        """Takes the calls of placed modules, if that is not done.

        Raises:
            ValueError: Another handle has them.
        """
        self._pending = PendingBackwards() if track else None
        if not self._taken:
            for subject in self._finding.subjects:
                name = subject.name
                attach(subject.module, self._placed_call(name), self.settle, partial(self._reach, name))
                self._taken.append(subject.module)

    def release_modules(self) -> None:
        for module in self._taken:
            detach(module)
        self._taken.clear()
        self._pending = None

    def switch_to(self, placed: PlacedPlan | None) -> None:
        """Runs the model on other lanes from now on, or in the plain way; nothing may be in flight."""
        if placed is self.placed:
            return
        if self.placed is not None:
            self.placed.executor.pause()
        self.placed = placed
        if placed is not None:
            placed.executor.resume()

    # Parts.

    def _take_root(self) -> None:
        if not any(module is self._model for module in self._taken):
            attach(self._model, self._whole_call, self.settle)
            self._root = self._model

    def _placed_call(self, name: str) -> Any:
        def intercept(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            placed = self.placed
            if placed is None or not self.enabled:
                result = plain(*args, **kwargs)
            elif not placed.on_streams or not on_user_stream():
                result = placed.executor.call(placed.sites[name], plain, args, kwargs)
            else:
                with self._alone(name):
                    result = placed.executor.call(placed.sites[name], plain, args, kwargs)
            if self._pending is not None:
                self._pending.note(tensor for tensor in tensors_in(result) if type(tensor) is not LaneTensor)
            return result

        return intercept

    def _alone(self, name: str) -> AbstractContextManager[object]:
        """Around a module's call: no other thread launches on the lanes meanwhile.

        Raises:
            ModuleContractError: Another thread calls the model, and may be waiting for this one.
        """
        if self._caller not in (None, threading.get_ident()):
            raise ModuleContractError(
                f"{name!r} is called by one thread while another is in a call of the model, whose lanes one thread at "
                f"a time can use; call the whole model in each thread, or leave it out: colocate(..., "
                f"exclude=[{name!r}])"
            )
        return self._lock

    def _whole_call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the model; threads take turns, unless this is part of a call, or of a backward, that one is in."""
        if not on_user_stream():
            return self._tried(plain, args, kwargs)
        with self._lock:
            before, self._caller = self._caller, threading.get_ident()
            try:
                return self._tried(plain, args, kwargs)
            finally:
                self._caller = before

    def _tried(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth or not self._hooks or (self.trial is None and self._measure_again is None):
            return self._run_whole(plain, args, kwargs)
        if self._unit.begins_at_call():
            self.settle()
            self._begin_step()
        if self._step_begins:
            self._step_begins = False
            if self._measure_again is not None and self._measure_again():
                return self._model(*args, **kwargs)
        if self.trial is None:
            return self._run_whole(plain, args, kwargs)
        self.trial.before_call(outer_shapes(args, kwargs))
        self._depth += 1
        try:
            return self._run_whole(plain, args, kwargs)
        except BaseException as error:
            self.trial.note_error(error)
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
        while True:  # each turn but the last finds a module that stays in place from then on
            rewind = Rewind(self._model)
            try:
                return placed.executor.whole(plain, args, kwargs)
            except UnforeseenError:
                if not rewind.undo():
                    raise
            placed.forget_calls()

    def _reach(self, name: str) -> None:
        if self.placed is not None:
            self.placed.executor.reach(self.placed.sites[name])

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Branches that the loop calls itself may still be running when the optimizer changes their weights."""
        self.settle()
        self.stepped.add(optimizer)
        if self._unit.begins_at_step(optimizer):
            self.num_steps += 1
            if self._unit.has_counted_calls and self.trial is not None:
                self._unit.has_counted_calls = False
                self.trial.start_over("the loop trains now")
            self._begin_step()

    def _begin_step(self) -> None:
        self._step_begins = True
        if self.trial is not None:
            self.trial.boundary()


def _step_hook(attachment: Attachment) -> RemovableHandle:
    """Registers for every optimizer's steps.

    torch's table is global, so it must not keep the model alive; nor may a hook leave it while it is called.
    """
    reference = weakref.ref(attachment)

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive._before_optimizer(optimizer)

    return register_optimizer_step_pre_hook(before_step)
