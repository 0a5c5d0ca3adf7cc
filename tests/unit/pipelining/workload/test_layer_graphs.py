"""Layers as SEMU's subgraphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mosaic.hardware import find_cluster
from mosaic.pipelining.semu.graph import Subgraph, SubgraphUse
from mosaic.pipelining.semu.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.semu.simulate import Simulator
from mosaic.pipelining.workload.formulas import StepWriter, source_bytes
from mosaic.pipelining.workload.layer_graphs import LayerSteps, backward_graph, forward_graph, timed_layer
from mosaic.pipelining.workload.layer_steps import ModuleLoad
from mosaic.pipelining.workload.shapes import TransformerShape


def machine(**degrees: int) -> RankHardware:
    return RankHardware(cluster=find_cluster("h800", 16), degrees=Degrees(**degrees))


def layer(at: RankHardware, *, trains: bool = True, cross: bool = False, tokens: int = 512) -> LayerSteps:
    shape = TransformerShape(layers=2, hidden=1024, ffn=4096, heads=16, groups=16, cross=cross)
    load = ModuleLoad(sequences=2, tokens=tokens, context=64 if cross else 0)
    writer = StepWriter(shape=shape, degrees=at.degrees, load=load)
    output = writer.layer("x")
    return LayerSteps(steps=tuple(writer.steps), sources=source_bytes(writer), output=output, trains=trains)


def chunk(graphs: Sequence[Subgraph]) -> Subgraph:
    uses = []
    for index, graph in enumerate(graphs):
        after = (f"layer {index - 1}",) if index else ()
        uses.append(SubgraphUse(name=f"layer {index}", subgraph=graph, devices=((),), after=after))
    return Subgraph(name="chunk", nodes=tuple(uses))


@pytest.mark.parametrize("degrees", [{"tensor": 1}, {"tensor": 4}, {"tensor": 2, "context": 2}])
def test_a_chunk_of_layers_takes_the_sum_of_their_times_with_reuse_and_without(degrees: dict[str, int]) -> None:
    at = machine(**degrees)
    graph = forward_graph(layer(at), at)
    reused, again = Simulator(), Simulator(with_reuse=False)
    whole = chunk([graph] * 5)
    assert reused.run(whole) == again.run(whole)
    assert reused.run(whole).length_ns == 5 * reused.run(graph).length_ns


def test_a_frozen_layer_keeps_no_inputs_of_products_and_has_no_times_of_weights() -> None:
    at = machine(tensor=2)
    trained = timed_layer(layer(at), at)
    frozen = timed_layer(layer(at, trains=False), at)
    assert frozen.forward_ms == trained.forward_ms
    assert frozen.weights_ms == 0 < trained.weights_ms
    assert frozen.strategies[0].kept_bytes < trained.strategies[0].kept_bytes


def test_backward_of_all_takes_no_longer_than_both_halves_apart() -> None:
    at = machine(tensor=4)
    steps = layer(at, tokens=8192)
    both = Simulator().run(backward_graph(steps, at, with_weights=True)).length_ns
    inputs = Simulator().run(backward_graph(steps, at, with_weights=False)).length_ns
    timed = timed_layer(steps, at)
    assert round((timed.backward_ms + timed.weights_ms) * 1e6) == both
    again = sum(at.collective_ns(step.again) for step in steps.steps if step.again is not None)
    assert inputs < both <= inputs + round(timed.weights_ms * 1e6) + again


def test_forward_leaves_what_is_kept_and_the_output() -> None:
    at = machine(tensor=2)
    steps = layer(at, cross=True)
    graph = forward_graph(steps, at)
    timeline = Simulator().run(graph).timelines(graph, kept=graph.inputs)["compute"]
    sizes = {tensor.name: tensor.num_bytes for tensor in graph.tensors}
    left = sum(sizes[name] for name in graph.inputs | graph.outputs)
    assert steps.bytes_of(steps.saved) + sizes[steps.output] + sizes["context"] == left
    assert left < timeline.peak_bytes < sum(sizes.values())


def test_tensor_parallel_collectives_are_two_gathers_and_two_scatters_each_way() -> None:
    at = machine(tensor=4)
    steps = layer(at, trains=False)
    for graph in (forward_graph(steps, at), backward_graph(steps, at, with_weights=False)):
        assert sum(node.device == "tensor link" for node in graph.nodes if not isinstance(node, SubgraphUse)) == 4
