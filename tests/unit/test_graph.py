import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest

from mosaic.graph import Edge, ModuleGraph, ModuleNode


def graph(names, *edges):
    return ModuleGraph(
        modules=tuple(ModuleNode(name=name) for name in names),
        edges=tuple(Edge(source=source, target=target) for source, target in edges),
    )


def test_a_module_named_twice_and_an_edge_to_a_missing_one_are_refused_by_name():
    with pytest.raises(ValueError, match="repeated modules: vision"):
        graph(["vision", "text", "vision"])
    with pytest.raises(ValueError, match="unknown module 'audio'"):
        graph(["vision", "text"], ("audio", "text"))


@pytest.mark.parametrize("cycle", ["aa", "aba", "abca"])
def test_a_cycle_is_refused_and_all_of_it_named(cycle):
    with pytest.raises(ValueError, match="cycle") as caught:
        graph("abcd", *pairwise(cycle))
    named = str(caught.value).partition("cycle: ")[2]
    assert set(named.split(" -> ")) == set(cycle)


def test_producers_come_first_and_call_order_decides_the_rest():
    built = graph(["late", "x", "y", "early"], ("early", "late"))
    assert built.levels == (("x", "y", "early"), ("late",))
    assert built.topological_order() == ("x", "y", "early", "late")


def test_modules_are_independent_only_if_neither_depends_on_the_other():
    built = graph("abcd", ("a", "b"), ("b", "c"), ("d", "c"))
    assert built.predecessors("c") == ("b", "d")
    assert built.independent("a", "d")
    assert not built.independent("a", "c")
    assert not built.independent("c", "a")
    assert not built.independent("a", "a")


def test_what_was_worked_out_of_a_graph_changes_neither_it_nor_its_copies():
    graph = ModuleGraph(modules=(ModuleNode(name="b"), ModuleNode(name="a")), edges=(Edge(source="a", target="b"),))
    fresh = replace(graph)
    named = graph.fingerprint
    assert graph == fresh
    assert hash(graph) == hash(fresh)
    for copied in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), fresh):
        assert copied == graph
        assert copied.topological_order() == ("a", "b")
        assert copied.fingerprint == named
    assert replace(graph, edges=()).topological_order() == ("b", "a")
    assert replace(graph, edges=()).fingerprint != named
