"""Checks the English of README, docs/ and docstrings: ``make lint`` runs it.

A sentence of a page has at most 25 words and none of the banned words below. Code, generated tables and link targets do
not count. A docstring of the product starts with a noun or a verb.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PAGES = (TOP / "README.md", *sorted((TOP / "docs").glob("*.md")))
MAX_WORDS = 25
SOURCES = ("mosaic", "profiler")
QUESTION = re.compile(r'"""(What|Whether|Who|Where|Which|When|How)\b.*')
BANNED = {
    r"(some|no|any)body|whoever": "name the agent",
    r"none that|nothing but|but for": "state what is, not what is not",
    r"(of|for) (it|them)(?=[.:;])": "end with the noun",
    r"(for|in) (each|every) (second|step|minute|GPU|rank|byte),? (one|a|an)": 'write "per"',
    r"on the one hand|in other words|needless to say": "leave it out",
}
"""Patterns, each with its remedy."""
_BREAKS = re.compile(r"\n\s*\n|\n(?=\s*[*#|>-] )|\n(?=\|)|\n(?=\s*\d+\. )")


def main() -> None:
    complaints = [complaint for page in PAGES for complaint in complaints_of(page)]
    for source in (source for folder in SOURCES for source in sorted((TOP / folder).rglob("*.py"))):
        for summary in QUESTION.finditer(source.read_text(encoding="utf-8")):
            complaints.append(f"{source.relative_to(TOP)}: {summary[0][:60]!r}...; begin with a noun or a verb")
    print("\n".join(complaints), file=sys.stderr)
    sys.exit(bool(complaints))


def complaints_of(page: Path) -> Iterator[str]:
    """Yields a line per sentence that is too long, and per banned word."""
    for sentence in sentences(page.read_text(encoding="utf-8")):
        begin = f"{page.relative_to(TOP)}: {sentence[:60]!r}..."
        num_words = len(re.findall(r"[\w'-]+", sentence))
        if num_words > MAX_WORDS:
            yield f"{begin} has {num_words} words; write at most {MAX_WORDS} a sentence"
        for pattern, remedy in BANNED.items():
            if word := re.search(rf"\b(?:{pattern})(?=\W|$)", sentence, re.IGNORECASE):
                yield f"{begin} has {word[0]!r}; {remedy}"


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a page in Markdown; a cell of a table is a sentence."""
    text = re.sub(r"```.*?```|<!-- table:.*?<!-- end:[^>]*-->|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    for block in _BREAKS.split(text):
        for cell in block.strip().strip("|").split("|") if block.startswith("|") else [block]:
            yield from (sentence for part in re.split(r"(?<=[.!?:;])\s+", cell) if (sentence := " ".join(part.split())))


if __name__ == "__main__":
    main()
