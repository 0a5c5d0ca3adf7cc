"""The check of the pages' English names long sentences and banned words, and skips code and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import prose

LONG = " ".join(["word"] * 26)


def test_long_sentences_and_banned_words_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prose, "TOP", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"Short. {LONG}.\n\n* Nobody reads it.\n\n```\n{LONG}\n```\n| `{LONG}` | fine |\n")
    long, banned = prose.complaints_of(page)
    assert "has 26 words" in long
    assert "'Nobody'; name the agent" in banned
