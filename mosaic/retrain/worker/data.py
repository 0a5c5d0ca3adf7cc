"""The rows of a day: their list, frozen before the first step, the rows held out of training, and how rows are read.

Files that arrive later belong to the next day. The list has each file's size and the digest of a folder's content; a
restart and the judging compare both, so data that changes during a day is an error.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from mosaic.artifact import fingerprint, save
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import MosaicError
from mosaic.retrain.folder import load_if_intact
from mosaic.retrain.records import Kind, SourceRecord, Sources
from mosaic.retrain.worker.loader import Samples
from mosaic.retrain.worker.positions import (
    PositionStream,
    Source,
    drawn_under,
    generators_of,
    replayed_share,
    samples_of,
    words_at,
    words_of,
)
from mosaic.retrain.worker.work import Work


def freeze(work: Work) -> None:
    """Writes ``sources.json``: folders, sizes, digests, rows, shares, and the steps of the day."""
    recipe, budget, state = work.recipe, work.recipe.budget, work.day.state
    earlier: dict[str, SourceRecord] = {}
    for day in work.folder.days():
        past = load_if_intact(Sources, day.sources) if day.path != work.day.path else None
        if past is not None:
            earlier |= {record.path: record for record in (*past.sources, past.frozen)}
    records = [_counted(work, day, "new", {}) for day in state.new]
    records += [_counted(work, day, "replay", earlier) for day in state.replay]
    new, replay = ({r.name: r.trained for r in records if r.kind == kind} for kind in ("new", "replay"))
    if not sum(new.values()):
        rows = sum(record.rows for record in records if record.kind == "new")
        raise MosaicError(
            f"no row of {', '.join(state.new)} is left to train on ({rows} rows, fresh_share = "
            f"{recipe.sources.fresh_share:g}); wait for more data, or lower fresh_share"
        )
    num_steps, share = budget.steps, recipe.sources.replay.share
    if num_steps is None:  # draws each new row once
        num_steps = math.ceil(sum(new.values()) / (budget.batch * (1 - replayed_share(new, replay, share))))
    samples = samples_of(new, replay, share, num_steps * budget.batch)
    sources = Sources(
        day=state.day,
        seed=budget.seed,
        fresh_share=recipe.sources.fresh_share,
        batch=budget.batch,
        num_steps=num_steps,
        sources=tuple(replace(record, samples=samples.get(record.name, 0)) for record in records),
        frozen=_listed(work, recipe.sources.frozen, "frozen", "", earlier),
    )
    save(sources, work.day.sources)


def _counted(work: Work, day: str, kind: Kind, earlier: Mapping[str, SourceRecord]) -> SourceRecord:
    """Lists a day's data folder and counts its rows."""
    record = _listed(work, work.recipe.sources.new.path.replace("{day}", day), kind, day, earlier)
    data = work.dataset(record.path, train=True)
    out = held_out_rows(data, share=work.recipe.sources.fresh_share, seed=work.recipe.budget.seed, day=day)
    return replace(record, rows=len(data), trained=len(data) - int(out.sum()))


def _listed(work: Work, name: str, kind: Kind, day: str, earlier: Mapping[str, SourceRecord]) -> SourceRecord:
    """Lists a data folder; ``earlier`` has the records of earlier days by path, whose digests unchanged files reuse."""
    path, name = work.folder.path / name, Path(name).as_posix()
    if not path.is_dir():
        raise MosaicError(f"there is no data folder {path}; see [sources] in the recipe")
    stats = {file.relative_to(path).as_posix(): file.stat() for file in sorted(path.rglob("*")) if file.is_file()}
    if not stats:
        raise MosaicError(f"the data folder {path} is empty; put the day's files there, and the ready file last")
    if wrong := [file for file in stats if file.encode(errors="ignore").decode() != file]:
        raise MosaicError(f"the name of the file {path / ascii(wrong[0])} is not UTF-8; rename it")
    files = {file: stat.st_size for file, stat in stats.items()}
    stamp = fingerprint({file: stat.st_ctime_ns for file, stat in stats.items()})  # no program can set these times
    before = earlier.get(name)
    if before is not None and (before.files, before.stamp) == (files, stamp):
        return replace(before, kind=kind, day=day, samples=0)
    digest = hashlib.sha256("".join(f"{file}\0{sha256_of(path / file)}\0" for file in files).encode()).hexdigest()
    if before is not None and before.digest != digest:
        was, last = before.files, max(stats, key=lambda file: stats[file].st_ctime_ns)
        changed = min((file for file in was | files if was.get(file) != files.get(file)), default="")
        what = f"{changed} had {was.get(changed, 'no')} bytes and has {files.get(changed, 'no')}"
        is_own = work.day.sources.is_file() and not work.day.state.is_over
        remedy = f"move {work.day.path} away to begin anew" if is_own else "put new files into a folder of their own"
        raise MosaicError(
            f"{path} changed since a day listed it ({what if changed else f'the last to change is {last}'}), and a "
            f"day's data must not change; restore it, or {remedy}"
        )
    return SourceRecord(kind=kind, day=day, path=name, files=files, digest=digest, stamp=stamp)


