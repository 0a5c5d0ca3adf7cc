"""Spindle's figures, one function each: steps are simulated, shares of them predicted, times of planning measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from bench.changing.workload import PHASES
from bench.figures.papers.read import printed
from bench.papers.planners import PiecewiseAlphaBeta, profiled_degrees
from bench.record import Figure, Source, missing_figure, one_line
from bench.solver.study import figure
from bench.spindle.sends import sent_ms
from bench.spindle.steps import (
    BASE,
    METHODS,
    PlannedStep,
    held_gb,
    ratio_figure,
    share_of_peak,
    share_of_sums,
    steps_of,
    theoretical_ms,
)
from bench.spindle.workload import TASKS, Scale, workload
from mosaic.profile import Phase

PLANNED = ("distmm-mt", "spindle-optimus", "spindle", "exact", "auto")
"""Whose planning is timed."""
MOSAIC = ("exact", "auto")
"""The search, and what runs where nobody names a method."""
CASE = ("multitask-clip", 4)
"""Of Spindle's case study (Fig. 9, 15), on 16 GPUs."""
FIGURE_8 = printed("spindle", "Fig. 8")
FIGURE_10 = printed("spindle", "Fig. 10")
FIGURE_14 = printed("spindle", "Fig. 14")
Steps = Mapping[str, PlannedStep]


def figure_8(
    model: str, counts: Sequence[int], num_devices: Sequence[int], scale: Scale, seconds: float
) -> Iterator[Figure]:
    """End-to-end speed-ups, and how they grow with GPUs; Fig. 11 and 12 of the same plans."""
    found: dict[tuple[int, int], Steps] = {}
    for count in counts:
        for gpus in num_devices:
            made = workload(model, TASKS[model][:count], scale)
            found[count, gpus] = steps = steps_of(made, gpus, seconds)
            of = f"{model} ({made.size}), {count} tasks, {gpus} GPUs"
            labels = {"batch": str(scale.batch), "modules": str(len(made.graph.names))}
            yield _value(f"Fig. 8: {BASE}: step, {of}, ms", steps[BASE], labels=labels)
            for method in METHODS:
                if method != BASE:
                    yield ratio_figure(
                        f"Fig. 8: {method}: speed-up over {BASE}, {of}", steps[BASE], steps[method], labels=labels
                    )
            for method in MOSAIC:
                name = f"Fig. 8: {method}: speed-up over spindle, {of}"
                yield ratio_figure(name, steps["spindle"], steps[method])
            yield from _figure_11(steps, theoretical_ms(made, gpus), of, is_claimed=model == "multitask-clip")
            yield from figure_12(steps, of)
    yield from _highest(model, found)
    yield from _scaling(model, found)


def _highest(model: str, found: Mapping[tuple[int, int], Steps]) -> Iterator[Figure]:
    """The highest of several bars, as the paper's text tells them."""
    ratios = {
        (method, count, gpus): steps[BASE].step_ms / own.step_ms
        for (count, gpus), steps in found.items()
        for method, own in steps.items()
        if own.step_ms and steps[BASE].step_ms
    }
    for gpus in dict.fromkeys(gpus for _, gpus in found):
        for method in ("spindle", *MOSAIC):
            best = [ratio for (who, _, at), ratio in ratios.items() if (who, at) == (method, gpus)]
            name = f"Fig. 8: {method}: highest speed-up over {BASE}, {model}, any tasks, {gpus} GPUs"
            claimed = FIGURE_8.get(f"{method}, {model}, {gpus} GPUs", "")
            yield _told(name, best, max, claimed, source="simulated")
    for method in ("spindle", "spindle-optimus", "distmm-mt", "distmm", *MOSAIC):
        best = [ratio for (who, _, _), ratio in ratios.items() if who == method]
        name = f"Fig. 8: {method}: highest speed-up over {BASE}, {model}, any tasks, any GPUs"
        yield _told(name, best, max, FIGURE_8.get(method, ""), source="simulated")
    most = max(count for count, _ in found)
    own = [ratio for (who, count, _), ratio in ratios.items() if (who, count) == ("spindle", most)]
    claimed = FIGURE_8["spindle, 10 tasks of multitask-clip and 7 of multitask-ofasys"] if model != "qwen-val" else ""
    yield _told(
        f"Fig. 8: spindle: least speed-up over {BASE}, {model}, {most} tasks", own, min, claimed, source="simulated"
    )
    over = [
        ratios["spindle", count, gpus] / ratios["distmm-mt", count, gpus]
        for count, gpus in found
        if ("spindle", count, gpus) in ratios and ("distmm-mt", count, gpus) in ratios
    ]
    claimed = FIGURE_8["spindle over distmm-mt"]
    yield _told(f"Fig. 8: spindle: highest speed-up over distmm-mt, {model}", over, max, claimed, source="simulated")


