"""Lines and budget of each part of the repository: ``python -m bench.sizes [--write]`` (``make sizes``).

Counts the lines of code files that git tracks: Python, stubs and C++.
"""

from __future__ import annotations

import argparse
import subprocess
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PAGE = TOP / ".github" / "CONTRIBUTING.md"
START, END = "<!-- table:sizes -->\n", "<!-- end:sizes -->"
SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".cu")
OUTSIDE_OF_THE_PRODUCT = ("C++", "tests", "bench")
Row = tuple[str, int, int]
"""A part's name, its lines and its budget."""


def main() -> None:
    """Prints the table, or writes it to CONTRIBUTING."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(TOP)}")
    is_written = parser.parse_args().write
    table = sizes_table(sizes())
    print(table, end="")
    if is_written:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        PAGE.write_text(f"{head}{START}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def sizes() -> list[Row]:
    """Returns a row per part, and one for the whole product before C++, tests and bench."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, text=True, check=True).stdout
    lines = {
        name: (TOP / name).read_bytes().count(b"\n")
        for name in listed.split("\0")
        if name.endswith(SUFFIXES) and (TOP / name).exists()
    }
    parts = tomllib.loads((TOP / "bench" / "sizes.toml").read_text(encoding="utf-8"))["part"]
    counts = [sum(lines[name] for name in lines if is_part_of(name, part)) for part in parts]
    rows = [(part["name"], count, part["budget"]) for part, count in zip(parts, counts, strict=True)]
    product = [row for row in rows if row[0] not in OUTSIDE_OF_THE_PRODUCT]
    total = ("Python of the product", sum(row[1] for row in product), sum(row[2] for row in product))
    return [*product, total, *(row for row in rows if row[0] in OUTSIDE_OF_THE_PRODUCT)]


def is_part_of(name: str, part: dict[str, list[str]]) -> bool:
    """Returns True if a file is in a part's folders; ``"mosaic/*/"`` in ``without`` excludes all subfolders."""
    inside = any(name.startswith(f"{folder}/") for folder in part["folders"])
    left_out = any(
        name.count("/") > 1 if folder.endswith("*/") else name.startswith(f"{folder}/")
        for folder in part.get("without", ())
    )
    return inside and not left_out


def sizes_table(rows: list[Row]) -> str:
    """Returns a Markdown table."""
    body = "".join(f"| {name} | {count:,} | {budget:,} | {count / budget:.0%} |\n" for name, count, budget in rows)
    return f"| part | lines | budget | used |\n| --- | ---: | ---: | ---: |\n{body}"


if __name__ == "__main__":
    main()
