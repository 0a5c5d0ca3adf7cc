"""The modules that use each parameter and buffer of a model, whosever part it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.finding.find import Sample, runner_of, uncompiled
from mosaic.find.restore import preserved
from mosaic.profiler import Subject


def users_of(model: nn.Module, subjects: Sequence[Subject], sample: Sample) -> dict[int, frozenset[str | None]]:
    """Runs the model once and notes by whom each of its parameters and buffers is used, trained or not.

    Returns:
        By the id of the tensor, the names of modules; None stands for the operations between them. Those that nobody
        used are not in it.
    """
    watching = _Watching(model)

    def entering(name: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: watching.enter(name, (args, kwargs))

    run = runner_of(model, sample)
    with ExitStack() as stack:
        stack.enter_context(preserved(model, sample))
        stack.enter_context(uncompiled())
        for subject in subjects:
            for hook in (
                subject.module.register_forward_pre_hook(entering(subject.name), with_kwargs=True),
                subject.module.register_forward_hook(lambda *_: watching.leave(), always_call=True),
            ):
                stack.callback(hook.remove)
        stack.enter_context(watching)
        run()
    return {key: frozenset(users) for key, users in watching.users.items()}


class _Watching(TorchFunctionMode):
    """Notes who uses a model's tensors.

    Attributes:
        users: By the id of a tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._running: list[tuple[str, set[int]]] = []
        self.users: dict[int, set[str | None]] = {}
        self._watched = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def enter(self, name: str, given: Any) -> None:
        """A module begins to run; what it is given as an argument it does not use of its own."""
        self._running.append((name, {id(tensor) for tensor in tensors_in(given)}))

    def leave(self) -> None:
        """The innermost module has returned."""
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the tensors that an operator is given."""
        kwargs = kwargs or {}
        if not look_up(func).reads:
            here, given = self._running[-1] if self._running else (None, set())
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in self._watched and id(tensor) not in given:
                    self.users.setdefault(id(tensor), set()).add(here)
        return func(*args, **kwargs)
