"""Placed modules as CUDA graphs on their lanes, by the recipe of ``torch.cuda.make_graphed_callables``.

The first call of a kind runs a few times on a side stream; then its forward and its backward are captured on the lane's
stream. Later calls copy their inputs to where the graph reads them, replay it, and return copies of the results. One
node of the caller's autograd graph leads from these to the call's differentiable inputs and the module's parameters.

A replay runs no Python. A graph is used while inputs have its shapes, types and plain values, torch its settings, and
the module what it holds and names (``Surroundings``). What cannot be captured runs eagerly, noted in ``eager_calls``.

Two things differ from an eager call, both within rounding: the gradient of an input or parameter that is used several
times is summed inside first, and under autocast a weight is cast at each of its uses.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.branch_graph import survey
from mosaic.engine.calls.hidden import Surroundings, modes_of, read_settings
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.signature import Arguments
from mosaic.engine.calls.thread_state import AsLane, saved_tensor_hooks, surrounding, without_cast_cache
from mosaic.errors import MosaicError, UnsupportedModelError
from mosaic.find.random_numbers import CPU, python_state, torch_state
from mosaic.find.restore import preserved
from mosaic.find.structure import PLAIN_TYPES, flatten, is_opaque, tensors_in, unflatten
from mosaic.find.trace import written_by

NUM_TRIALS = 3  # runs before a capture, as in torch.cuda.make_graphed_callables: libraries tune at their first use
_MAX_CAPTURES = 12  # kinds of calls of one module, such as shapes; further ones run eagerly
_TWICE = "its gradients are taken with create_graph=True, and a graph has no gradients of gradients"
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RefusalError(Exception):
    """A call cannot be captured; the message is the end of a sentence that starts with the module's name."""


