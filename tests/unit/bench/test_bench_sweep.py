"""The sweep over models, nets and loops: each way in which a case can end, and what the tables say of it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bench.sweep import tables
from bench.sweep.__main__ import run_alone, sweep
from bench.sweep.catalogue import MODELS, NETS, all_cases
from bench.sweep.nets.pieces import Two, batch, train
from bench.sweep.outcomes import CRASHED, DIFFERENT, IN_PLACE, NO_PLAIN, ON_LANES, RAISED, REFUSED, TOLD
from bench.sweep.session import Session, difference
from bench.sweep.verdict import Case
from mosaic import artifact
from mosaic.errors import ModuleContractError


def case_of(run: Callable[[Session], None]) -> Case:
    return Case(name=run.__name__, kind="made up", run=run)


def noting(session: Session) -> None:
    session.note(1.0 if session.on_lanes else 2.0)


def crashing(session: Session) -> None:
    if session.on_lanes:
        raise RuntimeError("only on lanes")


def dying(session: Session) -> None:
    if session.on_lanes:
        os._exit(3)


def refusing(session: Session) -> None:
    session.colocate(torch.nn.Linear(2, 2), torch.ones(1, 2))


def raising(session: Session) -> None:
    if session.on_lanes:
        raise ModuleContractError("'a' cannot be placed: colocate(..., exclude=['a'])")


def training(session: Session) -> None:
    train(session, Two())


def disabled(session: Session) -> None:
    model = Two()
    with session.colocate(model, batch(0)).disabled():
        session.note(model(*batch(0)))


def stopped(session: Session) -> None:
    raise ValueError("the plain loop fails")


def drawing(session: Session) -> None:
    session.note(torch.rand(3, generator=torch.Generator().manual_seed(torch.seed() % 1000)))


@pytest.mark.parametrize(
    ("run", "outcome", "reason"),
    [
        (training, ON_LANES, ""),
        (disabled, IN_PLACE, ""),
        (noting, DIFFERENT, "value 0: 1.0, plain 2.0 of 1"),
        (crashing, CRASHED, "RuntimeError: only on lanes"),
        (dying, CRASHED, "its process died"),
        (refusing, REFUSED, "UnsupportedModelError: found no module to place in this Linear"),
        (raising, RAISED, "ModuleContractError: 'a' cannot be placed"),
        (stopped, NO_PLAIN, "ValueError: the plain loop fails"),
        (drawing, NO_PLAIN, "differs from itself"),
    ],
)
def test_a_case_ends_in_one_word_with_a_reason(run, outcome, reason):
    figure = run_alone(case_of(run))
    assert figure.labels["outcome"] == outcome
    assert figure.reason.startswith(reason)


def test_a_case_that_hangs_on_lanes_has_crashed():
    def hanging(session: Session) -> None:
        if session.on_lanes:
            threading.Event().wait()

    figure = run_alone(case_of(hanging), seconds=3.0)
    assert figure.labels["outcome"] == CRASHED
    assert "not done after 3 s" in figure.reason


def test_values_are_compared_by_their_bits_and_nan_equals_nan():
    values = [torch.tensor([1.0, torch.nan]), torch.tensor(0.0), 0.1 + 0.2, torch.ones(2), torch.tensor(1j * torch.nan)]
    changed = [torch.tensor([2.0, torch.nan]), torch.tensor(-0.0), 0.3, torch.ones(2, 1), torch.tensor(1j)]
    plain, same = Session(on_lanes=False), Session(on_lanes=True)
    plain.note(*values)
    same.note(*(value.clone() if isinstance(value, torch.Tensor) else value for value in values))
    assert difference(plain, same) == ""
    for index in range(len(values)):
        other = Session(on_lanes=True)
        other.note(*values[:index], changed[index], *values[index + 1 :])
        assert difference(plain, other).startswith(f"value {index}: ")


def test_a_loop_on_lanes_launches_calls_of_both_towers_and_a_kept_file_says_so(tmp_path):
    path = tmp_path / "2026-01-01-abc-bench_sweep.json"
    made = sweep([case_of(training), case_of(noting)], path=path)
    assert artifact.load(type(made), path) == made
    trained, _ = made.figures
    assert trained.value == 6.0  # of four steps, the first one learns
    assert trained.labels["modules"] == "a, b"


def test_the_tables_count_and_name_the_cases_of_each_kind(tmp_path):
    assert tables.counts_table(tmp_path) == tables.cases_table(tmp_path) == "not measured yet\n"
    (tmp_path / "host").mkdir()
    sweep(
        [case_of(training), case_of(noting), case_of(raising)],
        path=tmp_path / "host" / "2026-01-01-abc-bench_sweep.json",
    )
    counted = tables.counts_table(tmp_path).splitlines()
    assert counted[2] == "| made up | 3 | 1 |  |  | 1 |  | 1 |  |"
    assert counted[3].startswith("| all | 3 |")
    assert f"| {DIFFERENT} | made up | `noting` |" in tables.cases_table(tmp_path).splitlines()


def test_the_list_has_sixty_models_a_hundred_nets_and_no_name_twice():
    counted = Counter(case.kind for case in all_cases())
    assert sum(counted[kind] for kind in MODELS) >= 60
    assert sum(counted[kind] for kind in NETS) >= 100
    assert len({case.name for case in all_cases()}) == counted.total()


@pytest.mark.parametrize("name", ["clip", "dict_results", "several_losses_summed"])
def test_cases_of_the_list_are_equal_on_lanes(name):
    (case,) = [case for case in all_cases() if case.name == name]
    assert run_alone(case).labels["outcome"] == ON_LANES


def test_a_difference_that_describe_tells_of_is_no_silent_one():
    def of_types(session: Session) -> None:
        model = Two()
        train(session, model, after=lambda step: session.note(type(model.a) is torch.nn.Sequential))

    told = "isinstance(m, T) holds, type(m) is T does not"
    for text, outcome in ((told, TOLD), ("", DIFFERENT), ("something else", DIFFERENT)):
        made = run_alone(replace(case_of(of_types), told=text))
        assert made.labels["outcome"] == outcome
