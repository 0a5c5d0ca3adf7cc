"""Whether devices hold a comparison planner's schedule over the whole step, and other devices for its runs where not.

The rule is that of every plan (``holding.py``): what modules keep is there during the whole step. A slice of a module
keeps its share of that, on the devices that run it, and works with as much as the whole module does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mosaic.errors import InfeasibleError
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageResult
from mosaic.solver.memory.holding import Stages, fits, held_bytes, place_anew, swap_labels
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.waves import Run, Wave
from mosaic.solver.slots import Choice

Options = Mapping[str, Sequence[DeploymentOption]]


def within_memory(planner: str, waves: tuple[Wave, ...], options: Options, machine: Machine) -> tuple[Wave, ...]:
    """Returns the waves, on other devices where theirs do not hold them: times do not depend on which these are.

    Raises:
        InfeasibleError: No devices were found that hold what the planner chose.
    """
    stages = tuple(_as_stage(number, wave, options, machine) for number, wave in enumerate(waves))
    if fits(stages, machine):
        return waves
    found = swap_labels(stages, machine) or place_anew(stages, machine)
    if found is None:
        raise _refusal(planner, stages, machine)
    return tuple(
        replace(
            wave,
            runs=tuple(
                replace(run, devices=devices)
                for run, (_, devices) in zip(wave.runs, _in_order(number, stage), strict=True)
            ),
        )
        for number, (wave, stage) in enumerate(zip(waves, found, strict=True))
    )


def _name(wave: int, run: int) -> str:
    """Of a run, as what is placed: unlike any other of the schedule."""
    return f"{wave}.{run}"


def _in_order(number: int, stage: StageResult) -> list[Choice]:
    return [stage.choices[_name(number, index)] for index in range(len(stage.choices))]


def _as_stage(number: int, wave: Wave, options: Options, machine: Machine) -> StageResult:
    choices: dict[str, Choice] = {
        _name(number, index): (_memory_of(run, options, machine), run.devices) for index, run in enumerate(wave.runs)
    }
    starts = {name: (0,) * len(devices) for name, (_, devices) in choices.items()}
    return StageResult(latency_ns=0, choices=choices, starts=starts)


def _memory_of(run: Run, options: Options, machine: Machine) -> DeploymentOption:
    """A run as one option: what all of its parts keep, and the most that one of them works with.

    It holds all slots, whatever its quota: runs of a wave share no device.
    """
    kept = working = 0
    for part in run.parts:
        own = next(o for o in options[part.module] if (o.degree, o.quota) == (len(run.devices), run.quota))
        kept += -(-own.kept_bytes * part.count // part.total)
        working = max(working, own.working_bytes)
    return DeploymentOption(
        degree=len(run.devices),
        quota=machine.num_slots,
        forward_ns=0,
        backward_ns=0,
        memory_bytes=kept + working,
        kept_bytes=kept,
    )


def _refusal(planner: str, stages: Stages, machine: Machine) -> InfeasibleError:
    held = held_bytes(stages, machine.num_devices)
    fullest = held.index(max(held))
    return InfeasibleError(
        f"what {planner} plans does not fit into the devices' memory",
        reasons=[
            f"with what modules keep across waves, device {fullest} holds {held[fullest]:,} bytes at its fullest and "
            f"has {machine.memory_bytes:,}, and no other devices for its runs were found that hold them: {planner} "
            "does not choose degrees by memory; use more devices or a smaller batch, or the exact search, which does"
        ],
    )
