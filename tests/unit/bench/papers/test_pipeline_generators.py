"""Steps drawn from data sets, and the scenario of rising images."""

from __future__ import annotations

import numpy as np
import pytest

from bench.papers.data_sets import DATA_SETS


def ratios(name: str, count: int = 4000) -> list[float]:
    rng = np.random.default_rng(7)
    drawn = [DATA_SETS[name].draw(rng) for _ in range(count)]
    return [one.text_tokens / (one.images or one.video_s) for one in drawn]


def test_laion_has_16_tokens_an_image_and_obelics_the_range_of_the_paper() -> None:
    assert np.mean(ratios("laion-2b")) == pytest.approx(16.4, rel=0.03)
    obelics = ratios("obelics")
    assert min(obelics) >= 0.4
    assert max(obelics) == 3115
    assert np.quantile(obelics, 0.01) < 30
    assert np.mean([one > 3114 for one in obelics]) < 0.03
