"""A layer's times and bytes, by SEMU's subgraphs of forward and backward from its steps.

Kernels run on ``compute`` one after the other, collectives on the link of their axis, and one thread launches all of
them on ``launcher``. As in Megatron, backward gathers the input of a product again during the computation of its
gradient, and reduce-scatters this gradient during the computation of the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.cost.counts import Operator
from mosaic.pipelining.semu.graph import OperatorNode, Subgraph, TensorNode
from mosaic.pipelining.semu.rank_hardware import RankHardware
from mosaic.pipelining.semu.simulate import Simulator
from mosaic.pipelining.workload.layer_steps import LayerStep, LayerWork
from mosaic.pipelining.workload.layers import Layer, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSteps:
    """A layer for simulation."""

    steps: tuple[LayerStep, ...]
    sources: Mapping[str, int]
    """Bytes of possible inputs."""
    output: str
    """Name of its output."""
    trains: bool
    """True if its weights train."""

    @property
    def read(self) -> tuple[str, ...]:
        """Names of its inputs."""
        written = {step.writes for step in self.steps}
        return tuple(dict.fromkeys(name for step in self.steps for name in step.reads if name not in written))

    @property
    def saved(self) -> tuple[str, ...]:
        """Tensors that backward reads; inputs of products only if weights train."""
        names = (name for step in self.steps if self.trains or not step.weights for name in step.saved)
        return tuple(dict.fromkeys(names))

    def bytes_of(self, names: Sequence[str]) -> int:
        """Returns the bytes of tensors, without those of another module."""
        sizes = {step.writes: step.num_bytes for step in self.steps} | dict(self.sources)
        return sum(sizes[name] for name in names if name != "context")


def forward_graph(layer: LayerSteps, machine: RankHardware) -> Subgraph:
    """Returns forward, from the inputs to the output and the saved tensors."""
    draft = _Draft(machine=machine)
    for name in layer.read:
        draft.tensors[name] = layer.sources[name]
    for step in layer.steps:
        draft.tensors[step.writes] = step.num_bytes
        if step.fetched is not None:
            _add_fetching(draft, step, step.forward, reads=step.reads, writes=(step.writes,))
        else:
            draft.add(step.name, step.forward, reads=step.reads, writes=(step.writes,))
    outputs = {layer.output, *layer.saved} - set(layer.read)
    return draft.subgraph("forward", inputs=layer.read, outputs=outputs)


def backward_graph(layer: LayerSteps, machine: RankHardware, *, with_weights: bool) -> Subgraph:
    """Returns backward, from the saved tensors and the output's gradient to the gradient of ``x``."""
    sizes = {step.writes: step.num_bytes for step in layer.steps} | dict(layer.sources)
    draft = _Draft(machine=machine)
    for name in layer.saved:
        draft.tensors[f"saved {name}"] = sizes[name]
    inputs = [f"saved {name}" for name in layer.saved]
    gradient: dict[str, str] = {layer.output: f"d {layer.output}"}
    if layer.steps[-1].writes != "softmax":  # a loss has no gradient as input
        draft.tensors[gradient[layer.output]] = sizes[layer.output]
        inputs.append(gradient[layer.output])
    else:
        del gradient[layer.output]
    for step in reversed(layer.steps):
        _add_backward(draft, step, gradient, sizes, layer, with_weights=with_weights)
    return draft.subgraph("backward", inputs=inputs, outputs=[gradient[n] for n in layer.read if n in gradient])


def _add_backward(
    draft: _Draft,
    step: LayerStep,
    gradient: dict[str, str],
    sizes: Mapping[str, int],
    layer: LayerSteps,
    *,
    with_weights: bool,
) -> None:
    """Adds a step's backward; a sum passes its gradient to both terms without computation."""
    own = tuple(gradient[name] for name in (step.writes,) if name in gradient)
    if not step.backward and len(step.reads) > 1:
        gradient.update(dict.fromkeys(step.reads, gradient[step.writes]))
        return
    weights = with_weights and layer.trains and bool(step.weights)
    if weights and step.again is not None:
        draft.tensors[f"{step.name} again"] = step.again.num_bytes
        draft.add(f"{step.name} gather again", step.again, reads=own, writes=(f"{step.name} again",))
    saved = tuple(f"saved {name}" for name in step.saved if name in layer.saved)
    before = tuple(gradient[name] for name in step.reads if name in gradient)
    after = []
    for name in step.reads if step.backward else ():
        result = f"d {name} by {step.name}"
        draft.tensors[result] = sizes[name]
        gradient[name] = result
        after.append(result)
    at = len(step.backward) - 1
    for place, work in enumerate(step.backward):
        reads = (*own, *before, *(() if step.weights else saved))
        if step.fetched is not None:
            _add_fetching(draft, step, work, reads=reads, writes=after, is_backward=True)
        else:
            draft.add(f"{step.name} backward {place}", work, reads=reads, writes=tuple(after) if place == at else ())
    if weights:
        again = (f"{step.name} again",) if step.again is not None else saved
        for place, work in enumerate(step.weights):
            draft.add(f"{step.name} weights {place}", work, reads=(*own, *again))


