"""The look of all tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Column = tuple[str, bool]
"""Heading, and True for numbers, which are right-justified and never broken."""


def make_table(
    title: str, columns: Sequence[Column], rows: Iterable[Sequence[str]], *, caption: str = "", bold: Sequence[int] = ()
) -> Table:
    """Returns a table; cells are text without markup, for names such as ``layers[0]``."""
    table = empty_table(title, caption, columns)
    for index, cells in enumerate(rows):
        table.add_row(*plain(cells, "bold" if index in bold else ""))
    return table


def empty_table(title: str, caption: str, columns: Sequence[Column]) -> Table:
    """Returns a table without rows; titles and captions hold no markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        caption=Text(caption + "\n") if caption else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def plain(cells: Iterable[str], style: str = "") -> list[Text]:
    """Returns cells without markup."""
    from rich.text import Text

    return [Text(cell, style=style) for cell in cells]
