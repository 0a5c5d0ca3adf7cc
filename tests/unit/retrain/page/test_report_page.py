"""The morning's page: what it says of each day, and that nothing in a report can break it."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import day_reports
import pytest
from day_reports import BY_NAME, NOTHING, PROMOTED, QUARANTINED, REFUSED, comparison, gate

from mosaic.artifact import load, save
from mosaic.errors import MosaicError
from mosaic.retrain.page import page_of, write_page
from mosaic.retrain.page.colors import HUES, variables
from mosaic.retrain.page.data import MAX_SOURCES
from mosaic.retrain.page.intervals import MAX_ROWS
from mosaic.retrain.records import HEADLINES, DayReport, SourceRows, Usual

VOID = {"meta", "link"}
MAX_PAGE_BYTES = 100_000


class Reader(HTMLParser):
    """Holds a page to one tree of known elements; keeps its text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def values_of(self, attribute: str) -> list[str]:
        return [str(given[attribute]) for _, given in self.elements if attribute in given]


def text_of(report: DayReport) -> str:
    return Reader(page_of(report)).text


ALL = {**BY_NAME, "hostile": day_reports.hostile()}


@pytest.mark.parametrize("report", ALL.values(), ids=ALL.keys())
def test_a_page_is_one_tree_that_asks_for_nothing(report: DayReport):
    page = page_of(report)
    read = Reader(page)
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "img", "iframe", "object", "form", "base"})
    assert all(link.startswith("#") or link == "data:," for link in read.values_of("href"))
    assert not any(name.startswith("on") or name in ("src", "style") for _, given in read.elements for name in given)
    sheet = page.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import|expression", sheet)
    ids = read.values_of("id")
    assert len(set(ids)) == len(ids)
    assert set(read.values_of("aria-labelledby")) <= set(ids)
    assert {link[1:] for link in read.values_of("href") if link.startswith("#")} <= set(ids)


@pytest.mark.parametrize("report", ALL.values(), ids=ALL.keys())
def test_headings_and_tables_can_be_followed_without_seeing_them(report: DayReport):
    read = Reader(page_of(report))
    tags = [tag for tag, _ in read.elements]
    assert (tags.count("h1"), tags.count("main"), tags.count("title")) == (1, 1, 1)
    assert tags.count("table") == tags.count("caption")
    assert all(given.get("scope") in ("col", "row") for tag, given in read.elements if tag == "th")
    outer = [given for tag, given in read.elements if tag == "svg" and "height" in given]
    assert all(given.get("aria-hidden") == "true" for given in outer)
    assert all("aria-label" in given for tag, given in read.elements if tag == "figure")


@pytest.mark.parametrize("outcome", day_reports.OUTCOMES)
def test_the_page_begins_with_the_headline_why_and_what_to_do(outcome: str):
    report = BY_NAME[outcome]
    words = text_of(report)
    begun = words[: words.index("Thirty days")]
    assert HEADLINES[report.outcome] in begun
    assert report.reason in begun
    assert (f"To do: {report.todo}" if report.todo else "Nothing to do.") in " ".join(begun.split())
    assert begun.index(HEADLINES[report.outcome]) < begun.index(report.reason)


def test_a_day_without_champion_gate_run_and_history_has_a_page():
    words = text_of(replace(NOTHING, champion=None))
    assert "This is the first day." in words
    assert "Nothing was trained." in words
    assert "Champion none" in words


def test_every_comparison_has_its_numbers_and_its_limit_in_words():
    words = text_of(PROMOTED)
    assert "frozen against 0041, 2,000 rows 0.912 → 0.916 +0.004 −0.002 to +0.010 ✓ passes limit −0.010" in words
    assert "anchor against 0012" in words
    assert "site=harbour against 0041, 60 rows 0.912 → 0.892 −0.020 −0.160 to +0.120 ○ shown only" in words
    assert "2,000 rows in 140 clusters) with a chance of 93 %" in words


def plots(page: str) -> list[str]:
    return re.findall(r'<td class="plot"[^>]*>(.*?)</td>', page)


