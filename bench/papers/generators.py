"""Steps of microbatches: samples packed as PipeWeaver packs them (section 8).

The same seed gives the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bench.papers.data_sets import DATA_SETS, DataSample, DataSet
from mosaic.pipelining.layers import Microbatch

MAX_CLIPS = 8
"""In a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The limits of a microbatch; PipeWeaver's by default."""

    context: int = 8192
    """Tokens of text and images together."""
    image_tokens: int = 169
    """Of an image."""
    max_video_s: float = 16.0
    """Seconds of all clips."""
    max_clips: int = MAX_CLIPS
    """Clips."""
    max_waiting: int = 1
    """Samples that do not fit and wait for the next microbatch, while later ones are tried; 1 ends a microbatch with
    the first that does not fit."""

    @property
    def max_images(self) -> int:
        """Images that fill a microbatch: 48 in PipeWeaver."""
        return self.context // self.image_tokens

    def fits(self, packed: Microbatch) -> bool:
        """Returns whether it is not too much."""
        tokens = packed.text_tokens + self.image_tokens * packed.images
        return (
            tokens <= self.context
            and packed.video_s <= self.max_video_s
            and (packed.clips or int(packed.video_s > 0)) <= self.max_clips
        )

    def cut(self, sample: DataSample) -> DataSample:
        """Returns a sample that fits by itself: with as many images and as much text and video as there is room for."""
        images = min(sample.images, self.max_images)
        room = self.context - self.image_tokens * images
        return DataSample(
            text_tokens=min(sample.text_tokens, room), images=images, video_s=min(sample.video_s, self.max_video_s)
        )


def draw_step(
    mixture: Mapping[str, float], *, num_microbatches: int, seed: int, packing: Packing | None = None
) -> tuple[Microbatch, ...]:
    """Returns a step of packed microbatches, filled one after the other.

    By default 1 sample waits with images and 4 with video: the largest of 100 microbatches then has 3 to 5 times the
    operations of the smallest, and 4.15 times in PipeWeaver (section 1).

    Args:
        mixture: For each data set its share of samples, in any unit; video and images are not mixed.
        num_microbatches: How many.
        seed: Of all that is drawn.
        packing: What fits into one; PipeWeaver's by default.
    """
    sets, total = [DATA_SETS[name] for name in mixture], sum(mixture.values())
    shares = [share / total for share in mixture.values()]
    packing = packing or Packing(max_waiting=1 if sets[0].seconds is None else 4)
    rng = np.random.default_rng(seed)
    samples = _samples(sets, shares, packing, rng)
    waiting: deque[DataSample] = deque()
    return tuple(_packed(waiting, samples, packing) for _ in range(num_microbatches))


def _samples(
    sets: list[DataSet], shares: list[float], packing: Packing, rng: np.random.Generator
) -> Iterator[DataSample]:
    while True:
        yield packing.cut(sets[int(rng.choice(len(sets), p=shares))].draw(rng))


def _packed(waiting: deque[DataSample], samples: Iterator[DataSample], packing: Packing) -> Microbatch:
    packed = _as_microbatch(waiting.popleft() if waiting else next(samples))
    for sample in list(waiting):
        more = _joined(packed, sample)
        if packing.fits(more):
            packed = more
            waiting.remove(sample)
    while len(waiting) < packing.max_waiting:
        more = _joined(packed, sample := next(samples))
        if packing.fits(more):
            packed = more
        else:
            waiting.append(sample)
    return packed


def _as_microbatch(sample: DataSample) -> Microbatch:
    return Microbatch(
        text_tokens=sample.text_tokens,
        images=sample.images,
        video_s=sample.video_s,
        clips=1 if sample.video_s else 0,
    )


def _joined(packed: Microbatch, sample: DataSample) -> Microbatch:
    return Microbatch(
        text_tokens=packed.text_tokens + sample.text_tokens,
        images=packed.images + sample.images,
        video_s=packed.video_s + sample.video_s,
        clips=packed.clips + (1 if sample.video_s else 0),
    )
