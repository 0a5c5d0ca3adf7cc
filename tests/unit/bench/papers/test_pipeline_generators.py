"""Steps drawn from data sets, and the scenario of rising images."""

from __future__ import annotations

import numpy as np
import pytest

from bench.papers.data_sets import DATA_SETS, IMAGE_MIXTURE, VIDEO_MIXTURE
from bench.papers.generators import Packing, draw_step


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


def test_obelics_has_the_images_and_tokens_of_its_abstract() -> None:
    rng = np.random.default_rng(3)
    drawn = [DATA_SETS["obelics"].draw(rng) for _ in range(4000)]
    assert np.mean([one.images for one in drawn]) == pytest.approx(353 / 141, rel=0.05)
    assert np.mean([one.text_tokens for one in drawn]) == pytest.approx(115e9 / 141e6, rel=0.08)


def test_captions_of_video_are_ordered_as_their_data_sets_are() -> None:
    means = {name: np.median(ratios(name)) for name in VIDEO_MIXTURE}
    assert means["internvid"] < means["mmtrail"]
    assert means["internvid"] < means["sharegpt4video"]


def test_packed_microbatches_fit_and_are_nearly_full() -> None:
    packing = Packing()
    step = draw_step(IMAGE_MIXTURE, num_microbatches=100, seed=1)
    assert packing.max_images == 48
    assert all(packing.fits(one) for one in step)
    filled = [(one.text_tokens + 169 * one.images) / packing.context for one in step]
    assert np.mean(filled) > 0.85
    images = [one.images for one in step]
    assert max(images) > 3 * max(1, min(images))


def test_packed_clips_are_at_most_8_and_16_seconds() -> None:
    step = draw_step({"mmtrail": 1}, num_microbatches=100, seed=1)
    assert max(one.clips for one in step) in range(4, 9)
    assert max(one.video_s for one in step) <= 16
    assert not any(one.images for one in step)


def test_the_same_seed_gives_the_same_step_and_another_one_another() -> None:
    one, same, other = (draw_step(IMAGE_MIXTURE, num_microbatches=5, seed=seed) for seed in (4, 4, 5))
    assert one == same != other
