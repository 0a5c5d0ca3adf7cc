"""Instances: what is refused, what pins do, and what the generator makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import solve_instance

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic.artifact import parse, to_json
from mosaic.errors import InfeasibleError, InvalidFileError, InvalidGraphError
from mosaic.solver.instances import instance as instances
from mosaic.solver.instances.instance import Disturbance, Instance, InstanceModule, InstanceOption, Pin
from mosaic.solver.instances.instance_cost import TableCost


def option(degree: int = 1, quota: int = 1, forward_ms: float = 1.0, backward_ms: float = 2.0, memory_bytes: int = 0):
    return InstanceOption(
        degree=degree, quota=quota, forward_ms=forward_ms, backward_ms=backward_ms, memory_bytes=memory_bytes
    )


def module(name: str, *options: InstanceOption, after: tuple[str, ...] = (), pin: Pin = Pin()):  # noqa: B008
    return InstanceModule(name=name, options=options or (option(),), after=after, pin=pin)


def instance(*modules: InstanceModule, **fields: object) -> Instance:
    return Instance(**{"name": "test", "num_devices": 2, "num_slots": 4, "modules": modules, **fields})


def test_an_instance_survives_json():
    made = generate(Recipe(shape="multi", num_modules=9, num_devices=4, disturbed=True, tight_memory=True))
    assert parse(Instance, to_json(made), source="here") == made


OUT_OF_RANGE = [
    option(degree=0),
    option(quota=0),
    option(memory_bytes=-1),
    option(forward_ms=-1.0),
    option(backward_ms=float("nan")),
    option(forward_ms=float("inf")),
    option(backward_ms=1e12),
    option(memory_bytes=10**30),
]
SENSELESS = [
    Disturbance(module="a", beside="a"),
    Disturbance(module="a", beside="ghost"),
    Disturbance(module="a", beside="b", forward=-0.1),
    Disturbance(module="a", beside="b", backward=float("inf")),
    Disturbance(module="a", beside="b", forward=1e300),
]
SIZES = r"at most 4,096 devices of 1,024 slots and 9,007,199,254,740,992 bytes"


@pytest.mark.parametrize(
    ("modules", "fields", "message"),
    [
        *(([module("a")], {name: 0}, "at least one device of one slot") for name in ("num_devices", "num_slots")),
        ([module("a")], {"memory_bytes": -1}, "at least one device of one slot"),
        ([module("a")], {"num_devices": 4097}, SIZES),
        ([module("a")], {"num_slots": 10**12}, SIZES),
        ([module("a")], {"memory_bytes": 10**30}, SIZES),
        ([], {}, "at least one module"),
        ([module("a")], {"name": "\x1b[31m"}, "control characters"),
        ([module("a"), module("a")], {}, "twice"),
        ([InstanceModule(name="a", options=())], {}, "'a' has no options"),
        *(([module("a", bad)], {}, "module 'a'") for bad in OUT_OF_RANGE),
        ([module("a", option(), option(forward_ms=3.0))], {}, "list each once"),
        ([module("a", option(memory_bytes=1), option(quota=2, memory_bytes=2))], {}, "give one number"),
        *(([module("a"), module("b")], {"disturbances": (bad,)}, "disturbance") for bad in SENSELESS),
    ],
)
def test_an_instance_that_makes_no_sense_is_refused_with_the_rule(modules, fields, message):
    with pytest.raises(ValueError, match=message):
        instance(*modules, **fields)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([module("a", after=("b",)), module("b", after=("a",))], r"a.*b|b.*a"),
        ([module("a", after=("ghost",))], "ghost"),
    ],
)
def test_a_cycle_and_an_unknown_module_are_refused_by_name(modules, named):
    with pytest.raises(InvalidGraphError, match=named):
        instance(*modules)


def test_a_name_that_would_steer_a_terminal_is_refused():
    for name in ("a\tb", "a\x1b[2J", "\u202etxet", ""):
        with pytest.raises((InvalidGraphError, ValueError), match=r"a terminal does not show|empty"):
            instance(module(name))


def test_more_options_than_can_be_searched_are_refused_with_the_number(monkeypatch):
    options = tuple(option(quota=quota) for quota in (1, 2, 3))
    beside = Disturbance(module="a", beside="b", forward=0.1)
    monkeypatch.setattr(instances, "MAX_DISTURBED", 6 * 2 * 5 - 1)
    assert instance(module("a", *options), module("b", *options))
    with pytest.raises(ValueError, match="make 60 disturbances to look up, more than 59"):
        instance(module("a", *options), module("b", *options), disturbances=(beside,))
    monkeypatch.setattr(instances, "MAX_OPTIONS", 5)
    with pytest.raises(ValueError, match="6 options are more than the 5"):
        instance(module("a", *options), module("b", *options))


def test_the_largest_numbers_that_are_allowed_do_not_overflow():
    """The plan is that of the same instance with times a millionth of them, and takes a million times as long."""

    def made(scale: float) -> Instance:
        names = [f"m{index}" for index in range(12)]
        rows = [
            (option(1, 1, scale, scale, 2**53), option(1, 2, scale * (1 + i) / 24, scale / 2, 2**53))
            for i in range(len(names))
        ]
        disturbed = tuple(Disturbance(module=a, beside=b, forward=1000.0) for a in names[:3] for b in names if a != b)
        modules = tuple(module(name, *row) for name, row in zip(names, rows, strict=True))
        return instance(*modules, disturbances=disturbed, memory_bytes=2**53)

    large, _ = solve_instance(made(1e7))
    small, _ = solve_instance(made(10.0))
    assert large.status == small.status == "optimal"
    assert large.objective_ms == pytest.approx(1e6 * small.objective_ms)
    assert max(len(stage.placements) for stage in large.plan.stages) == 2  # one on each device, for memory


def test_a_plan_of_no_time_is_proven_best_and_its_bound_is_0():
    answer, _ = solve_instance(instance(module("a", option(1, 1, 0.0, 0.0)), module("b", option(1, 1, 0.0, 0.0))))
    assert (answer.status, answer.objective_ms, answer.bound_ms) == ("optimal", 0.0, 0.0)


def test_a_seed_that_the_search_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="seed=1180591620717411303424"):
        solve_instance(instance(module("a")), seed=2**70)


def test_unknown_fields_are_refused_with_their_line():
    text = to_json(instance(module("a"))).replace('"num_slots"', '"colour": 3,\n  "num_slots"')
    with pytest.raises(InvalidFileError, match="colour"):
        parse(Instance, text, source="here")


def test_pins_leave_only_what_they_allow():
    pinned = module("a", option(1, 1), option(1, 2), option(2, 2), pin=Pin(degrees=(1,), quotas=(2, 3)))
    cost = TableCost(instance(pinned))
    assert cost.degrees("a") == (1,)
    assert cost.quotas("a", 1) == (2,)
    answer, _ = solve_instance(instance(pinned, module("b")))
    assert answer.plan.placement("a").quota == 2
    assert answer.plan.placement("a").degree == 1


def test_pins_that_contradict_each_other_name_the_module_and_both():
    pinned = module("a", option(1, 1), option(2, 2), pin=Pin(degrees=(1,), quotas=(2,)))
    answer, error = solve_instance(instance(pinned, module("b")))
    assert answer.status == "infeasible"
    assert isinstance(error, InfeasibleError)
    assert answer.reasons == error.reasons
    assert "'a' is pinned to degrees [1] and quotas [2]" in answer.reasons[0]


def test_a_module_that_fits_on_no_gpu_is_named_with_what_it_needs_and_what_there_is():
    answer, _ = solve_instance(instance(module("big", option(memory_bytes=700)), module("b"), memory_bytes=500))
    assert answer.status == "infeasible"
    assert answer.plan is None
    assert "'big' needs 700 bytes" in answer.reasons[0]
    assert "500" in answer.reasons[0]


def test_a_module_that_needs_more_gpus_or_slots_than_there_are_is_named():
    answer, _ = solve_instance(instance(module("wide", option(degree=8)), module("thick", option(quota=5))))
    assert ["'wide'" in answer.reasons[0], "'thick'" in answer.reasons[1]] == [True, True]


def test_more_modules_than_bits_are_refused():
    many = instance(*(module(f"m{index}") for index in range(65)))
    with pytest.raises(ValueError, match="65 modules are more than the 64"):
        solve_instance(many)


@pytest.mark.parametrize("method", ["exact", "heuristic"])
def test_a_time_limit_of_zero_gives_the_sequential_plan(method):
    made = generate(Recipe(shape="align", num_modules=12, num_devices=4))
    answer, _ = solve_instance(made, method=method, time_limit=0)
    assert [len(stage.placements) for stage in answer.plan.stages] == [1] * 12
    assert answer.status == "feasible"
    assert answer.bound_ms <= answer.objective_ms


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_time_limit_below_zero_is_refused(seconds):
    with pytest.raises(ValueError, match="use values of 0 or more"):
        solve_instance(instance(module("a")), time_limit=seconds)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_generator_makes_every_shape_and_the_same_each_time(shape):
    recipe = Recipe(shape=shape, num_modules=10, num_devices=2, seed=3)
    made = generate(recipe)
    assert len(made.modules) == 10
    assert generate(recipe) == made
    assert generate(replace(recipe, seed=4)) != made


def test_generated_modules_have_every_degree_that_planning_offers():
    made = generate(Recipe(shape="star", num_modules=4, num_devices=6, seed=3))
    assert {option.degree for module in made.modules for option in module.options} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("bad", [{"num_modules": 2}, {"num_modules": 65}, {"num_devices": 33}, {"shape": "ring"}])
def test_recipes_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="use"):
        Recipe(**{"shape": "star", "num_modules": 4, **bad})
