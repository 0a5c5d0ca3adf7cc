"""Tensors that a stream is computing: real ones, tagged with the lane that they belong to.

What a placed module returns are ``StreamTensor``s: shells around plain tensors, with the point in their lane's order
from which on they are there. What happens to one decides where the work goes:

* an operation on tensors of one lane runs on that lane's stream (*glue follows its branch*), and so does its
  backward, since autograd runs each operation where its forward ran;
* an operation that mixes lanes, needs values on the host, or writes into other tensors makes the user's stream wait
  and runs there (*joins where lanes mix*); its results are plain.

Torch functions see the shell and work on the plain tensor, so the autograd graph is that of the plain loop. What goes
past them (autograd functions, operators in C++) finds a tensor with the same memory and the same gradient, and joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.utils.dlpack
from torch import nn
from torch._C._dynamo import eval_frame as dynamo

from mosaic.engine.calls.thread_state import on_user_stream, without_cast_cache
from mosaic.engine.calls.torch_functions import TorchFunction, attributes_of, look_up, may_change
from mosaic.engine.streams.order import LaneOrder, Orders, Point
from mosaic.errors import ModuleContractError
from mosaic.find.structure import map_tensors, tensors_in, versions_of

_SCALARS = frozenset({int, float, bool, type(None), str, torch.Size, torch.dtype, torch.device})
_TAGGED_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


class StreamTensor(torch.Tensor):
    """A tensor of a lane; made by ``tagged`` alone."""

    _plain: torch.Tensor
    _point: Point
    _loose: bool = False  # made while autograd was off: an autograd function may give it a place in the graph
    _adopted: bool = False  # one did: its place in the graph is the shell's own
    _recorded: tuple[int, ...] = ()  # streams that the allocator knows of, by handle

    @property
    def order(self) -> LaneOrder:
        return self._point.order

    def plain(self) -> torch.Tensor:
        """Returns the plain tensor, for work that is ordered."""
        if self._loose:
            with torch._C.DisableTorchFunctionSubclass():
                if _has_history(self):
                    with torch.enable_grad():  # it may be asked for in a backward first
                        self._plain = self.as_subclass(torch.Tensor)
                    self._loose, self._adopted = False, True
        return self._plain

    def order_before(self, stream: Any) -> None:
        """Orders a stream behind this tensor, and tells the allocator."""
        order, handle = self._point.order, stream.cuda_stream
        vars(self._plain).update(attributes_of(self))
        if handle != order.handle and not order.lane.closed:
            order.hold(stream, self._point)
            if handle not in self._recorded:
                order.home.api.record_use(self._plain, stream)
                self._recorded = (*self._recorded, handle)

    def join(self) -> torch.Tensor:
        """Orders the current stream behind this tensor and returns it plain."""
        order = self._point.order
        here = order.home.api.current_stream()
        self.order_before(here)
        if on_user_stream():
            order.check_reads(here)
        return self.plain()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        does = look_up(func)
        if does.is_pure and args and type(args[0]) is StreamTensor:
            others, order = (*args[1:], *kwargs.values()) if kwargs else args[1:], args[0]._point.order
            if _SCALARS.issuperset(map(type, others)) and on_user_stream() and not order.lane.closed:
                order.enter(ready=True)
                with order.home.api.use_stream(order.stream):
                    result = func(args[0].plain(), *args[1:], **(kwargs or {}))
                return _tagged(result, order, args[:1])
        if does.reads or does.sets:
            return _on_object(func, does, args, kwargs or {})
        if does.name == "__iter__":
            return iter(args[0].unbind(0))
        return _run(func, does, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with func first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Joins, for operators that were called past torch functions; gradients are above this."""
        kwargs = kwargs or {}
        shells = [t for t in tensors_in((args, kwargs)) if type(t) is StreamTensor]
        here = shells[0].order.home.api.current_stream()
        values: dict[int, torch.Tensor] = {}
        for shell in shells:
            shell.order_before(here)
            values[id(shell)] = shell._plain if func._opname == "set_" else shell._plain.detach()

        def value(tensor: torch.Tensor) -> torch.Tensor:
            return values.get(id(tensor), tensor)

        with _writing(look_up(func).written(args, kwargs), here):
            result = func(*map_tensors(value, args), **map_tensors(value, kwargs))
        stands_for = {id(values[id(shell)]): shell for shell in shells}
        return map_tensors(lambda tensor: stands_for.get(id(tensor), tensor), result)


