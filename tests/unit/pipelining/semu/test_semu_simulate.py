"""Subgraphs: times and lifetimes, with reuse and without."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.pipelining.semu.graph import OperatorNode, Subgraph, SubgraphUse, TensorNode, operators
from mosaic.pipelining.semu.simulate import Simulator

DEVICES = ("compute", "link", "host")


def norm_and_linear() -> Subgraph:
    """PipeWeaver's Fig. 7: a norm and a linear layer, forward and backward."""
    return Subgraph(
        name="norm and linear",
        tensors=tuple(
            TensorNode(name=name, num_bytes=size)
            for name, size in {"x": 10, "y": 10, "z": 20, "dz": 20, "dy": 10, "dx": 10}.items()
        ),
        nodes=(
            OperatorNode(name="norm", time_ns=1, reads=("x",), writes=("y",)),
            OperatorNode(name="linear", time_ns=4, reads=("y",), writes=("z",)),
            OperatorNode(name="loss", time_ns=1, reads=("z",), writes=("dz",)),
            OperatorNode(name="GradBw", time_ns=4, reads=("dz",), writes=("dy",)),
            OperatorNode(name="WeightBw", time_ns=4, reads=("dz", "y")),
            OperatorNode(name="norm backward", time_ns=2, reads=("dy", "x"), writes=("dx",)),
        ),
        inputs=frozenset({"x"}),
        outputs=frozenset({"dx"}),
    )


@st.composite
def subgraphs(draw: st.DrawFn, depth: int = 2) -> Subgraph:
    """Random nodes on three devices, some of them uses of smaller subgraphs, chained by tensors."""
    inner = [draw(subgraphs(depth=depth - 1)) for _ in range(2)] if depth else []
    tensors = [TensorNode(name="in", num_bytes=draw(st.integers(0, 9)))]
    nodes: list[OperatorNode | SubgraphUse] = []
    there = ["in"]
    for index in range(draw(st.integers(1, 4))):
        name = f"t{index}"
        tensors.append(TensorNode(name=name, num_bytes=draw(st.integers(0, 9)), device=draw(st.sampled_from(DEVICES))))
        reads = draw(st.lists(st.sampled_from(there), max_size=2, unique=True))
        if inner and draw(st.booleans()):
            subgraph = draw(st.sampled_from(inner))
            roles = draw(st.permutations(DEVICES))
            written = sorted(subgraph.outputs)
            ends = [(one, (name,)) for one in written[:1]]
            if "in" in subgraph.inputs and reads:
                ends.append(("in", (reads[0],)))
            nodes.append(
                SubgraphUse(
                    name=f"n{index}",
                    subgraph=subgraph,
                    devices=(tuple(zip(DEVICES, roles, strict=True)),),
                    tensors=tuple(ends),
                )
            )
        else:
            device, time_ns = draw(st.sampled_from(DEVICES)), draw(st.integers(0, 20))
            nodes.append(
                OperatorNode(name=f"n{index}", device=device, time_ns=time_ns, reads=tuple(reads), writes=(name,))
            )
        there.append(name)
    return Subgraph(
        name="drawn",
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        inputs=frozenset({"in"}),
        outputs=frozenset({there[-1]}),
    )


@settings(max_examples=40)
@given(subgraphs())
def test_reuse_changes_no_time_and_no_lifetime(subgraph: Subgraph) -> None:
    assert Simulator().run(subgraph) == Simulator(with_reuse=False).run(subgraph)


@settings(max_examples=25)
@given(subgraphs(depth=1))
def test_a_memory_timeline_is_the_sum_of_the_tensors_that_live_at_each_time(subgraph: Subgraph) -> None:
    ran = Simulator().run(subgraph)
    assert ran.length_ns >= max((node.time_ns for node in operators(subgraph)), default=0)
    timelines = ran.timelines(subgraph)
    own = {tensor.name: tensor for tensor in subgraph.tensors}
    for device, timeline in timelines.items():
        for at in range(ran.length_ns + 1):
            inside = sum(
                one.num_bytes for one in ran.lifetimes if one.device == device and one.start_ns <= at < one.end_ns
            )
            source, output = own["in"], own[next(iter(subgraph.outputs))]
            if source.device == device and at < ran.read_ns.get("in", ran.length_ns):
                inside += source.num_bytes
            if output.device == device and ran.written_ns[output.name] <= at < ran.length_ns:
                inside += output.num_bytes
            assert timeline.bytes_at(at) == inside


