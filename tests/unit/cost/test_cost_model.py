"""The surfaces and the interference that make a cost model."""

from __future__ import annotations

from dataclasses import replace

from planning_cases import flat, linear, profile_of

from mosaic.cost import ADAMW_BYTES, CostModel
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import ModuleMemory, Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def test_a_frozen_module_takes_no_time_in_backward() -> None:
    old = profile_of({"a": linear(8), "d": linear(8)}, num_slots=8)
    nodes = tuple(replace(node, trainable=node.name != "d") for node in old.graph.modules)
    samples = tuple(s for s in old.samples if (s.module, s.phase) != ("d", B))
    cost = CostModel.from_profile(replace(old, graph=ModuleGraph(modules=nodes), samples=samples))
    assert (cost.time_ms("d", B, 1, 1), cost.quotas("d")) == (0.0, tuple(range(1, 9)))


def test_memory_counts_the_optimizers_state_of_what_trains_on_every_device() -> None:
    memory = [
        ModuleMemory(module="a", resident_bytes=1000, activation_bytes=100, num_trained=30),
        ModuleMemory(module="b", resident_bytes=1000, activation_bytes=100),
        ModuleMemory(module="c", resident_bytes=1000, activation_bytes=100),
    ]
    base = profile_of({"a": flat(1), "b": flat(1), "c": flat(1)}, num_slots=1, degrees=(1, 2), memory=memory)
    nodes = [ModuleNode(name=name, num_parameters=50, trainable=name != "c") for name in "abc"]
    profile = replace(base, graph=ModuleGraph(modules=tuple(nodes)))
    cost = CostModel.from_profile(profile)
    assert ADAMW_BYTES == 8
    assert [cost.kept_bytes(name, 2) for name in "abc"] == [1050 + 240, 1050 + 400, 1050]
    assert [cost.memory_bytes(name, 2) for name in "abc"] == [1050 + 240, 1050 + 400, 1050]
    plain = CostModel.from_profile(profile, optimizer_bytes=0)
    assert [plain.kept_bytes(name, 1) for name in "abc"] == [1100] * 3


def test_cost_model_counts_resident_kept_and_peak_memory() -> None:
    base = profile_of(
        {"m": flat(1)},
        num_slots=1,
        memory=[ModuleMemory(module="m", resident_bytes=1000, activation_bytes=100, lane_bytes=7)],
    )
    peaks = {F: 130, B: 50}
    profile = replace(base, samples=tuple(replace(s, peak_bytes=peaks[s.phase]) for s in base.samples))
    assert CostModel.from_profile(profile).memory_bytes("m", 1) == 1000 + 7 + 100 + 50