def _scaling(model: str, found: Mapping[tuple[int, int], Steps]) -> Iterator[Figure]:
    few, many = (32, 64) if model == "qwen-val" else (16, 32)
    count = min(count for count, _ in found)
    if (count, few) in found and (count, many) in found:
        for method in METHODS:
            yield ratio_figure(
                f"Fig. 8: {method}: speed-up of {many} GPUs over {few}, {model}, {count} tasks",
                found[count, few][method],
                found[count, many][method],
                paper=FIGURE_8.get(f"{many} GPUs over {few}, {model}, {method}", ""),
            )


def _figure_11(steps: Steps, least_ms: float, of: str, *, is_claimed: bool) -> Iterator[Figure]:
    """How far plans are above what no sharing of whole devices can beat; Mosaic shares them in parts."""
    for method in ("spindle", "exact"):
        own = steps[method]
        name = f"Fig. 11: {method}: step above the theoretical optimum of whole devices, {of}, %"
        claimed = printed("spindle", "Fig. 11")["spindle"] if method == "spindle" and is_claimed else ""
        value = None if own.predicted_ms is None else 100 * (own.predicted_ms / least_ms - 1)
        yield _told(name, [] if value is None else [value], max, claimed, own.reason)


def figure_12(steps: Steps, of: str) -> Iterator[Figure]:
    """Time of planning, on one core of this machine."""
    for method in PLANNED:
        claimed = printed("spindle", "Fig. 12").get(method, "")
        own = [] if steps[method].plan is None else [steps[method].seconds]
        name = f"Fig. 12: {method}: planning, {of}, s"
        yield _told(name, own, max, claimed, steps[method].reason, source="measured")


def large_plans(model: str, num_devices: int, scale: Scale, seconds: float) -> Iterator[Figure]:
    """Time of planning for more GPUs than the paper measured on; for its plans' worth the batch is too small."""
    made = workload(model, TASKS[model], scale)
    steps = steps_of(made, num_devices, seconds, methods=PLANNED)
    yield from figure_12(steps, f"{model} ({made.size}), {len(made.tasks)} tasks, {num_devices} GPUs")


def case_study(scale: Scale, num_devices: int, seconds: float) -> Iterator[Figure]:
    """Four tasks of Multitask-CLIP on 16 GPUs: use of devices (Fig. 9), memory (Fig. 15)."""
    model, count = CASE
    made = workload(model, TASKS[model][:count], scale)
    of = f"{model} ({made.size}), {count} tasks, {num_devices} GPUs"
    _, _, cluster = made.on(num_devices)
    for method, own in steps_of(made, num_devices, seconds).items():
        name = f"Fig. 9: {method}: operations of a step over the devices' peak, {of}, %"
        if own.plan is None or not own.step_ms:
            yield missing_figure(name, one_line(own.reason), source="simulated")
            continue
        share = share_of_peak(own.step_ms, made, cluster, num_devices)
        yield _told(name, [100 * share], max, source="simulated")
        held = held_gb(own.plan, made)
        yield _told(f"Fig. 15: {method}: kept by the fullest device, {of}, GB", held, max)
        yield _told(f"Fig. 15: {method}: kept by the emptiest device, {of}, GB", held, min)


def figure_10(model: str, count: int, num_devices: int, scale: Scale, seconds: float) -> Iterator[Figure]:
    """What Spindle's slices send each other, placed in a row; and sums of gradients."""
    made = workload(model, TASKS[model][:count], scale)
    _, _, cluster = made.on(num_devices)
    of = f"{model} ({made.size}), {count} tasks, {num_devices} GPUs"
    (found,) = steps_of(made, num_devices, seconds, methods=("spindle",)).values()
    name = f"Fig. 10: spindle placed in a row: sends between waves, of the step with them, {of}, %"
    if found.plan is None or not found.predicted_ms:
        yield missing_figure(name, found.reason)
        return
    sends_ms = sent_ms(found.plan, made, cluster)
    yield _told(name, [100 * sends_ms / (found.predicted_ms + sends_ms)], max, FIGURE_10["sends placed in a row"])
    name = f"Fig. 10: spindle: sums of gradients, of the step, {of}, %"
    yield _told(name, [100 * share_of_sums(found)], max, FIGURE_10["sums of gradients"])


