"""The outcome of a case: equal, refused, raised, different or crashed, with notes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from bench.record import Figure, one_line
from bench.sweep.device import device
from bench.sweep.session import Case, RefusedError, Session, difference, seed_all, without_folders
from bench.sweep.tables import CRASHED, DIFFERENT, IN_PLACE, NEAR, NO_PLAIN, ON_LANES, RAISED, REFUSED, TOLD
from mosaic.errors import MosaicError
from mosaic.timeline import Span

ROUNDING = 0.01
"""Tolerance of numbers on a GPU, as a share of the largest of a tensor: AdamW's steps amplify rounding."""


def judge(case: Case, *, graphs: bool = False) -> Iterator[Figure]:
    """Runs a case plain and colocated; each yielded figure replaces the one before."""
    began = time.perf_counter()
    plain = Session(on_lanes=False)
    try:
        _train(case, plain)
    except Exception as error:  # of any kind: the case says nothing about Mosaic
        yield figure(case, NO_PLAIN, reason=f"{type(error).__name__}: {error}")
        return
    yield figure(case, CRASHED, reason="the process died")  # unless it comes back
    ours = Session(on_lanes=True, graphs=graphs)
    outcome, reason = _outcome(case, plain, ours)
    spans = [span for handle in ours.handles for span in handle.timeline().spans if span.phase != "glue"]
    yield figure(
        case,
        outcome,
        reason=reason,
        value=sum(span.phase == "forward" for span in spans),
        modules=", ".join(dict.fromkeys(name for handle in ours.handles for name in handle.graph.names)),
        overlapped="yes" if any(itertools.starmap(_overlap, itertools.pairwise(spans))) else "no",
        seconds=f"{time.perf_counter() - began:.1f}",
    )


def figure(
    case: Case, outcome: str, *, reason: str, counts: str = "calls on lanes", value: float = 0.0, **labels: str
) -> Figure:
    """Returns the record of a case; ``counts`` names its number."""
    return Figure(
        name=f"{case.name}: {counts}",
        source="measured",
        value=float(value),
        reason=one_line(without_folders(reason)),
        part=case.kind,
        labels={"case": case.name, "outcome": outcome, **labels},
    )


def _train(case: Case, session: Session) -> None:
    seed_all(0)
    case.run(session)
    session.note_models()


def _outcome(case: Case, plain: Session, ours: Session) -> tuple[str, str]:
    try:
        _train(case, ours)
    except RefusedError as error:
        return REFUSED, str(error)
    except MosaicError as error:
        return RAISED, f"{type(error).__name__}: {error}"
    except (Exception, KeyboardInterrupt) as error:  # of any kind: the plain loop raises none
        return CRASHED, f"{type(error).__name__}: {error}"
    finally:
        ours.end()
    differs = difference(plain, ours)
    if differs:
        again = Session(on_lanes=False)
        _train(case, again)
        itself = difference(plain, again)
        if itself:
            return NO_PLAIN, f"differs from itself: {itself}"
        if device().type == "cuda" and not difference(plain, ours, share=ROUNDING):
            return NEAR, differs
        is_told = case.told and all(case.told in handle.describe() for handle in ours.handles)
        return (TOLD, case.told) if is_told else (DIFFERENT, differs)
    in_place = [line for handle in ours.handles for line in handle.describe().splitlines() if "in place" in line]
    on_lanes = any(span.phase == "forward" for handle in ours.handles for span in handle.timeline().spans)
    return (ON_LANES if on_lanes else IN_PLACE), "; ".join(dict.fromkeys(in_place))


def _overlap(first: Span, other: Span) -> bool:
    return first.module != other.module and other.start_ms < first.end_ms
