"""The study of Spindle's figures 8 to 16, under one cost model: every planner on Spindle's own workloads.

``python -m bench.spindle [--quick] [--json FILE] [--pictures DIR]``

Multitask-CLIP with 4, 7 and 10 tasks, OFASys with 4 and 7, QWen-VAL with 3, on 8 to 64 A100s; times of operators are
counted, not measured, steps are simulated, and ``megatron`` stands for the paper's Megatron-LM and DeepSpeed. Times
of planning are measured on this machine. What the paper's text says stands beside, as a label; what stands in its
pictures alone does not. Every part runs in a process of its own that is ended in time. ``--quick``: tiny sizes of the
models, within two minutes on two quiet cores; its numbers say that it works, and nothing about the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from bench.record import Figure, missing_figure
from bench.spindle.figures import case_study, estimates, figure_8, figure_10, figure_13, figure_14, large_plans
from bench.spindle.pictures import draw
from bench.spindle.workload import PUBLISHED, TINY, Scale
from bench.study_parts import PartedStudy, StudyPart

NO_CLUSTER = "needs a cluster of 8 to 64 GPUs, which nobody had"
KNOWN = {
    "Fig. 8: iteration time on 8 to 64 GPUs, measured, s": NO_CLUSTER,
    "Fig. 9: FLOP/s of each device and each MetaOp, measured": NO_CLUSTER,
    "Fig. 10: sends, sums and arithmetic of a step, measured, %": NO_CLUSTER,
    "Fig. 13: time of a run whose tasks change, measured on GPUs, s": (
        f"{NO_CLUSTER}; python -m bench.changing measures a small one on CPU cores"
    ),
    "Fig. 15: memory of each device, measured, GB": NO_CLUSTER,
    "Fig. 16: Spindle-Seq beside Megatron-LM and DeepSpeed, measured": (
        "compares implementations of one plan, which a cost model does not know apart; it is among the steps of Fig. 8"
    ),
    "Table 2: speed-ups of QWen-VAL 30B and 70B on 256 GPUs": "simulated by python -m bench.ranks",
}
EVERY_DEGREE = replace(PUBLISHED, degrees=(1, 2, 3, 4, 5, 6, 7, 8))
LARGER = replace(PUBLISHED, batch=128)
"""Multitask-CLIP: at half of it launches bind Megatron-LM, which gains nothing from 16 to 32 GPUs; the paper's does."""
_CLIP, _OFASYS, _QWEN = "multitask-clip", "multitask-ofasys", "qwen-val"


def _clip(scale: Scale, gpus: tuple[int, ...], seconds: float) -> Iterator[Figure]:
    """All of one model in one process: its operators are counted once."""
    return chain(
        figure_8(_CLIP, (4, 7, 10), gpus, scale, seconds),
        case_study(scale, 16 if 16 in gpus else max(gpus), seconds),
        figure_10(_CLIP, 10, 16 if 16 in gpus else max(gpus), scale, seconds),
        figure_14(scale, gpus, seconds),
        figure_13(scale, max(gpus), seconds),
        large_plans(_CLIP, 256, scale, seconds),
    )


def _ofasys(scale: Scale, gpus: tuple[int, ...], seconds: float) -> Iterator[Figure]:
    return chain(
        figure_8(_OFASYS, (4, 7), gpus, scale, seconds),
        figure_10(_OFASYS, 7, max(gpus), scale, seconds),
    )


def _qwen(scale: Scale, gpus: tuple[int, ...], seconds: float) -> Iterator[Figure]:
    return chain(figure_8(_QWEN, (3,), gpus, scale, seconds), figure_10(_QWEN, 3, max(gpus), scale, seconds))


QUICK = (
    StudyPart.alone("Multitask-CLIP", 60, lambda: figure_8(_CLIP, (3,), (4, 8), TINY, 1)),
    StudyPart.alone("one task, its sends", 40, lambda: figure_10(_CLIP, 2, 4, TINY, 1)),
)
FULL = (
    StudyPart.alone("Multitask-CLIP", 600, lambda: _clip(LARGER, (8, 16, 32), 5)),
    StudyPart.alone("OFASys", 600, lambda: _ofasys(PUBLISHED, (8, 16, 32), 5)),
    StudyPart.alone("QWen-VAL", 600, lambda: _qwen(PUBLISHED, (16, 32, 64), 5)),
    StudyPart.alone("Spindle's estimator", 200, lambda: estimates(EVERY_DEGREE)),
)
STUDY = PartedStudy(
    name="bench_spindle",
    quick=lambda: QUICK,
    quick_seconds=110.0,
    full=lambda: FULL,
    known=[missing_figure(name, reason) for name, reason in KNOWN.items()],
)


def main() -> None:
    """Runs the study."""
    STUDY.main(__doc__, "tiny sizes of the models; within two minutes on two cores", draw)


if __name__ == "__main__":
    main()
