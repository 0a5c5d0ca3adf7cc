"""What two modules or more cost each other, as samples of a profile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mosaic.backends.base import Lane
from mosaic.profile import GroupMember, GroupSample, PairSample, Phase
from mosaic.profiler.measuring.beside import HOST, time_beside
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject


def measure_pair(
    first: Subject,
    second: Subject,
    lanes: tuple[Lane, Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = HOST,
) -> tuple[PairSample, ...]:
    """Times one phase of two modules, alone and side by side, and returns a sample for each; see ``time_beside``."""
    subjects = (first, second)
    times = time_beside(subjects, lanes, phase, settings, inline=inline, device=device)
    return tuple(
        PairSample(
            module=subjects[mine].name,
            beside=subjects[other].name,
            phase=phase,
            quota=len(lanes[mine].slots),
            beside_quota=len(lanes[other].slots),
            times_ms=times[mine].times_ms,
            alone_ms=times[mine].alone_ms,
        )
        for mine, other in ((0, 1), (1, 0))
        if times
    )


def measure_group(
    subjects: Sequence[Subject],
    lanes: Sequence[Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = HOST,
) -> GroupSample | None:
    """Times one phase of two modules or more, alone and side by side; see ``time_beside``.

    Returns:
        None where one of the modules has no such phase, or where they never met.
    """
    times = time_beside(subjects, lanes, phase, settings, inline=inline, device=device)
    if not times:
        return None
    return GroupSample(
        members=tuple(
            GroupMember(
                module=subject.name,
                phase=phase,
                quota=len(lane.slots),
                times_ms=found.times_ms,
                alone_ms=found.alone_ms,
            )
            for subject, lane, found in zip(subjects, lanes, times, strict=True)
        )
    )
