"""Laws of the gate: better is never refused where worse passed, and the order of rows does not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.retrain.gate import Contest, DayScores, GateSettings, ModelFacts, Scores, decide

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
GATE = GateSettings(resamples=1000, margin=0.05, slices=("site",), min_fresh_rows=20)
CONTEST = Contest(facts=ModelFacts(), challenger="0042", champion="0041", anchor="0012")
SEEDS = st.integers(0, 2**32 - 1)


def day(seed: int, *, worse: float = 0.05, binary: bool = True) -> DayScores:
    """Scores of three versions on frozen and fresh rows, in groups, of two sites."""
    draw = np.random.default_rng(seed)
    found = []
    for rows in ("frozen", "fresh"):
        size = int(draw.integers(60, 200))
        cluster = draw.integers(0, size // int(draw.integers(1, 5)), size=size)
        base = (draw.random(size) < 0.8).astype(float) if binary else draw.normal(size=size)
        for version in ("0041", "0012", "0042"):
            noise = (draw.random(size) < worse) * (draw.random(size) if not binary else 1.0)
            columns = {"value": np.where(noise > 0, base - noise * base, base), "cluster": cluster}
            found.append(Scores.of(version, rows, {**columns, "site": cluster % 2}))
    return DayScores(scores=tuple(found))


def changed(scores: DayScores, values: dict[str, np.ndarray]) -> DayScores:
    """Gives the challenger other values."""
    return DayScores(
        scores=tuple(
            replace(one, value=tuple(values[one.rows])) if one.version == CONTEST.challenger else one
            for one in scores.scores
        )
    )


@BOUNDED
@given(seed=SEEDS, binary=st.booleans(), share=st.floats(0, 0.2))
def test_a_better_challenger_is_not_refused_where_a_worse_one_passed(seed: int, binary: bool, share: float):
    scores = day(seed, binary=binary)
    draw = np.random.default_rng(seed + 1)
    values = {one.rows: one.array for one in scores.scores if one.version == CONTEST.challenger}
    better = {
        rows: value + (draw.random(len(value)) < share) * (np.maximum(1.0 - value, 0.0) if binary else 1.0)
        for rows, value in values.items()
    }
    before = decide(scores, CONTEST, GATE)
    after = decide(changed(scores, better), CONTEST, GATE)
    assert after.passes >= before.passes
    lows = {(one.name, one.against): one.low for one in before.comparisons if one.limit < 0}
    for one in after.comparisons:
        assert one.low >= lows.get((one.name, one.against), one.low)


@BOUNDED
@given(seed=SEEDS, binary=st.booleans())
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(seed: int, binary: bool):
    scores = day(seed, binary=binary)
    draw = np.random.default_rng(seed + 1)
    orders = {one.rows: draw.permutation(len(one.value)) for one in scores.scores}
    mixed = DayScores(
        scores=tuple(
            replace(
                one,
                value=tuple(one.value[index] for index in orders[one.rows]),
                cluster=tuple(f"group {99 - int(one.cluster[index])}" for index in orders[one.rows]),
                columns={"site": tuple(one.columns["site"][index] for index in orders[one.rows])},
            )
            for one in scores.scores
        )
    )
    assert decide(mixed, CONTEST, GATE) == decide(scores, CONTEST, GATE)