def held_out_rows(data: Any, *, share: float, seed: int, day: str) -> np.ndarray:
    """Returns the mask of a day's held-out rows: whole clusters, drawn by seed and day.

    ``data.cluster(index)``, if present, names the cluster of a row (a recording, a robot, a shop); otherwise each row
    is its own cluster.
    """
    cluster = getattr(data, "cluster", None)
    if cluster is None:
        words = words_at(words_of("held out", seed, day)[0], np.arange(len(data), dtype=np.uint64))
        return words < np.uint64(share * 2**64)
    names = [str(cluster(index)) for index in range(len(data))]
    digests = {name: hashlib.sha256(f"{seed}/{day}/{name}".encode()).digest() for name in set(names)}
    return np.array([int.from_bytes(digests[name][:8], "big") / 2**64 < share for name in names], dtype=bool)


def check_unchanged(work: Work) -> None:
    """Raises MosaicError if the day's data is not what the day listed."""
    for each in (*work.sources.sources, work.sources.frozen):
        _listed(work, each.path, each.kind, each.day, {each.path: each})


def open_samples(work: Work) -> Samples:
    """Opens the day's data without held-out rows."""
    check_unchanged(work)
    sources = work.sources
    datasets, streamed = [], []
    for record in (record for record in sources.sources if record.samples):
        data = work.dataset(record.path, train=True)
        out = held_out_rows(data, share=sources.fresh_share, seed=sources.seed, day=record.day)
        if (len(data), len(data) - int(out.sum())) != (record.rows, record.trained):
            raise MosaicError(
                f"{record.path} has {len(data)} rows now and had {record.rows} when the day began, {record.trained} of "
                "them to train on; restore it. Rows that arrive later belong to the next day"
            )
        rows = array("q", np.flatnonzero(~out).astype(np.int64).tobytes())
        datasets.append(Subset(data, rows) if out.any() else data)  # type: ignore[arg-type]  # it is indexed alone
        streamed.append(Source(name=record.name, rows=record.trained, samples=record.samples))
    return Samples(datasets, PositionStream(streamed, sources.seed))


# Rows to score, without augmentation.


@dataclass(frozen=True, slots=True)
class Unreadable:
    reason: str
    """Kind and message of the error."""


def read_rows(data: Any, rows: Iterable[int], seed: int) -> Iterator[Any]:
    """Yields rows of a data set, or ``Unreadable``; (seed, i) seeds row i, so it is always the same."""
    generators = generators_of(data)
    for row in rows:
        with drawn_under(seed, row, generators):
            try:
                sample = data[row]
            except MemoryError:
                raise
            except Exception as error:  # of any kind, from the user's data set: the caller counts it, or raises
                sample = Unreadable(f"{type(error).__name__}: {error}")
        yield sample


def frozen_rows(work: Work) -> tuple[Any, ...]:
    return tuple(_judged_rows(work, work.recipe.sources.frozen))


def fresh_rows(work: Work) -> tuple[Any, ...]:
    """Reads the held-out rows of the day's new data."""
    new = work.sources.of_kind("new")
    return tuple(row for each in new for row in _judged_rows(work, each.path, held_out_on=each.day))


def _judged_rows(work: Work, path: str, held_out_on: str | None = None) -> Iterator[Any]:
    """Yields the rows of a folder, all of them or those held out on a day."""
    data = work.dataset(path, train=False)
    selected = list(range(len(data)))
    if held_out_on is not None:
        sources = work.sources
        out = held_out_rows(data, share=sources.fresh_share, seed=sources.seed, day=held_out_on)
        selected = np.flatnonzero(out).tolist()
    for row, sample in zip(selected, read_rows(data, selected, work.recipe.budget.seed), strict=True):
        if isinstance(sample, Unreadable):
            raise MosaicError(
                f"row {row} of {path} cannot be read ({sample.reason}), and versions are compared on it; mend it, or "
                "take it out of the folder"
            )
        yield sample
