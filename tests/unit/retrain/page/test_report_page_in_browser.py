"""The morning's page in a real browser: no error, no request, no sideways scrolling, text that can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import day_reports
import pytest
from chromium import NAMES, Chromium, find_chromium

from mosaic.retrain.page import write_page

# Opens all that is folded; returns texts whose contrast with what lies behind them is below WCAG's AA.
FAINT_TEXTS = """(() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = color => parts(color).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = one => {
    for (; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node; node = texts.nextNode();) {
    const one = node.parentElement;
    if (!node.data.trim()) continue;
    const [dark, light] = [luminance(getComputedStyle(one).color), luminance(ground(one))].sort((a, b) => a - b);
    if ((light + 0.05) / (dark + 0.05) < 4.5) found.push(node.data);
  }
  return found;
})()"""
REPORTS = {**day_reports.BY_NAME, "hostile": day_reports.hostile()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} is on the PATH (Debian: apt-get install chromium)")
    with Chromium(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_page_opens_without_error_request_or_overflow(browser: Chromium, tmp_path: Path, width: int, dark: bool):
    for name, report in REPORTS.items():
        page = tmp_path / f"{name}.html"
        write_page(report, page)
        seen = browser.look(page, width=width, dark=dark, question=FAINT_TEXTS)
        assert seen.errors == (), name
        assert seen.requests == (page.as_uri(),), name
        assert seen.width <= width, name
        assert seen.answer == [], name


def test_the_browser_itself_holds_the_page_to_no_script_and_no_request(browser: Chromium, tmp_path: Path):
    page = tmp_path / "report.html"
    write_page(day_reports.PROMOTED, page)
    intruder = "<script>document.title='taken'</script><img src='http://127.0.0.1:9/x'></main>"
    page.write_text(page.read_text().replace("</main>", intruder))
    seen = browser.look(page, width=360, dark=False, question="document.title")
    assert seen.answer.startswith("PROMOTED")
    assert any("Content Security Policy" in error for error in seen.errors)


def test_dark_and_light_differ(browser: Chromium, tmp_path: Path):
    page = tmp_path / "report.html"
    write_page(day_reports.PROMOTED, page)
    question = "getComputedStyle(document.body).backgroundColor"
    light, dark = (browser.look(page, width=360, dark=dark, question=question).answer for dark in (False, True))
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(22, 24, 27)")
