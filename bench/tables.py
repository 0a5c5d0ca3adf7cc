"""Writes the README's tables from the newest result files, so that no number is typed by hand.

``python -m bench.tables [--check]``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mosaic.artifact import load, write_text
from mosaic.demo.record import RunRecord

TOP = Path(__file__).resolve().parent.parent
RESULTS = TOP / "bench" / "results"
README = TOP / "README.md"


def main() -> None:
    """Rewrites the tables, or says whether they are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    given = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    after = with_tables(before)
    if given.check:
        sys.exit(before != after)
    write_text(after, README)


def with_tables(readme: str) -> str:
    """Returns the README's text with its tables made anew."""
    start, end = "<!-- table:demo -->\n", "<!-- end:demo -->"
    head, _, rest = readme.partition(start)
    _, _, tail = rest.partition(end)
    return f"{head}{start}{demo_table()}{end}{tail}"


def demo_table() -> str:
    """Returns the table of the newest demo run on the host."""
    records = [load(RunRecord, path) for path in (RESULTS / "host").glob("*-demo.json")]
    if not records:
        return "not measured yet\n"
    record = max(records, key=lambda found: found.created)
    equal = "yes" if record.bitwise_equal else f"NO, by {record.max_abs_difference:.3g}"
    best = ", ".join(f"{name} {value:.2f}" for name, value in record.retrieval.items())
    rounds = sorted(record.round_speedups)
    foreign = "unknown" if record.foreign_cpu_share is None else f"{record.foreign_cpu_share:.0%}"
    rows = [
        ("measured on the CPU", f"{record.machine.name}, torch {record.torch_version}, {record.created[:10]}"),
        (f"plain and colocated equal bit for bit after {record.equality_steps} steps", equal),
        ("step of the plain loop at its best", f"{record.step_ms_plain:.1f} ms"),
        ("step of the colocated loop", f"{record.step_ms_colocated:.1f} ms"),
        ("speed-up, median of rounds (least to most)", f"{record.speedup:.2f} ({rounds[0]:.2f} to {rounds[-1]:.2f})"),
        ("lane time with another lane busy", f"{record.overlap:.0%}"),
        (f"retrieval R@1 after {record.train_steps} steps, chance {record.chance:.3f}", best),
        ("CPU taken by other processes meanwhile", foreign),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]]) + "\n"


if __name__ == "__main__":
    main()