# A function that the user compiles would get these lines into its graph. torch.compiler.disable takes ten calls more.
_decides: Any = StreamTensor.__torch_function__.__func__  # type: ignore[attr-defined]
_decides._torchdynamo_disable, _SKIP = True, dynamo._FrameAction.SKIP
dynamo.set_code_exec_strategy(_decides.__code__, dynamo._FrameExecStrategy(_SKIP, _SKIP))


def _run(func: Any, does: TorchFunction, args: Any, kwargs: Any) -> Any:
    """Runs a torch function that has tensors of lanes among its arguments: on their lane, or joined."""
    shells: list[StreamTensor] = []
    others: list[torch.Tensor] = []
    plain_args = _plain_values(args, shells, others)
    plain_kwargs = dict(zip(kwargs, _plain_values(kwargs.values(), shells, others), strict=True)) if kwargs else kwargs
    order = shells[0]._point.order
    written = does.written(args, kwargs) if does.may_write or "out" in kwargs else ()
    if (
        does.value
        or order.lane.closed
        or (len(shells) > 1 and len({shell._point.order for shell in shells}) > 1)
        or (written and {*map(type, written)} != {StreamTensor})
        or not on_user_stream()
        or (does.moves and does.moves_elsewhere(args, kwargs, order.device))
        or (any(map(may_change, others)) and not does.statistics and not order.home.had(others))
    ):
        return _run_joined(partial(func, *plain_args, **plain_kwargs), shells, written)
    return _run_checked(partial(func, *plain_args, **plain_kwargs), does, shells, others, bool(written))


def _run_joined(call: Callable[[], Any], shells: Sequence[StreamTensor], written: Sequence[torch.Tensor]) -> Any:
    """Runs it on the current stream, behind the lanes of its arguments."""
    for shell in shells:
        shell.join()
    with _writing(written, shells[0].order.home.api.current_stream()) if written else nullcontext():
        result = call()

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        """Keeps an argument that is returned as it was, and a view of a lane's tensor with the lane."""
        is_view = tensor._is_view() and on_user_stream()
        for shell in shells:
            if tensor is shell._plain:
                return shell
            if is_view and (tensor._base is shell._plain or tensor._base is shell._plain._base):
                shell.order.wait_for(shell.order.home.api.current_stream())
                return tagged(tensor, shell.order.point())
        return tensor

    return map_tensors(shown, result)


def _run_checked(
    call: Callable[[], Any], does: TorchFunction, shells: list[StreamTensor], others: list[torch.Tensor], writes: bool
) -> Any:
    """Runs on the lane of its arguments what has other tensors, too, or may write."""
    order, num_shells = shells[0].order, len(shells)
    home = order.home
    order.enter(ready=home.had(others))
    if writes:
        order.hold_back_writer(order.stream)
    tensors = [*(shell._plain for shell in shells), *others]
    before = versions_of(tensors)
    may_cast = others and torch.is_autocast_enabled(order.device.type)
    # A weight that was cast on one lane must not be found by another, which did not wait.
    with home.api.use_stream(order.stream), without_cast_cache() if may_cast else nullcontext():
        result = call()
    point = order.point()
    for other in others:
        home.api.record_use(other, order.stream)
        order.note_read(other, point, f"{does.name}, which follows a placed module on its lane,")
    after = versions_of(tensors)
    # Orders whoever comes behind what was written, be it known beforehand or not.
    if writes or before[:num_shells] != after[:num_shells]:
        if not writes and order.readers:
            raise ModuleContractError(
                f"{does.name} wrote into a tensor that other streams may still be reading, and nothing in its "
                "name or schema says that it writes; write to a copy"
            )
        order.wrote()
    if others and (does.statistics or before[num_shells:] != after[num_shells:]):
        here = home.api.current_stream()
        order.hold(here, order.point())
        order.check_reads(here)
    return _tagged(result, order, shells)


