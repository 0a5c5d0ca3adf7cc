import pytest

from bench import tables
from bench.record import Study
from mosaic import artifact


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_newest_results(page):
    assert page.read_text(encoding="utf-8") == tables.with_tables(page), "run: python -m bench.tables"


def test_every_kept_result_can_be_read():
    kept = sorted(tables.RESULTS.rglob("*.json"))
    for path in kept:
        if not path.name.endswith("-demo.json"):
            assert artifact.load(Study, path).commit, path
