"""HTML elements: all text is escaped except ``Markup``, so names from outside cannot inject HTML."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable

QUOTE = '"'
_VOID = frozenset(("meta", "link"))
_SHAPES = frozenset(("circle", "line", "path", "rect"))
_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
MAX_NAME = 64
"""Most bytes of a name on the page."""
MAX_SENTENCE = 450
"""Most bytes of a sentence on the page."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
"""Child of an element; plain text is escaped, None is left out."""


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Returns an element.

    Args:
        tag: Its name.
        *children: Children.
        **attributes: ``class_`` becomes ``class``, ``aria_label`` becomes ``aria-label``; None is left out.
    """
    attribute_text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value)).replace(QUOTE, "&quot;")}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{attribute_text}>")
    if not children and tag in _SHAPES:
        return Markup(f"<{tag}{attribute_text}/>")
    return Markup(f"<{tag}{attribute_text}>{join(children)}</{tag}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Joins children; escapes plain text."""
    return Markup(escape(between).join(escape(child) for child in children if child is not None))


def escape(text: str) -> str:
    """Returns text for an element or an attribute; characters that no page may hold, or that turn it, become ``�``."""
    if isinstance(text, Markup):
        return text
    return html.escape("".join("\ufffd" if _is_hostile(letter) else letter for letter in text), quote=False)


def _is_hostile(letter: str) -> bool:
    # Controls, lone surrogates and unassigned ones; and formats that turn the direction of what follows them.
    return (unicodedata.category(letter) in ("Cc", "Cs", "Cn") and letter not in "\n\t") or letter in _TURNING


def shorten(text: str, limit: int = MAX_NAME) -> str:
    """Returns text, shortened with an ellipsis to ``limit`` bytes of the page."""
    size = 0
    for place, letter in enumerate(text):
        size += len(escape(letter).encode())
        if size > limit:
            return text[:place].rstrip() + "…"
    return text


def brief(text: str) -> str:
    """Returns the shortened name of a day or a version."""
    return shorten(text, 16)


def table(caption: str, headings: Iterable[Child], rows: Iterable[Markup], *, class_: str | None = None) -> Markup:
    """Returns a table whose caption is for those who do not see it; ``rows`` come from ``row``.

    The roles are said because a narrow page lays rows out as blocks, and browsers then forget what they are.
    """
    head = (element("th", heading, scope="col", role="columnheader") for heading in headings)
    return element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *rows, role="rowgroup"),
        class_=class_,
        role="table",
    )


def row(name: Markup, *cells: Markup, class_: str | None = None) -> Markup:
    """Returns a table's row: its name, and its cells as ``cell`` makes them."""
    return element("tr", element("th", name, scope="row", role="rowheader"), *cells, class_=class_, role="row")


def cell(*children: Child, class_: str | None = None) -> Markup:
    """Returns a table's cell."""
    return element("td", *children, class_=class_, role="cell")


def with_note(text: Child, note: Child) -> Markup:
    """Returns a line and a smaller one below it."""
    return join((text, element("small", note)))


def section(key: str, heading: str, *children: Child) -> Markup:
    """Returns a part of the page with its heading; empty if nothing stands in it."""
    if not any(children):
        return Markup("")
    return element("section", element("h2", heading, id=key), *children, aria_labelledby=key)


def folded(summary: str, *children: Child) -> Markup:
    """Returns a folded part, which is open on paper."""
    return element("details", element("summary", summary), *children)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Returns a list of terms and descriptions; empty descriptions are left out."""
    shown = [
        element("div", element("dt", term), element("dd", description)) for term, description in pairs if description
    ]
    return element("dl", *shown) if shown else Markup("")
