"""The study of planned pipelines: what PipeWeaver and Cornstarch print, simulated here, and how fast planning is.

``python -m bench.pipeline [--quick] [--json FILE] [--pictures DIR]``

Steps are simulated on the papers' devices as described, with microbatches drawn like the papers' data sets; partitions
are made for other steps than those that run. A baseline has the first strategy for all layers that fits, of keeping
everything and recomputation. Times of planning are measured on this machine; steps that run have a
study of their own, ``bench.pipeline.measured``. Every part runs in a process of its own that is ended in time.
``--quick``: small steps, within a minute on two quiet cores.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: idle threads would spin on others' cores

from bench.pipeline import on_lanes, papers, speed
from bench.record import Study
from bench.study_parts import PartedStudy, StudyPart

_ONE = ("vlm-s", "vlm-m", "vlm-l", "alm-s", "alm-m", "alm-l")
_VALM = ("valm-ss", "valm-sm", "valm-sl", "valm-ms", "valm-mm", "valm-ml", "valm-ls", "valm-lm", "valm-ll")
QUICK = (
    StudyPart.alone("Fig. 12", 30, lambda: papers.figure_12("vlm-s", (0,), (0.2, 0.5), 2)),
    StudyPart.alone("speed", 30, lambda: speed.rollouts("vlm-s", 4)),
    StudyPart.alone("Table 5", 40, lambda: papers.table_5("vlm-s", (0,), 1)),
    StudyPart.alone("lanes", 60, lambda: on_lanes.on_host(128, 2)),
)
FULL = (
    StudyPart.alone("Fig. 12", 300, lambda: papers.figure_12("vlm-l", (0, 1, 2), (1, 2, 5, 10), 2)),
    StudyPart.alone(
        "Fig. 9a", 300, lambda: papers.figure_9a(("vlm-s", "vlm-m", "vlm-l", "t2v-s", "t2v-l"), (0, 1, 2), 5)
    ),
    StudyPart.alone("Table 5", 120, lambda: papers.table_5("vlm-s", (0, 1, 2), 5)),
    StudyPart.alone("Table 1", 120, lambda: papers.table_1(36, (0, 1, 2))),
    StudyPart.alone("Fig. 9b", 300, lambda: papers.figure_9b(2)),
    StudyPart.alone("Fig. 10", 120, lambda: papers.figure_10((4, 6, 8, 10, 12, 16, 20, 24, 28, 32), 3)),
    StudyPart.alone("Fig. 11", 120, lambda: papers.figure_11(5)),
    StudyPart.alone(
        "Fig. 14", 300, lambda: papers.figure_14(("vlm-xl-8k", "vlm-xl-16k", "t2v-xl-3k", "t2v-xl-6k"), 20)
    ),
    StudyPart.alone(
        "speed",
        200,
        lambda: chain(
            speed.rollouts("vlm-s", 8),
            speed.rollouts("vlm-l", 40),
            speed.layer_tuning("vlm-s", 16, 0.5),
            speed.layer_tuning("vlm-m", 16, 0.5),
            speed.large_step("vlm-xl-16k", 64, 20),
        ),
    ),
    *(
        StudyPart.alone(f"lanes, width {width}", 200, lambda width=width: on_lanes.on_host(width, 15))
        for width in (128, 256, 512)
    ),
    StudyPart.alone("lanes on H100s", 300, lambda: on_lanes.on_h100s(("vlm-s", "vlm-m", "vlm-l"), (0, 1, 2), 5)),
    StudyPart.alone("Cornstarch, frozen", 120, lambda: chain(*(papers.cornstarch_frozen(text) for text in "sml"))),
    StudyPart.alone(
        "Cornstarch, steps", 120, lambda: chain(*(papers.cornstarch_steps(text, (*_ONE, *_VALM)) for text in "sml"))
    ),
    StudyPart.alone(
        "Cornstarch, modules", 120, lambda: chain(*(papers.cornstarch_modules(text, _VALM) for text in "sml"))
    ),
)


def draw(study: Study, folder: Path) -> None:
    """Draws VLM-S's step: the fastest baseline above the planned one."""
    from bench.pipeline.steps import Job, options
    from mosaic.report.pipeline_picture import PipelineRun, draw_pipelines

    job = Job(name="vlm-s", num_microbatches=8)
    step = job.step(0)
    plan, rival = job.plan(step, options(3)), job.contend(step, ("megatron",))[0]
    assert rival.run is not None
    runs = [
        PipelineRun(title="megatron", graph=rival.run.graph, start_ns=rival.run.timed.start_ns),
        PipelineRun(title="planned", graph=plan.graph, start_ns=plan.timed.start_ns),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    draw_pipelines(runs, folder / "pipeline_vlm_s.png")


STUDY = PartedStudy(name="bench_pipeline", quick=lambda: QUICK, quick_seconds=60.0, full=lambda: FULL)

if __name__ == "__main__":
    STUDY.main(__doc__, "small steps; within a minute on two cores", draw)
