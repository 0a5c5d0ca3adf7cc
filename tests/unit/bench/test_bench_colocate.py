"""The study of Mosaic's own cost."""

from __future__ import annotations

from bench.colocate import parts


def test_calls_and_steps_are_measured_under_names_of_their_own():
    calls, clip, *_ = parts(calls=100, rounds=1, seconds=0.0)
    figures = [*calls.make(60.0), *clip.make(0.0)]
    values = {figure.name: figure.value for figure in figures}
    assert len(values) == len(figures)
    assert values["placed call of an empty module on a lane, launched, us"]
    assert values["clip, tiny: step under the sequential plan over the plain step, ratio"]