def test_the_interval_of_a_failed_comparison_is_drawn_left_of_its_limit():
    for name, difference in (("promoted", 0.004), ("refused", -0.05)):
        found = gate(comparison("frozen", difference))
        (drawn,) = plots(page_of(replace(BY_NAME[name], gate=found, usual=())))
        limit, middle = (
            float(re.search(pattern, drawn).group(1))  # type: ignore[union-attr]
            for pattern in (r'<line x1="([\d.]+)%"[^>]*class="limit"', r'<circle cx="([\d.]+)%"')
        )
        assert (middle > limit) == (difference > -0.01)


def test_an_interval_beyond_the_picture_ends_in_an_arrow():
    far = gate(comparison("frozen", 0.0), comparison("anchor", -0.6))
    inside, beyond = plots(page_of(replace(REFUSED, gate=far, usual=())))
    assert ("<circle" in inside, "<path" in inside) == (True, False)
    assert ("<circle" in beyond, "<path" in beyond) == (False, True)


def test_failed_slices_come_first_and_those_that_passed_are_folded():
    page = page_of(REFUSED)
    opened, _, folded = page.partition("<details>")
    assert opened.count("✕ fails") == 11
    assert opened.count("✓ passes") == 1
    assert "31 more slices passed" in folded
    assert folded.count("✓ passes") == 31


def test_more_slices_than_the_page_shows_are_counted():
    slices = (comparison(f"site={index:03d}", -0.2) for index in range(MAX_ROWS + 5))
    words = text_of(replace(REFUSED, gate=gate(comparison("frozen", 0.0), *slices)))
    assert words.count("✕ fails") == MAX_ROWS
    assert "5 slices more in report.json." in words


def test_each_day_is_a_letter_with_its_date_and_outcome_in_words():
    read = Reader(page_of(REFUSED))
    titles = read.values_of("title")
    assert len(titles) == 30
    assert titles[-1].startswith("2026-11-22: refused by the gate, fresh 0.88")
    assert any(title.endswith(": no run") for title in titles)
    assert "refused by the gate" in read.text


def test_a_day_without_a_fresh_score_leaves_a_gap():
    def segments(history: tuple[day_reports.DaySquare, ...]) -> int:
        chart = re.search(r'<div class="chart">(.*?)</div>', page_of(replace(PROMOTED, history=history)))
        return chart.group(1).count("<line") if chart else 0

    full = tuple(replace(one, fresh=0.9) for one in PROMOTED.history)
    assert segments(full) == 29
    assert segments((*full[:10], replace(full[10], fresh=None), *full[11:])) == 27
    assert segments(full[:1]) == 0


def test_rejected_rows_have_their_reasons_and_unusual_figures_are_not_folded():
    assert "rejected: truncated JPEG: 12; no label: 3" in text_of(PROMOTED)
    opened = page_of(REFUSED).partition('id="data"')[2].partition("</section>")[0].rpartition("<details>")[0]
    assert "✕ unusual" in opened
    assert "✓ as usual" not in opened


@pytest.mark.parametrize(
    ("today", "low", "high", "unusual"),
    [(1, 0, 2, False), (3, 0, 2, True), (-1, 0, None, True), (9, 0, None, False), (3, None, 2, True)],
)
def test_a_figure_is_unusual_beyond_its_range(today: float, low: float | None, high: float | None, unusual: bool):
    one = Usual(name="rows", today=today, usual=1, low=low, high=high)
    assert ("✕ unusual" in text_of(replace(PROMOTED, usual=(one,)))) == unusual


def test_sources_beyond_the_first_are_added_up():
    sources = tuple(SourceRows(name=f"day {n}", rows=100, drawn=10, rejected={"torn": 1}) for n in range(60))
    words = text_of(replace(PROMOTED, data=sources))
    assert f"{60 - MAX_SOURCES} more sources {100 * (60 - MAX_SOURCES):,} {10 * (60 - MAX_SOURCES)}" in words
    assert f" {60 - MAX_SOURCES} Figure" in words