class ModuleGraphs:
    """The captured calls of the modules on one device."""

    def __init__(self, api: StreamApi) -> None:
        self.eager_calls: Counter[tuple[str, str]] = Counter()  # by module and reason
        self.captured: Counter[str] = Counter()  # kinds of calls, by module
        self.num_replays = 0
        self._api = api
        self._side = api.new_stream()  # for trial runs: some libraries cannot plan on a green context's stream
        self._graphs: dict[Hashable, ModuleGraph] = {}
        self._failures: dict[Hashable, str] = {}
        self._closed = False
        # It runs before the finalizer of the lanes.
        self._finalizer = weakref.finalize(self, _end, api, self._graphs, self._side, os.getpid())

    def call(self, site: PlacedModule, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call by replay on its lane's stream, the current one; captures it first, or launches it eagerly."""
        if self._closed:
            raise MosaicError("these graphs are closed; colocate the model again to make new ones")
        reason = surrounding()
        if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
            reason = "a torch mode is active, such as a default device"
        if reason is None:
            try:
                arguments = Arguments.take(args, kwargs)
                tensors = _distinct_tensors(arguments, self._api.device)
                graph = self._graph_of(site, run, arguments, tensors)
            except RefusalError as refusal:
                reason = str(refusal)
            else:
                self.num_replays += 1
                return graph.replay(tensors)
        self.eager_calls[site.name, reason] += 1
        return run(*args, **kwargs)

    @property
    def is_in_flight(self) -> bool:
        return any(graph.in_flight for graph in self._graphs.values())

    def close(self) -> None:
        """Frees all graphs, after the device has come to rest; to be called before the streams end."""
        self._closed = True
        self._finalizer()

    def _graph_of(
        self, site: PlacedModule, run: Callable[..., Any], arguments: Arguments, tensors: Sequence[torch.Tensor]
    ) -> ModuleGraph:
        """Returns the graph of a call, which may be captured here; raises RefusalError if there is none."""
        values = [(of, v if isinstance(v, PLAIN_TYPES) else id(v)) for of, v in arguments.context.items()]
        assert site.module is not None
        trained = tuple([parameter.requires_grad for parameter in site.module.parameters()])
        of_module = (id(site.lane), id(site.module), trained, modes_of(site.module))
        key = (*of_module, arguments.key(repr(read_settings()), *values))
        graph = self._graphs.get(key)
        if graph is not None and graph.is_changed():
            del self._graphs[key]
            self._api.synchronize()  # it may still be running
            if not graph.in_flight:
                graph.close()
        elif graph is not None and graph.is_differentiated_twice:
            raise RefusalError(_TWICE)
        elif graph is not None:
            if graph.in_flight:
                raise RefusalError(
                    "an earlier call of the same kind has not gone backward yet, and a replay would overwrite it"
                )
            return graph
        if key in self._failures:
            raise RefusalError(self._failures[key])
        if self.captured[site.name] >= _MAX_CAPTURES:
            raise RefusalError(f"{_MAX_CAPTURES} of its calls were captured, and this is of another kind")
        try:
            graph = ModuleGraph(site, run, arguments, tensors, self._api, self._side)
        except RefusalError as refusal:
            self._failures[key] = str(refusal)
            raise
        self.captured[site.name] += 1
        self._graphs[key] = graph
        return graph


def _end(api: StreamApi, graphs: dict[Hashable, ModuleGraph], side: Any, process: int) -> None:
    if os.getpid() == process:  # the child of a fork has no driver
        api.synchronize()
        for graph in graphs.values():
            graph.close()
        api.give_back(side)
    graphs.clear()


def _distinct_tensors(arguments: Arguments, device: torch.device) -> list[torch.Tensor]:
    """Returns a call's tensors, each once; raises RefusalError where an argument cannot be handed to a graph."""
    if arguments.opaque is not None:
        raise RefusalError(f"it takes a {arguments.opaque}, which may hide tensors")
    tensors = list({id(tensor): tensor for tensor in arguments.tensors}.values())
    for tensor in tensors:
        _check_tensor("it takes", tensor, device)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            raise RefusalError("it takes a sparse, nested or lazily conjugated tensor")
    return tensors


def _check_tensor(verb: str, tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in _PLAIN_TENSORS:
        raise RefusalError(f"{verb} a {type(tensor).__name__}, not a plain tensor")
    if tensor.device != device:
        raise RefusalError(f"{verb} a tensor on {tensor.device}, not on {device}")


class _Pass:
    """One forward by replay, until its backward is over or its results are gone."""

    spent = False


class ModuleGraph:
    """One kind of call of one module: static memory, the graphs that use it, and the autograd graph of the capture.

    A replay writes static memory and its backward reads it; ``ModuleGraphs`` replays again only after both.

    Each parameter has a stand-in, a leaf with the same memory, at which a captured backward ends: it neither runs hooks
    of the parameters nor waits for the streams of gradient accumulators that others keep, such as DDP.
    """

    def __init__(
        self,
        site: PlacedModule,
        run: Callable[..., Any],
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        api: StreamApi,
        side: Any,
    ) -> None:
        assert site.module is not None
        assert isinstance(site.lane, StreamLane)
        self.name = site.name
        self.is_differentiated_twice = False
        self._api = api
        self._lane = site.lane
        self._module = module = site.module
        self._run = run
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._leaves = [numbers.get(id(leaf), (leaf,)) for leaf in arguments.leaves]
        self._nesting = arguments.nesting
        self._surroundings = Surroundings(module)
        self._parameters = dict(module.named_parameters())
        parameters = set(map(id, self._parameters.values()))
        self._held = {id(tensor): tensor for tensor in self._surroundings.tensors if id(tensor) not in parameters}
        self._places = self._places_now()
        self._aliases: dict[str, torch.Tensor] = {
            name: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        self._check_module()
        grad = torch.is_grad_enabled()
        self._static = [torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()) for tensor in tensors]
        for static, tensor in zip(self._static, tensors, strict=True):
            static.requires_grad_(tensor.requires_grad and grad)
        self._memory = [tensor.data for tensor in self._static]  # writing through .data leaves versions alone
        self._results: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[int | nn.Parameter] = []
        self._static_grads: list[torch.Tensor] = []
        self._grads: Sequence[torch.Tensor | None] = ()
        self._graphs: list[Any] = []
        self._latest: weakref.ref[_Pass] | None = None
        self._closed = False
        with _refusing("trying"), preserved(module):
            api.synchronize()  # copies and restoring are on the lane's stream, trial runs on another
            try:
                with api.use_stream(side):
                    self._try_out()
            finally:
                api.synchronize()
        api.synchronize()
        with _refusing("capturing"):  # torch's and the driver's answers to what a capture cannot hold
            self._capture()

    # The module.

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def _places_now(self) -> list[tuple[Any, ...]]:
        places = []
        for name, tensor in self._named_tensors():
            address = 0 if nn.parameter.is_lazy(tensor) else tensor.data_ptr()
            layout = (tensor.dtype, tensor.shape, tensor.stride()) if address else ()
            places.append((name, id(tensor), address, *layout))
        return places

    def is_changed(self) -> bool:
        """Returns True if the module differs from the captured one, or memory that the graph uses was replaced."""
        return self._places != self._places_now() or self._surroundings.changed() is not None

    def _check_module(self) -> None:
        for path, part in self._module.named_modules():
            if any(getattr(part, name) for name in _HOOKS):
                raise RefusalError(f"it has a hook on {path or 'itself'!r}, which a replay would not call")
            if isinstance(part, nn.RNNBase):
                name = path or "itself"
                raise RefusalError(f"{name!r} is recurrent, whose weights and random numbers cuDNN keeps")
        for name, tensor in [*self._named_tensors(), *(("attribute", tensor) for tensor in self._held.values())]:
            _check_tensor(f"its {name!r} is", tensor, self._api.device)

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Puts stand-ins for parameters in place, and keeps autocast from keeping cast weights for later calls."""
        with (
            without_cast_cache(),
            stateless._reparametrize_module(self._module, self._aliases, tie_weights=True, stack_weights=True),
            AsLane(),
        ):
            yield

    # Trial runs.

    def _run_on(self, tensors: Sequence[torch.Tensor]) -> Any:
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self._leaves]
        args, kwargs = self._nesting.unflatten(leaves)
        return self._run(*args, **kwargs)

    def _try_out(self) -> None:
        """Runs the call forward and backward on the current stream; refuses what a graph cannot do."""
        device = self._api.device
        leaves = [*self._static, *self._aliases.values()]
        own = [*leaves, *self._held.values()]
        for place in (CPU, device):  # otherwise a call that sets the seed may find the state that it leaves
            torch.empty(1, device=place).uniform_()
        others, on_host, on_device = python_state(), torch_state(CPU), torch_state(device)
        ended = on_device
        for trial in range(NUM_TRIALS):
            watch = _CaptureWatch(device, self._static, own) if trial == 0 else None
            with self._as_captured(), watch or nullcontext():
                result = self._run_on(self._static)
            if watch is not None and watch.obstacle is not None:
                raise RefusalError(watch.obstacle)
            _check_result(result, leaves, own, device)
            outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
            if outputs:
                with torch.autocast(device.type, enabled=False):  # as it is captured, and as backwards run
                    wanted = [leaf for leaf in leaves if leaf.requires_grad]
                    torch.autograd.grad(outputs, wanted, list(map(torch.ones_like, outputs)), allow_unused=True)
            change = "a tensor's memory" if self._places != self._places_now() else self._surroundings.changed()
            if change is not None:
                raise RefusalError(f"{change} changed in the call itself")  # once may be to keep it for later calls
            if trial > 0 and ended.is_same(torch_state(device)) and not ended.is_same(on_device):
                raise RefusalError("it sets the seed of its random numbers, which a replay would not do")
            ended = torch_state(device)
        if not others.is_same(python_state()):
            raise RefusalError("it draws from Python's or numpy's random numbers")
        if device.type != "cpu" and not on_host.is_same(torch_state(CPU)):
            raise RefusalError("it draws random numbers on the CPU")
        if not self._api.draws_apart and not on_device.is_same(torch_state(device)):
            raise RefusalError(
                "it draws random numbers, whose seed and offset all graphs of a device read from one place before "
                f"torch 2.13 (this is {torch.__version__}), so that one replay may overwrite them under another"
            )

    # Capture.

    def _capture(self) -> None:
        """Captures the forward in one graph and the backward in another.

        Each has a memory pool of its own: graphs that share one must be replayed in the order of their captures.
        """

        def forward() -> None:
            with self._lane.under_settings(), self._as_captured():
                self._note_result(self._run_on(self._static))

        def backward() -> None:
            with self._lane.under_settings():
                self._grads = self._backward_of(self._differentiable, self._static_grads)

        self._graphs = [self._captured(forward)]
        if self._targets:
            self._static_grads = [torch.zeros_like(self._results[index].detach()) for index in self._differentiable]
            self._graphs.append(self._captured(backward))

    def _captured(self, launch: Callable[[], None]) -> Any:
        graph = self._api.new_graph()
        causes: list[Exception] = []
        self._api.synchronize()
        self._api.release_workspaces()  # made outside of the pool, they would be used inside of it, and vice versa
        try:
            with self._api.capture(graph, stream=self._lane.stream, pool=self._api.new_graph_pool()):
                try:
                    launch()
                except Exception as error:  # noted before the end of the capture raises another
                    causes.append(error)
                    raise
        except Exception as error:  # of what failed first, not of the end of a capture that failed
            raise (causes[0] if causes else error) from None
        finally:
            self._api.synchronize()
            self._api.release_workspaces()
        return graph

    def _note_result(self, result: Any) -> None:
        leaves, self._spec = flatten(result)
        self._results = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
        numbers = {id(tensor): number for number, tensor in enumerate(self._results)}
        self._outputs = [numbers.get(id(leaf), (leaf,)) for leaf in leaves]
        self._differentiable = tuple(index for index, tensor in enumerate(self._results) if tensor.requires_grad)
        reached = survey([self._results[index] for index in self._differentiable]).leaves
        sources: list[tuple[torch.Tensor, int | nn.Parameter]] = [
            *((static, number) for number, static in enumerate(self._static)),
            *((alias, self._parameters[name]) for name, alias in self._aliases.items()),
        ]
        for leaf, source in sources:
            if id(leaf) in reached:
                self._targets.append(leaf)
                self._sources.append(source)

    # Replay.

    @property
    def in_flight(self) -> bool:
        """Returns True while a forward by replay waits for its backward, whose memory a replay would overwrite."""
        latest = self._latest() if self._latest is not None else None
        return latest is not None and not latest.spent

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Launches a forward on the current stream, that of the lane; returns its result."""
        with torch.no_grad():
            for memory, tensor in zip(self._memory, tensors, strict=True):
                memory.copy_(tensor)
                self._api.record_use(tensor, self._lane.stream)
        self._graphs[0].replay()
        results: Sequence[torch.Tensor]
        if self._targets and torch.is_grad_enabled():
            passed = _Pass()
            self._latest = weakref.ref(passed)
            sources = [tensors[source] if isinstance(source, int) else source for source in self._sources]
            results = _Replayed.apply(self, passed, *sources)
        else:
            results = self.results()
        leaves = [output[0] if isinstance(output, tuple) else results[output] for output in self._outputs]
        return unflatten(leaves, self._spec)

    def results(self) -> list[torch.Tensor]:
        return _copies([tensor.detach() for tensor in self._results])

    def backward(self, passed: _Pass, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Launches the backward behind the work of the current stream, and orders that stream after it.

        If some results have no gradient, autograd goes through the graph of the capture, with the latest activations.
        """
        self._check_open()
        if passed.spent:
            raise RuntimeError(
                f"trying to go backward a second time through {self.name!r}, whose activations may be overwritten by "
                "now; specify retain_graph=True for the first time"
            )
        passed.spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        chosen = [index for index in self._differentiable if gradients[index] is not None]
        grads: list[Any] = [gradients[index] for index in chosen]

        def launch() -> list[torch.Tensor | None]:
            for grad in grads:
                self._api.record_use(grad, self._lane.stream)
            if len(chosen) < len(self._differentiable):
                return list(self._backward_of(chosen, grads))
            torch._foreach_copy_(self._static_grads, grads)
            self._graphs[1].replay()
            copied = iter(_copies([grad for grad in self._grads if grad is not None]))
            return [None if grad is None else next(copied) for grad in self._grads]

        return self._lane.launch(launch).wait()

    def _backward_of(self, chosen: Sequence[int], grads: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Goes backward from some of the differentiable results; None for leaves that no gradient reaches."""
        if not chosen:
            return [None] * len(self._targets)
        outputs = [self._results[index] for index in chosen]
        with torch.autocast(self._api.device.type, enabled=False):
            return torch.autograd.grad(outputs, self._targets, list(grads), allow_unused=True, retain_graph=True)

    def backward_twice(
        self, autocast: torch.dtype | None, sources: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Makes the call again, eagerly, and goes backward through that, so that gradients have gradients."""
        self._check_open()
        self.is_differentiated_twice = True
        tensors, device = list(self._static), self._api.device
        for place, source in zip(self._sources, sources, strict=True):
            if isinstance(place, int):
                tensors[place] = source
        with preserved(self._module), torch.autocast(device.type, autocast, enabled=autocast is not None), AsLane():
            before = torch_state(device)
            leaves = flatten(self._run_on(tensors))[0]
            if not before.is_same(torch_state(device)):
                raise UnsupportedModelError(
                    f"create_graph=True through {self.name!r}, which draws random numbers in a CUDA graph: they cannot "
                    "be drawn again; colocate with Options(cuda_graphs=False)"
                )
        results = {number: leaf for number, leaf in zip(self._outputs, leaves, strict=True) if isinstance(number, int)}
        chosen = [index for index in self._differentiable if gradients[index] is not None]
        if not chosen:
            return [None] * len(sources)
        outputs, grads = [results[index] for index in chosen], [gradients[index] for index in chosen]
        return torch.autograd.grad(outputs, sources, grads, create_graph=True, allow_unused=True)

    def _check_open(self) -> None:
        if self._closed:
            raise MosaicError(f"the graphs of {self.name!r} are closed; run backward before closing them")

    def close(self) -> None:
        """Frees graphs and memory; the device must have come to rest."""
        self._closed = True
        for graph in self._graphs:
            graph.reset()
        for memory in (self._graphs, self._results, self._static, self._static_grads, self._memory, self._targets):
            memory.clear()
        self._grads = ()


class _Replayed(torch.autograd.Function):
    """A captured call in the caller's autograd graph: inputs and parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, graph: ModuleGraph, passed: _Pass, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.passed = graph, passed
        kind = graph._api.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        results = tuple(graph.results())
        ctx.mark_non_differentiable(*(t for index, t in enumerate(results) if index not in graph._differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, *ctx.graph.backward_twice(ctx.autocast, ctx.saved_tensors, gradients))
        return (None, None, *ctx.graph.backward(ctx.passed, gradients))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies, made by few kernels: a launch for each parameter would cost more than it copies."""
    copied = [torch.empty_like(tensor) for tensor in tensors]
    for dtype in {tensor.dtype for tensor in tensors}:
        pairs = [pair for pair in zip(copied, tensors, strict=True) if pair[1].dtype == dtype]
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])
    return copied


# Refusals.


@contextmanager
def _refusing(stage: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the module raises, it may raise it again where it runs eagerly
        clear_frames(error.__traceback__)  # in torch 2.11 a checkpoint's hooks stay active as long as its frame
        if isinstance(error, RefusalError):
            raise
        first_line = (str(error).splitlines() or [""])[0]
        raise RefusalError(f"{stage} it failed: {type(error).__name__}: {first_line}") from error


def _check_result(
    result: Any, known: Sequence[torch.Tensor], own: Sequence[torch.Tensor], device: torch.device
) -> None:
    """Refuses results of which a replay cannot return copies that behave alike, such as views of each other."""
    for leaf in flatten(result)[0]:
        if is_opaque(leaf):
            raise RefusalError(f"it returns a {type(leaf).__name__}, which may hide tensors")
        if isinstance(leaf, torch.Tensor):
            _check_tensor("it returns", leaf, device)
    behind = survey([tensor for tensor in tensors_in(result) if tensor.requires_grad])
    strange = behind.leaves.keys() - set(map(id, known))
    if strange:
        shape = _shape(behind.leaves[min(strange)])
        raise RefusalError(f"its result depends on a {shape} leaf that is neither an argument nor a parameter of it")
    if behind.recomputes:
        raise RefusalError("it uses activation checkpointing")
    results = {id(tensor): tensor for tensor in tensors_in(result)}
    memory = _storages(results.values())
    if len(memory) < len(results):
        raise RefusalError("it returns tensors that share memory, which copies of a graph's would not")
    if memory & _storages(own):
        raise RefusalError("it returns its input or weight, or a view of one, of which a graph returns a copy")


_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONSTANTS = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
_COPIES = ("aten::_to_copy", "aten::copy_")


class _CaptureWatch(TorchDispatchMode):
    """Finds, operator by operator, why a call could not be replayed."""

    def __init__(self, device: torch.device, inputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self._device = device
        self._inputs = _storages(inputs)
        self._known = _storages(own)
        self._hooks = saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged, unless that might change what cannot be restored."""
        kwargs = kwargs or {}
        self._refuse(self._reason(func, args, kwargs))
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        self._known |= _storages(outputs)
        self._refuse(self._crossing(func, tensors_in((args, kwargs)), outputs))
        return result

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            self.obstacle = self.obstacle or reason  # noted as well: the call may swallow the error
            raise RefusalError(self.obstacle)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if any(tag in func.tags for tag in _READS_BACK):
            return f"it synchronizes with the device ({func})"
        if saved_tensor_hooks() != self._hooks:
            return "it uses activation checkpointing or other hooks on saved tensors"
        if kwargs.get("generator") is not None:
            return "it draws random numbers from a generator of its own"
        if self._inputs & _storages(tensors_in(written_by(func, args, kwargs))):
            return f"it writes into one of its inputs ({func})"
        if func.name().split(".")[0] in _CONSTANTS:
            return None
        for tensor in tensors_in((args, kwargs)):
            if tensor.device.type == self._device.type and not _storages([tensor]) & self._known:
                return f"it reads a {_shape(tensor)} tensor that is neither an argument nor its module's own ({func})"
        return None

    def _crossing(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str | None:
        """Returns how an operator copies between the device and memory that the device cannot reach, or None."""
        name, here = func.name().split(".")[0], self._device.type
        if "attention" in name:  # outside of a capture it returns its seed and offset on the CPU
            return None
        leaves = any(t.device.type != here for t in outputs) and any(t.device.type == here for t in inputs)
        arrives = name in _COPIES and here != "cpu" and any(t.is_cpu and not t.is_pinned() for t in inputs)
        return f"it copies a tensor to or from the CPU in the middle ({func})" if leaves or arrives else None


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
