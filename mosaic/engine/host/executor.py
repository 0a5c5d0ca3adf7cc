"""One step on the host, from top to bottom: who waits for whom, and where each piece of work runs.

::

    caller   model( left(x)   right(y)   left * right        ) | loss.backward()                    | step
               |       |          |        joins both          |    |        |                      |
    lane 1     |    [forward]-----|--------^     [results] ----'    | [backward]-- gradients to --.  |
    lane 2     |            [forward]------'                     [backward]------- leaves --------'

The sections of ``Executor`` follow a step: the model is called; a placed module's call is sent to its lane, or runs
where it is made; the lane waits for the call's inputs and runs its forward; operations between modules follow their
branch; the backward of each call is handed to the lane of its forward; at the end of the caller's backward the lanes
are awaited and gradients of leaves become plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.attach import attach, detach, guard_attributes, is_attached
from mosaic.engine.calls.branch_graph import find_uses
from mosaic.engine.calls.caller import caller, note_in_place
from mosaic.engine.calls.hidden.attributes import Written
from mosaic.engine.calls.hidden.hidden_state import HiddenState, Parts, parts_of
from mosaic.engine.calls.hidden.process_settings import Settings, read_settings
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.out_of_memory import SecondTries
from mosaic.engine.calls.random_numbers import draw_here
from mosaic.engine.calls.shapes import other_inputs, shapes_of
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.calls.structure import map_tensors, tensors_in, unflatten
from mosaic.engine.calls.thread_state import interception, is_in_autocast, on_lane
from mosaic.engine.host.backwards import Backwards
from mosaic.engine.host.call import Call, CallFunction
from mosaic.engine.host.direct import DirectCalls
from mosaic.engine.host.lane_tensor import LaneTensor, join_joined, joined, lane_tensors
from mosaic.engine.host.lane_work import LaneWork
from mosaic.engine.host.layouts import LayoutWatch
from mosaic.engine.host.operators import Operators
from mosaic.find.random_numbers import advance

if TYPE_CHECKING:
    from mosaic.backends.base import Lanes
    from mosaic.engine.calls.placed_module import PlacedModule


class Executor(LaneWork):
    """The lanes of one plan and everything in flight on them.

    Attributes:
        in_place: For each module and reason, how many of its calls ran where they were made.
        places: For each module and reason, the line of the first such call.
        in_order: Modules that keep to the order of the caller's work, and why: none, since callers' operators end
            before lanes begin.
        backwards: The caller's backwards.
        gradients: Leaves whose gradients lanes compute.
        second_tries: Calls for which there was no memory beside the others.
        num_learned: Calls that were the first of their kind, which run where they are made.
        calls_again: A call of the whole model can be made again after an ``UnforeseenError``.
        way_out: How a module is left out, with its name put in.
    """

    calls_again = True
    way_out = "colocate(..., exclude=[{!r}])"

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        self.in_place: Counter[tuple[str, str]] = Counter()
        self.places: dict[tuple[str, str], str] = {}
        self.in_order: dict[str, str] = {}
        self.backwards = Backwards(self)
        self.gradients = self.backwards.gradients
        self.second_tries = SecondTries()
        self.num_learned = 0
        self._operators = Operators(self, self.gradients)
        self._direct = DirectCalls(self, self.backwards)
        self._drawing: list[torch.nn.Module] = []
        self._in_autocast = False  # the model's own call is inside of an autocast
        self._settings: Settings | None = None  # torch's, when the model's call or a block began
        self._paused = False

    # 1. The model is called: nothing that a lane is still computing leaves it.

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call; its result is plain."""
        self.begin()
        self._in_autocast = is_in_autocast()
        try:
            result = run(*args, **kwargs)
            if not self.num_launched:
                return result
            result = map_tensors(joined, result)
            self.check_forwards()
            self.drain()  # what nobody used may still read parameters and modes
            return result
        except BaseException as error:
            self.drain()
            unforeseen = self.forwards.unforeseen()
            if isinstance(error, Exception) and unforeseen not in (None, error):  # the model's error may come of it
                raise unforeseen from error
            raise
        finally:
            self._in_autocast = False
            self.end()

    def begin(self) -> None:
        """A call of the model, or a block, begins: notes torch's settings, and forgets what an error cut short."""
        self._settings = read_settings()
        self.forwards.forget()
        if torch._C._current_graph_task_id() == -1:
            self.backwards.forget_failed()

    def end(self) -> None:
        """It has ended."""
        self._settings = None

    # 2. A placed module is called: on its lane if its calls are known to allow that, where it is called otherwise.

    def call(self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module."""
        if on_lane():
            return run(*args, **kwargs)
        if site.is_alone and torch.get_num_threads() == site.lane.num_threads:
            return self.run_alone(site, run, args, kwargs)
        reason = site.obstacle or interception()
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        arguments = Arguments.take(args, kwargs)
        arguments.leaves[:] = map(join_joined, arguments.leaves)
        if arguments.opaque is not None:
            return self._run_here(site, run, args, kwargs, f"it takes a {arguments.opaque}, which may hide tensors")
        if site.shapes is not None and site.shapes != shapes_of(arguments.leaves):
            return self._run_here(site, run, args, kwargs, other_inputs(site.shapes, shapes_of(arguments.leaves)))
        if site.attributes.own_writes:
            self.reach(site)
        parts = parts_of(site.module)
        hidden = HiddenState.take(site.attributes, parts)
        signature = site.signatures.get(_kind(site, arguments, parts, hidden))
        if signature is None:
            return self._learn(site, run, args, kwargs)
        reason = self._obstacle(site, signature, arguments)
        if reason is not None:
            return self._run_here(site, run, args, kwargs, reason)
        awaited = self.awaits(site, hidden)
        generator = self.lane_generator(signature.draws) if signature.may_draw else None
        call = Call(
            self, site, run, arguments, signature, generator, origin=caller(), parameters=parts.trained, hidden=hidden
        )
        result = self.launch(site, call, arguments)
        if awaited:
            self.reach(site)
        return result

    def run_alone(
        self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module that has the whole device to itself: in the caller's own thread, behind all lanes."""
        return self._direct.run(site, run, args, kwargs)

    def _obstacle(self, site: PlacedModule, signature: Signature, arguments: Arguments) -> str | None:
        """Returns why a call of a known kind runs where it is made, or None."""
        grad = arguments.state.grad
        if signature.alone is not None and grad and site.num_pending:
            site.obstacle = f"it is called again before the backward of its last call, and {signature.alone}"
        if signature.obstacle is not None or site.obstacle is not None:
            return signature.obstacle or site.obstacle
        if signature.views_input:
            return "it returns a view of one of its inputs, so that whoever writes into one writes into the other"
        if site.is_in_place and grad:
            return "an earlier call of the same backward ran in place"
        if signature.recasts and not self._in_autocast:
            return "it uses a weight several times, in an autocast that may end before its lane does"
        return None

    def awaits(self, site: PlacedModule, hidden: HiddenState) -> bool:
        """Whether a call's forward is waited for where it is made, since what it reads may change right after it.

        A loop that calls a module outside of the model and without gradients may refill its inputs or replace its
        weights at once.
        """
        if self._settings is not None and self._settings != hidden.settings:
            self.drain()  # the others were called under other settings
            return True
        return site.awaited is not None or (self._settings is None and not torch.is_grad_enabled())

    def _run_here(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        note_in_place(self, site.name, reason)
        if isinstance(reason, Obstacle) and reason.apart:
            self.drain()
        self.reach(site)
        result = run(*map_tensors(joined, args), **map_tensors(joined, kwargs))
        came = {id(tensor) for tensor in tensors_in((args, kwargs))}
        self._ran_here(site, [tensor for tensor in tensors_in(result) if id(tensor) not in came])
        return result

    def _ran_here(self, site: PlacedModule, made: list[torch.Tensor]) -> None:
        self.backwards.follow_in_place(site, made)
        for parameter in site.parameters:  # what the module left lying about may be used beside its results
            self.gradients.expect(parameter)

    def _learn(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes the first call of a kind where it is made, and learns what the next ones will return."""
        args, kwargs = map_tensors(joined, args), map_tensors(joined, kwargs)
        self.drain()  # nothing is known of it
        self.num_learned += 1
        arguments, parts = Arguments.take(args, kwargs), parts_of(site.module)
        before = Written(parts.modules)
        result, made, signature = learn(lambda: run(*args, **kwargs), arguments, site.module, site.parted)
        if site.module is not None:
            guard_attributes(site.module, site.note_writes(parts.modules, before))
        if not site.wrote_outside:
            hidden = HiddenState.take(site.attributes, parts)
            site.learned(_kind(site, arguments, parts, hidden), signature)
        self.let_draw(signature.drawing or ())
        if signature.obstacle is None:
            LayoutWatch(
                made, find_uses([t for t in made if t.requires_grad], arguments.differentiable), signature.layouts
            )
            self.backwards.follow_in_place(site, made)
        else:
            self._ran_here(site, made)
        return result

    def reach(self, site: PlacedModule) -> None:
        """Lets a module's forward end before somebody else reaches into it, or it runs in place and writes buffers."""
        last = site.last_forward
        if last is not None and not on_lane():
            site.last_forward = None
            try:
                last.wait()
            except BaseException:
                if not last.done:  # an interrupt of the caller's; what the lane raised is raised where it is needed
                    raise

    # 3. Its lane waits for the call's inputs and runs the forward; the caller goes on with what stands for its results.

    def launch(self, site: PlacedModule, call: Call, arguments: Arguments) -> Any:
        """Hands a call of a known kind to its module's lane; returns what it will return."""
        signature, inputs = call.signature, arguments.differentiable
        for leaf in inputs:
            if leaf.is_leaf:
                self.gradients.expect(leaf)
        after = self.inputs_from(lane_tensors(arguments.leaves), site.lane)
        self.num_launched += 1
        ticket = site.last_forward = self.submit(site, "forward", call.forward, after)
        self.forwards.note(ticket)
        made = call.pending(ticket)
        if any(info.differentiable for info in signature.made):
            site.in_flight.add(call)
            edges = [inputs[index] for index in signature.edges]
            made = list(CallFunction.apply(call, made, site.anchor, *edges, *call.parameters))
        fresh = iter(made)
        tensors = [
            next(fresh) if info.same_input is None else arguments.leaves[info.same_input] for info in signature.outputs
        ]
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in signature.leaves]
        return unflatten(leaves, signature.spec)

    def let_draw(self, parts: Iterable[torch.nn.Module]) -> None:
        """Makes parts of modules draw their random numbers from the generator of the lane that they run on."""
        for part in parts:
            if not is_attached(part):
                attach(part, draw_here)
                self._drawing.append(part)

    @staticmethod
    def lane_generator(draws: int) -> tuple[torch.Generator, torch.Tensor]:
        """Returns a generator for the lane and the state it must end in, and moves the default generator there."""
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        advance(torch.default_generator, draws)
        return generator, torch.get_rng_state()

    # 4. Operations between modules follow their branch. In backward they run on the lane of their forward.

    def operate(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments."""
        return self._operators.run(first, func, args, kwargs)

    # 5. Autograd reaches a call: ``Call.launch_backward`` hands its backward to the lane. At the end of the caller's
    #    backward (``Backwards.end``) the lanes are awaited, and the gradients of leaves become plain.

    def expect_gradient(self, leaf: torch.Tensor) -> None:
        """Prepares a leaf whose gradient a lane may compute."""
        self.gradients.expect(leaf)

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Prepares parameters that operations between modules use: lanes may compute their gradients."""
        for parameter in parameters:
            if parameter.requires_grad:
                self.gradients.expect(parameter)

    # 6. Between steps.

    def settle(self) -> None:
        """Lets the lanes come to rest."""
        self.drain()

    def pause(self) -> None:
        """Comes to rest and takes everything off the model, so that another executor can run it meanwhile."""
        self.drain()
        self._paused = True
        self.gradients.close()
        self._direct.close()
        for part in self._drawing:
            detach(part)

    def resume(self) -> None:
        """Undoes ``pause``; leaves are hooked anew where they are used."""
        self._paused = False
        for part in self._drawing:
            attach(part, draw_here)

    def close(self) -> None:
        """Gives the lanes back; what is still asked of them later runs where it is asked."""
        self.hand_over_all()
        self.closed = True
        self.lanes.close()
        self.gradients.close()
        self._direct.close()
        if not self._paused:  # or they are another executor's by now
            for part in self._drawing:
                detach(part)
        self._drawing.clear()

    @property
    def is_in_flight(self) -> bool:
        """Never by itself: calls whose backward may come are known to their sites."""
        return False

    @property
    def num_failed(self) -> int:
        """How many backwards an error cut short."""
        return self.backwards.num_failed

    @property
    def notes(self) -> tuple[str, ...]:
        """What there was no memory for; anything else that is out of the ordinary has a module and a reason."""
        return self.second_tries.sentences()


def _kind(site: PlacedModule, arguments: Arguments, parts: Parts, hidden: HiddenState) -> Hashable:
    """Returns what two calls of a module must share to be of one kind."""
    dtypes = tuple([tensor.dtype for tensor in parts.tensors])
    return arguments.key(parts.modes, parts.trained, dtypes, site.variant_of(hidden.attributes))
