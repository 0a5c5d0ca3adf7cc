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
from bench.sweep.__main__ import PIPELINE, run_alone, sweep
from bench.sweep.catalogue import MODELS, NETS, all_cases, pipeline_cases
from bench.sweep.chunk_chain import ChunkChain
from bench.sweep.nets.pieces import Two, batch, train
from bench.sweep.outcomes import (
    AS_TOLD,
    CRASHED,
    DIFFERENT,
    EQUAL,
    IN_PLACE,
    NO_PLAIN,
    ON_LANES,
    PIPELINE_OUTCOMES,
    RAISED,
    REFUSED,
    TOLD,
)
from bench.sweep.parted import judge_parted
from bench.sweep.session import Session, difference
from bench.sweep.verdict import Case
from mosaic import artifact
from mosaic.errors import ModuleContractError
from mosaic.ranks.pipeline.late_weights import LateWeights


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


def of_layers(session: Session) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    session.colocate(layers, torch.ones(2, 4))


def normalized(session: Session) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in "abc"))
    session.colocate(layers, torch.randn(4, 4))


def single(session: Session) -> None:
    session.colocate(torch.nn.Linear(4, 4), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("run", "outcome", "reason"),
    [
        (of_layers, EQUAL, ""),
        (normalized, AS_TOLD, "BatchNorm in eval(): UnsplittableError: 0.1 is a BatchNorm1d"),
        (single, REFUSED, "UnsplittableError: no list of layers was found"),
        (noting, NO_PLAIN, "ValueError: its loop colocates no model"),
    ],
)
def test_a_model_that_is_cut_ends_in_one_word_with_a_reason(run, outcome, reason):
    figure = run_alone(case_of(run), judge_parted)
    assert figure.labels["outcome"] == outcome
    assert figure.reason.startswith(reason)


def test_a_chain_that_gives_something_else_is_different(monkeypatch):
    monkeypatch.setattr(ChunkChain, "gradients", lambda chain: {})
    *_, figure = judge_parted(case_of(of_layers))
    assert figure.labels["outcome"] == DIFFERENT
    assert figure.reason == "modules apart: 0.bias has a gradient in one of them only, and 5 more"


def test_gradients_of_weights_that_wait_are_compared_too(monkeypatch):
    monkeypatch.setattr(LateWeights, "run", lambda late: None)
    *_, figure = judge_parted(case_of(of_layers))
    assert figure.labels["outcome"] == DIFFERENT
    assert figure.reason.startswith("modules apart, weights apart: 0.weight has a gradient in one of them only")


def test_the_table_of_refusals_has_each_way_out_once(tmp_path):
    assert tables.reasons_table(tmp_path) == "not measured yet\n"
    (tmp_path / "host").mkdir()
    cases = [case_of(run) for run in (of_layers, single, normalized)]
    sweep(cases, PIPELINE, path=tmp_path / "host" / "2026-01-01-abc-bench_sweep_pipeline.json")
    assert [line.split(" | ")[-2:] for line in tables.reasons_table(tmp_path).splitlines()[2:]] == [
        ["1", "`single` |"],
        ["1", "`normalized` |"],
    ]
    counted = tables.counts_table(tmp_path, tables.PIPELINE_STUDY, PIPELINE_OUTCOMES).splitlines()
    assert counted[2] == "| made up | 3 | 1 | 1 | 1 |  |  |"


@pytest.mark.parametrize("name", ["clip", "qwen3_moe_with_router_loss", "hook_keeps_a_feature_for_the_loss"])
def test_cases_of_the_list_are_equal_in_chunks(name):
    (case,) = [case for case in pipeline_cases() if case.name == name]
    assert run_alone(case, judge_parted).labels["outcome"] == EQUAL