def figure_13(scale: Scale, num_devices: int, seconds: float, phases: Sequence[Sequence[str]] = PHASES) -> list[Figure]:
    """Tasks that come and go: all phases' steps, as many of each, every phase planned anew."""
    by_phase = [steps_of(workload("multitask-clip", tasks, scale), num_devices, seconds) for tasks in phases]
    of = f"multitask-clip, {len(phases)} phases of {', '.join(str(len(tasks)) for tasks in phases)} tasks"
    figures = []
    for method in METHODS:
        times = [steps[method].step_ms for steps in by_phase]
        base = [steps[BASE].step_ms for steps in by_phase]
        ratios = [] if None in times or None in base else [sum(filter(None, base)) / sum(filter(None, times))]
        name = f"Fig. 13: {method}: speed-up over {BASE}, {of}, {num_devices} GPUs"
        figures.append(_told(name, ratios, max, why="a phase has no plan", source="simulated"))
    for method in MOSAIC:
        spent = [steps[method].seconds for steps in by_phase[1:]]
        name = f"Fig. 13: {method}: planning at a change, {of}, {num_devices} GPUs, worst, s"
        figures.append(_told(name, spent, max, source="measured"))
    return figures


def figure_14(scale: Scale, num_devices: Sequence[int], seconds: float) -> Iterator[Figure]:
    """One task of Multitask-CLIP."""
    made = workload("multitask-clip", TASKS["multitask-clip"][:1], scale)
    for gpus in num_devices:
        steps = steps_of(made, gpus, seconds)
        for method in METHODS:
            if method != BASE:
                yield ratio_figure(
                    f"Fig. 14: {method}: speed-up over {BASE}, multitask-clip ({made.size}), 1 task, {gpus} GPUs",
                    steps[BASE],
                    steps[method],
                    paper=FIGURE_14.get(method, ""),
                )


def estimates(scale: Scale) -> Iterator[Figure]:
    """Spindle's estimator (Fig. 4, appendix A) at degrees that it did not look at, against counts at these degrees.

    Truth is the cost model's time of what was counted there, no fit and no line between degrees: predicted, too.
    """
    made = workload("multitask-clip", ("image_text", "audio_depth"), scale)
    cost, device, _ = made.on(max(scale.degrees))
    known = profiled_degrees(scale.degrees)
    errors = []
    for name in made.graph.names:
        times = {d: sum(cost.time_ms(name, phase, d, device.num_slots) for phase in Phase) for d in scale.degrees}
        estimate = PiecewiseAlphaBeta(degrees=known, times=tuple(times[degree] for degree in known))
        errors += [100 * abs(estimate.time(d) / times[d] - 1) for d in scale.degrees if d not in known]
    of = f"of {len(made.graph.names)} modules at degrees {', '.join(str(d) for d in scale.degrees if d not in known)}"
    why = "every degree was looked at"
    yield _told(f"Fig. 4: spindle's estimate: error {of}, median, %", errors, statistics.median, why=why)
    yield _told(f"Fig. 4: spindle's estimate: error {of}, worst, %", errors, max, why=why)


def _value(name: str, found: PlannedStep, *, labels: Mapping[str, str]) -> Figure:
    if found.step_ms is None:
        return missing_figure(name, one_line(found.reason), dict(labels), source="simulated")
    return Figure(name=name, source="simulated", value=found.step_ms, labels=dict(labels))


def _told(
    name: str,
    samples: Sequence[float],
    statistic: Callable[[list[float]], float],
    paper: str = "",
    why: str = "no method has a plan of it",
    *,
    source: Source = "predicted",
) -> Figure:
    made = figure(name, samples, source, statistic=statistic, paper=paper, reason="" if samples else one_line(why))
    return made if statistic is statistics.median else replace(made, low=None, high=None)  # of extremes no interval