def test_what_passed_keeps_its_sentence_behind_its_name():
    folded = page_of(PROMOTED).partition('id="data"')[0]
    assert "As it has to be: finite, export, latency</summary>" in folded
    assert "4.1 ms a batch of 1; the budget is 5 ms." in folded


def test_a_quarantined_day_says_which_rule_its_data_broke():
    words = text_of(QUARANTINED)
    assert "✕ champion's error : 0.48 on today's rows; 0.18 is allowed." in words
    assert "Nothing was trained." in words


def test_the_run_says_its_window_bits_restarts_plan_and_speed():
    words = text_of(PROMOTED)
    assert "2026-11-22 01:00 UTC to 03:12 UTC, 2 h 12 min; it had until 05:30 UTC" in words
    assert "Bit-identical to an undisturbed run" in words
    assert "01:44 UTC: killed (SIGKILL), went on from step 4,100" in words
    assert "vision on 10 slots beside audio on 6 slots" in words
    assert "1.32× the plain loop" in words
    words = text_of(REFUSED)
    assert "May differ from an undisturbed run from step 8,120: it went on with 2 ranks where 4 had been" in words
    assert "11, the last 02:11 UTC: SIGTERM" in words
    assert "the number of ranks changed from 4 to 2" in words
    assert "new: imu.encoder (12 tensors)" in words


def test_versions_digests_undo_and_messages_are_there():
    words = text_of(PROMOTED)
    assert "Undo mosaic retrain rollback /srv/shop-assistant" in words
    assert all(digest in words for digest in PROMOTED.digests.values())
    assert REFUSED.messages[0] in text_of(REFUSED)
    assert "Undo" not in text_of(REFUSED)


def test_thirty_days_and_forty_slices_take_less_than_a_hundred_kilobytes():
    assert len(PROMOTED.history) == 30
    assert len([one for one in REFUSED.gate.comparisons if "=" in one.name]) == 40  # type: ignore[union-attr]
    assert len(page_of(REFUSED).encode()) < MAX_PAGE_BYTES


@pytest.mark.parametrize("letter", ["<", "&", '"', "x", "\U0001f600", "\x00"])
def test_no_report_makes_a_page_larger_than_that(letter: str):
    assert len(page_of(day_reports.hostile(letter=letter)).encode()) < MAX_PAGE_BYTES


def test_hostile_names_are_shown_as_text():
    page = page_of(day_reports.hostile())
    assert html.escape("<script>alert(1)</script>") in page
    assert not set("\x00\u202e\ud800") & set(page)
    assert "Traceback" not in page


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(dark: bool):
    colors = variables(dark=dark)
    texts = ("ink", "faint", "bad", *HUES)
    for text, ground in product(texts, ("paper",)):
        assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    for ground in ("panel", "bad-wash"):
        assert contrast(colors["ink"], colors[ground]) >= 4.5
    assert contrast(colors["bad"], colors["bad-wash"]) >= 4.5
    assert contrast(colors["faint"], colors["panel"]) >= 4.5
    for outcome in HUES:
        assert contrast(colors[f"{outcome}-letter"], colors[f"{outcome}-square"]) >= 4.5, outcome
    for mark, ground in product(("mark", "bad", "ink", "faint"), ("paper", "wash")):
        assert contrast(colors[mark], colors[ground]) >= 3, (mark, ground)


def contrast(first: str, second: str) -> float:
    """WCAG 2's contrast of two colours."""

    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_the_page_of_a_report_that_was_read_back_is_the_same(tmp_path: Path):
    save(REFUSED, tmp_path / "report.json")
    assert page_of(load(DayReport, tmp_path / "report.json")) == page_of(REFUSED)


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path):
    write_page(PROMOTED, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page_of(PROMOTED)
    (tmp_path / "file").write_text("")
    with pytest.raises(MosaicError, match="cannot write"):
        write_page(PROMOTED, tmp_path / "file" / "report.html")
