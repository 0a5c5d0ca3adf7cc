"""The look of all tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Column = tuple[str, bool]
"""Heading, and True for numbers, which are right-justified and never broken."""


def empty_table(title: str, caption: str, columns: Sequence[Column], *, least: Sequence[int] = ()) -> Table:
    """Returns a table without rows.

    Args:
        title: Text above the table.
        caption: Text below the table.
        columns: From left to right.
        least: Least width of each column; by default from the terminal.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        caption=Text(caption + "\n"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for index, (heading, numeric) in enumerate(columns):
        table.add_column(
            heading,
            justify="right" if numeric else "left",
            min_width=least[index] if least and not numeric else None,
            no_wrap=numeric,
            overflow="fold",
        )
    return table


def plain(cells: Iterable[str], style: str = "") -> list[Text]:
    """Returns cells without markup, for names such as ``layers[0]``."""
    from rich.text import Text

    return [Text(cell, style=style) for cell in cells]