def test_norm_and_linear_have_the_timeline_of_the_paper() -> None:
    subgraph = norm_and_linear()
    ran = Simulator().run(subgraph)
    assert [span.end_ns for span in ran.spans] == [1, 5, 6, 10, 14, 16]
    timeline = ran.timelines(subgraph)["compute"]
    assert [timeline.bytes_at(at) for at in (0, 1, 5, 6, 10, 14, 16)] == [20, 40, 60, 50, 50, 30, 0]
    assert (timeline.peak_bytes, timeline.peak_ns) == (60, 5)


def test_copies_run_together_and_each_keeps_its_own_memory() -> None:
    peer = Subgraph(
        name="peer",
        tensors=(TensorNode(name="t", num_bytes=7),),
        nodes=(OperatorNode(name="op", time_ns=5, writes=("t",)), OperatorNode(name="end", time_ns=1, reads=("t",))),
    )
    both = Subgraph(
        name="both",
        nodes=(
            SubgraphUse(name="peers", subgraph=peer, devices=((("compute", "gpu 0"),), (("compute", "gpu 1"),))),
            OperatorNode(name="next", device="gpu 1", time_ns=2),
        ),
    )
    ran = Simulator().run(both)
    assert ran.length_ns == 8
    assert {one.device: one.num_bytes for one in ran.lifetimes} == {"gpu 0": 7, "gpu 1": 7}


def test_a_use_binds_inputs_and_outputs_once_for_each_copy() -> None:
    inner = norm_and_linear()
    for name, outers in (("y", ("t",)), ("dx", ("t", "u"))):
        with pytest.raises(ValueError, match="one for each of 1 copies"):
            Subgraph(
                name="outer",
                nodes=(SubgraphUse(name="use", subgraph=inner, devices=((),), tensors=((name, outers),)),),
                tensors=(TensorNode(name="t", num_bytes=1), TensorNode(name="u", num_bytes=1)),
            )


def test_work_on_two_devices_overlaps() -> None:
    subgraph = Subgraph(
        name="overlap",
        nodes=(OperatorNode(name="a", time_ns=5), OperatorNode(name="b", device="link", time_ns=4)),
    )
    assert Simulator().run(subgraph).length_ns == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"time_ns": -1}, "time_ns of 'a' is -1"),
        ({"time_ns": 1.5}, "time_ns of 'a' is 1.5"),
        ({"time_ns": float("nan")}, "time_ns of 'a' is nan"),
        ({"time_ns": 1, "reads": ("y",)}, "none of its tensors"),
        ({"time_ns": 1, "reads": ("t",)}, "before it is written"),
        ({"time_ns": 1, "after": ("b",)}, "is not before it"),
    ],
)
def test_a_bad_node_is_refused_with_its_name(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Subgraph(
            name="bad",
            tensors=(TensorNode(name="t", num_bytes=1),),
            nodes=(OperatorNode(name="a", **change), OperatorNode(name="b", time_ns=1, writes=("t",))),  # type: ignore[arg-type]
        )


def test_a_subgraph_without_nodes_or_with_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        Subgraph(name="empty", nodes=())
    with pytest.raises(ValueError, match="'a' is there twice"):
        Subgraph(name="twice", nodes=(OperatorNode(name="a", time_ns=1), OperatorNode(name="a", time_ns=1)))
    with pytest.raises(ValueError, match="num_bytes of 't' is -3"):
        Subgraph(
            name="small", nodes=(OperatorNode(name="a", time_ns=1),), tensors=(TensorNode(name="t", num_bytes=-3),)
        )
