"""Writes the tables of README and docs/ from the newest result files.

``python -m bench.tables [--check] [--keep FILE]``
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from bench import pages
from bench.context import tables as context_tables
from bench.ddp import tables as ddp_tables
from bench.gpu import tables as gpu_tables
from bench.gpu.ladder import SM_TARGET_SPEEDUP
from bench.never_slower import never_slower_table
from bench.papers.printed import PAPERS, kept_studies, paper_table, read_paper
from bench.pipeline.tables import measured_table
from bench.record import Study
from bench.sweep import tables as sweep_tables
from bench.sweep.tables import PIPELINE_OUTCOMES
from mosaic.artifact import load, save, write_text
from mosaic.backends.cuda.backend import SM_TARGETS
from mosaic.demo.record import MEASURED, PREDICTED, RunRecord, summary_rows
from mosaic.device import Device
from mosaic.errors import MosaicError

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "bench" / "results"
README = TOP / "README.md"
PAGES = (README, TOP / "bench" / "README.md", *sorted((TOP / "docs").glob("*.md")))
"""Pages with tables."""


def main() -> None:
    """Rewrites or checks the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check; exit with 1 if a table is out of date")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="first add a result of bench.gpu")
    options = parser.parse_args()
    try:
        if options.keep is not None:
            print(f"added {keep(options.keep)}")
    except MosaicError as error:
        sys.exit(str(error))
    texts = {page: (page.read_text(encoding="utf-8"), with_tables(page)) for page in PAGES}
    texts[SM_TARGETS] = (SM_TARGETS.read_text(encoding="utf-8"), sm_targets())
    if options.check:
        sys.exit(any(before != after for before, after in texts.values()))
    write_text(sm_targets(), SM_TARGETS)
    for page in PAGES:
        write_text(with_tables(page), page)


def keep(file: Path) -> Path:
    """Checks a result of ``bench.gpu`` and stores it by device, time and commit.

    Raises:
        MosaicError: It is a dry run, or has no device.
    """
    study = load(Study, file)
    if study.dry_run or study.machine is None:
        why = "it is a dry run" if study.dry_run else "it has no device"
        raise MosaicError(f"{file} cannot be added: {why}")
    commit = re.sub(r"[^0-9A-Za-z]", "", study.commit) or "unknown"
    path = RESULTS / slug(study.machine) / f"{study.created[:16].replace(':', '')}-{commit}.json"
    save(study, path)
    return path


def slug(machine: Device) -> str:
    """Returns the folder of a device's results, such as ``h200`` for an ``NVIDIA H200``."""
    if machine.kind == "host":
        return "host"
    words = re.sub(r"[^0-9a-z]+", " ", machine.name.lower()).split()
    return "-".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "graphics")) or "gpu"


def with_tables(page: Path) -> str:
    """Returns a page's text with new tables between its markers."""
    text = page.read_text(encoding="utf-8")
    up = "../" * (len(page.relative_to(TOP).parts) - 1)
    for name, table in TABLES.items():
        start, end = f"<!-- table:{name} -->\n", f"<!-- end:{name} -->"
        if start in text:
            head, _, rest = text.partition(start)
            _, _, tail = rest.partition(end)
            text = f"{head}{start}{table().replace('](bench/', f']({up}bench/')}{end}{tail}"
    return text


def gpu_results() -> list[Study]:
    """Returns the results of ``bench.gpu``, newest first, without dry runs."""
    studies = [load(Study, path) for path in RESULTS.glob("*/*.json") if path.parent.name != "host"]
    studies = [study for study in studies if study.study == "gpu" and not study.dry_run]
    return sorted(studies, key=lambda study: study.created, reverse=True)


def gpu_table(part: str, make: Callable[[Study], str]) -> str:
    """Returns a table of the newest result that measured ``part``."""
    for study in gpu_results():
        if any(figure.value is not None for figure in study.of(part)):
            return make(study)
    return gpu_tables.NOT_YET


def sm_targets() -> str:
    """Returns the JSON of ``mosaic/backends/cuda/sm_targets.json``: the newest speed-up by device."""
    speedups = {
        study.machine.name: round(figure.value, 3)
        for study in reversed(gpu_results())
        for figure in study.of("first/products", SM_TARGET_SPEEDUP)
        if study.machine is not None and figure.value is not None
    }
    return json.dumps(speedups, indent=2, sort_keys=True) + "\n"


def demo_table() -> str:
    """Returns the table of the newest demo run on the host."""
    records = {path: load(RunRecord, path) for path in (RESULTS / "host").glob("*-demo.json")}
    if not records:
        return gpu_tables.NOT_YET
    path, record = max(records.items(), key=lambda pair: pair[1].created)
    about = f"{record.machine.name}, torch {record.torch_version}, {record.created[:10]}"
    rows = pages.table((about, "predicted", "measured"), summary_rows(record))
    return f"{rows}\nPredicted: {PREDICTED}. Measured: {MEASURED}.\n" + _picture(path.with_suffix(".png"), "timeline")


def kept_table(study: str, make: Callable[[Study], str]) -> Callable[[], str]:
    """Returns a function that makes the table of a study's newest result."""

    def table() -> str:
        newest = pages.newest_study(study, RESULTS)
        return gpu_tables.NOT_YET if newest is None else make(newest)

    return table


def figures_table(paper: str) -> str:
    """Returns the figures of a paper beside those of our newest results."""
    files = [path for path in sorted(RESULTS.glob("*/*.json")) if not path.name.endswith("-demo.json")]
    return paper_table(read_paper(paper), kept_studies(load(Study, path) for path in files))


def _picture(drawn: Path, says: str) -> str:
    """Returns a line with a result's picture, if any."""
    return f"\n![{says}]({drawn.relative_to(RESULTS.parent.parent).as_posix()})\n" if drawn.exists() else ""


TABLES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "demo": demo_table,
        "methods": pages.methods_table,
        "choices": pages.choices_table,
        "context_methods": pages.context_methods_table,
        **{study: kept_table(study, pages.study_table) for study in pages.HIGHLIGHTS},
        **{f"figures_{paper}": partial(figures_table, paper) for paper in PAPERS},
        "context_balance": kept_table("bench_context", context_tables.balance_table),
        "context_received": kept_table("bench_context", context_tables.received_table),
        "never_slower": kept_table("bench_never_slower", never_slower_table),
        "ddp": kept_table("bench_ddp", ddp_tables.ddp_table),
        "ddp_short": kept_table("bench_ddp", partial(ddp_tables.ddp_table, is_short=True)),
        "sweep": kept_table(sweep_tables.STUDY, sweep_tables.counts_table),
        "sweep_pipeline": kept_table(
            sweep_tables.PIPELINE_STUDY, partial(sweep_tables.counts_table, outcomes=PIPELINE_OUTCOMES)
        ),
        "sweep_operators": kept_table(sweep_tables.OPERATORS_STUDY, sweep_tables.operators_table),
        "pipeline_steps": kept_table("bench_pipeline_measured", measured_table),
        "models": lambda: gpu_table("models", gpu_tables.models_table),
        "overlap": lambda: gpu_table("overlap", gpu_tables.overlap_table),
        "scaling": lambda: gpu_table("scaling", gpu_tables.scaling_table),
        "pool": lambda: gpu_table("pool", gpu_tables.pool_table),
    }
)
"""Tables by name in the markers."""

if __name__ == "__main__":
    main()