def _add_fetching(
    draft: _Draft,
    step: LayerStep,
    work: LayerWork,
    *,
    reads: Sequence[str],
    writes: Sequence[str],
    is_backward: bool = False,
) -> None:
    """Computes one group of heads after the other while it fetches the next one's keys, as ``Attend`` does.

    Two fetched groups are in memory; in backward also the gradients of one, and those of another in transit::

        context link   [ fetch 0 ][ fetch 1 ][give back 0][ fetch 2 ][give back 1]
        compute                   [    0    ]             [    1    ][    2      ]     giving back is backward's
    """
    fetched = step.fetched
    assert fetched is not None
    assert isinstance(work, Operator)
    once, groups = replace(work, calls=1), fetched.groups
    name = f"{step.name} backward" if is_backward else step.name
    for at in range(groups + 1):
        if at < groups:
            draft.tensors[f"{name} keys {at}"] = fetched.num_bytes
            before = (f"{name} {at - 2}",) if at > 1 else ()
            draft.wait(f"{name} room {at}", device="room", reads=reads, writes=(f"{name} keys {at}",), after=before)
            draft.add(f"{name} fetch {at}", fetched.fetch, reads=(f"{name} keys {at}",))
        if at == 0:
            continue
        own, results = at - 1, list(writes) if at == 1 else []
        if is_backward:
            results.append(f"d {name} keys {own}")
            draft.tensors[results[-1]] = fetched.gradient_bytes
        keys, arrived = f"{name} keys {own}", (f"{name} fetch {own}",)
        draft.add(f"{name} {own}", once, reads=(*reads, keys), writes=results, after=arrived)
        if is_backward:
            draft.add(f"{name} give back {own}", fetched.give_back, reads=(results[-1],))
    if is_backward:
        draft.wait(f"{name} given back", device="compute", after=(f"{name} give back {groups - 1}",))


def timed_layer(layer: LayerSteps, machine: RankHardware) -> Layer:
    """Returns a layer's simulated times and bytes.

    Backward of a trained layer is simulated with the weights' gradients, which hide collectives; their own time is
    ``weights_ms``, and the rest ``backward_ms``.

    Strategies: ``keep`` everything; ``recompute`` all of forward from the input.
    """
    simulator = Simulator()
    forward = forward_graph(layer, machine)
    backward = backward_graph(layer, machine, with_weights=layer.trains)
    ran, ran_back = simulator.run(forward), simulator.run(backward)
    products = [work for step in layer.steps for work in step.weights if layer.trains]
    weights_ns = max(machine.launch_ns(len(products)), sum(machine.time_ns(work) for work in products))
    backward_ns = max(0, ran_back.length_ns - weights_ns)
    kept_bytes = layer.bytes_of(layer.saved)
    peaks = (
        ran.timelines(forward, kept=forward.inputs)["compute"].peak_bytes,
        ran_back.timelines(backward, kept=backward.inputs)["compute"].peak_bytes,
    )
    source = min(kept_bytes, layer.bytes_of(layer.read))
    strategies = (
        Strategy(name="keep", kept_bytes=kept_bytes),
        Strategy(name="recompute", kept_bytes=source, extra_backward_ms=ran.length_ns / 1e6),
    )
    return Layer(
        forward_ms=ran.length_ns / 1e6,
        backward_ms=backward_ns / 1e6,
        weights_ms=weights_ns / 1e6,
        strategies=strategies,
        workspace_bytes=max(0, max(peaks) - kept_bytes),
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A subgraph under construction."""

    machine: RankHardware
    tensors: dict[str, int] = field(default_factory=dict)
    nodes: list[OperatorNode] = field(default_factory=list)

    def add(
        self,
        name: str,
        work: LayerWork,
        *,
        reads: Sequence[str],
        writes: Sequence[str] = (),
        after: tuple[str, ...] = (),
    ) -> None:
        device = "compute" if isinstance(work, Operator) else f"{work.axis} link"
        self.nodes.append(
            OperatorNode(
                name=name,
                device=device,
                time_ns=self.machine.time_ns(work),
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                after=after,
            )
        )

    def wait(
        self,
        name: str,
        *,
        device: str,
        after: tuple[str, ...],
        reads: Sequence[str] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Adds a node without time: it delays a device, or begins a tensor before its writer."""
        self.nodes.append(
            OperatorNode(name=name, device=device, time_ns=0, reads=tuple(reads), writes=writes, after=after)
        )

    def subgraph(self, name: str, *, inputs: Sequence[str], outputs: set[str] | list[str]) -> Subgraph:
        """Returns the subgraph, with the thread that launches all kernels."""
        launch_ns = self.machine.launch_ns(sum(node.device != "room" for node in self.nodes))
        launcher = OperatorNode(name="launch", device="launcher", time_ns=launch_ns)
        return Subgraph(
            name=name,
            nodes=(launcher, *self.nodes),
            tensors=tuple(TensorNode(name=tensor, num_bytes=size) for tensor, size in self.tensors.items()),
            inputs=frozenset(inputs),
            outputs=frozenset(outputs),
        )