def _plain_values(values: Iterable[Any], shells: list[StreamTensor], others: list[torch.Tensor]) -> list[Any]:
    """Returns values with tensors of lanes plain; notes these and all other tensors."""
    plain = []
    for value in values:
        kind = type(value)
        if kind is StreamTensor:
            shells.append(value)
            plain.append(value.plain() if value._loose else value._plain)
        elif kind in _SCALARS:
            plain.append(value)
        elif isinstance(value, torch.Tensor):
            others.append(value)
            plain.append(value)
        elif kind is slice:  # torch would ask for its ends on the lane's stream
            ends = (value.start, value.stop, value.step)
            plain.append(slice(*(int(end) if isinstance(end, torch.Tensor) else end for end in ends)))
        elif kind is list or kind is tuple:
            plain.append(kind(_plain_values(value, shells, others)))
        else:
            plain.append(map_tensors(lambda tensor: _plain_values((tensor,), shells, others)[0], value))
    return plain


def _tagged(result: Any, order: LaneOrder, shells: Sequence[StreamTensor]) -> Any:
    """Returns a result with its tensors tagged; an argument that is returned stays the same object."""
    point = order.point()

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        for shell in shells:
            if tensor is shell._plain:
                return shell
        return tagged(tensor, point)

    result = shown(result) if isinstance(result, torch.Tensor) else map_tensors(shown, result)
    if order.is_owing:
        order.settle()
    return result


def tagged(tensor: torch.Tensor, point: Point) -> torch.Tensor:
    """Returns a tensor that was made on a lane as a tensor of that lane.

    Tensors of other devices stay plain. So do those with attributes and of other classes or layouts, which are awaited.
    """
    if tensor.device != point.order.device:
        return tensor
    if type(tensor) not in _TAGGED_TYPES or tensor.layout is not torch.strided or vars(tensor):
        point.order.is_owing = True
        return tensor
    shell = tensor.as_subclass(StreamTensor)
    shell._plain = tensor
    shell._point = point
    if not torch.is_grad_enabled():
        shell._loose = True
    return shell


@contextmanager
def _writing(written: Sequence[torch.Tensor], here: Any) -> Iterator[None]:
    """Around work on a stream that writes into tensors of lanes: behind their readers, before whatever reads next."""
    owners = {t.order for t in written if type(t) is StreamTensor and not t.order.lane.closed}
    for order in owners:
        order.hold_back_writer(here)
    yield
    for order in owners:
        order.wait_for(here)
        order.wrote()


def _on_object(func: Any, does: TorchFunction, args: Any, kwargs: dict[str, Any]) -> Any:
    if does.name == "__hash__":
        return id(args[0])
    if len(args) == 1 and not kwargs:
        result = func(_plain(args[0]))
    else:
        result = func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))
    if does.name == "requires_grad_":
        return args[0]
    if does.name == "__get__:grad_fn" and args[0]._adopted:  # torch's own hooks on modules look for their node here
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].grad_fn
    return result


def _has_history(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor that was made with autograd off has a place in the graph nevertheless."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # torch's answer for a view, made with autograd off, of what was written to since
        return False


def join_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor plain, ordered before what the current stream does next."""
    return tensor.join() if type(tensor) is StreamTensor else tensor


@cache
def patch_torch() -> None:
    """Has functions of torch that no tensor's class sees wait for lanes, tell them, or count their writes, from now on.

    These are ``to_dlpack``, unless its name was imported before; the one that runs all backwards; and two whose kernels
    do not count their writes on CUDA (seen in 2.11), such as those of a momentum encoder in the model's own call.
    """
    to_dlpack = torch._C._to_dlpack  # type: ignore[attr-defined]

    @wraps(to_dlpack)
    def joining(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_dlpack(join_tensor(tensor), *args, **kwargs)

    for home in (torch, torch.utils.dlpack):
        home.to_dlpack = joining  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = _ordered(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    for name in ("_foreach_lerp_", "_foreach_zero_"):
        setattr(torch, name, _counted(getattr(torch, name)))


def _ordered(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run_backward)
    def ordered(tensors: Any, gradients: Any, keep_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        alive = [orders for each in list(Orders.alive) if (orders := each()) is not None]
        for orders in alive:
            orders.begin_backward()
        try:
            result = run_backward(tensors, gradients, keep_graph, create_graph, *args, **kwargs)
        except BaseException:  # after which autograd orders no streams
            for orders in alive:
                if not orders.api.is_capturing():
                    orders.join(with_backward=True)
            raise
        for orders in alive:
            orders.end_backward(result or (), twice=create_graph)
        return result

    return ordered


def _counted(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def counting(tensors: Any, *args: Any, **kwargs: Any) -> None:
        write(tensors, *args, **kwargs)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])

    return counting


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if type(tensor) is StreamTensor else tensor
