"""Counted times, scaled by one measured step."""

from __future__ import annotations

import pytest
from pipeline_cases import images, two_encoders

from mosaic.pipelining.partition import Request
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.trial import fit_times, partition_to_fit

STEP = images(2, 3, 6)
SCALES = {"vision": 2.0, "text": 3.0}
"""Of forwards; backwards take twice as much of it."""


def test_each_modules_phases_are_scaled_by_what_its_tasks_took():
    model = two_encoders()
    partition = partition_to_fit(Request(model=model, num_ranks=2, microbatches=STEP))
    graph = task_graph(model, partition, STEP)
    assert all(len(task.parts) == 1 for task in graph.tasks)
    taken = {
        str(TaskName.of(task)): round(
            task.time_ns * SCALES[task.parts[0].module] * (1 if task.kind is ActionKind.FORWARD else 2)
        )
        for task in graph.tasks
    }
    measured, slower = ({name: (7, 7 + by * time) for name, time in taken.items()} for by in (1, 3))
    fitted = fit_times(graph, measured, [*SCALES, "audio"])
    for name, scale in SCALES.items():
        assert fitted[name].forward == pytest.approx(scale, rel=1e-4)
        assert fitted[name].backward == pytest.approx(2 * scale, rel=1e-4)
    before, after = (fit_times(graph, spans, ["audio"])["audio"] for spans in (measured, slower))
    assert after.forward == pytest.approx(3 * before.forward)
