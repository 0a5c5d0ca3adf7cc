"""Steps of microbatches: samples packed as PipeWeaver packs them (section 8).

The same seed gives the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bench.papers.data_sets import DATA_SETS, DataSample, DataSet

CONTEXT = 8192
"""Tokens of text and images together in a microbatch, as in PipeWeaver."""
IMAGE_TOKENS = 169
"""Of an image; 48 images fill a microbatch."""
MAX_VIDEO_S = 16.0
"""Seconds of all clips."""
MAX_CLIPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Content of one microbatch."""

    text_tokens: int = 0
    """Tokens of text, without those of other modalities."""
    images: int = 0
    audio_s: float = 0.0
    """Seconds of audio."""
    video_s: float = 0.0
    """Seconds of video."""
    clips: int = 0
    """Equally long clips of the video; 0: one, if it has video."""


def draw_step(mixture: Mapping[str, float], *, num_microbatches: int, seed: int) -> tuple[Microbatch, ...]:
    """Returns a step of packed microbatches, filled one after the other.

    1 sample that does not fit waits with images and 4 with video, while later ones are tried: the largest of 100
    microbatches then has 3 to 5 times the operations of the smallest, and 4.15 times in PipeWeaver (section 1).

    Args:
        mixture: For each data set its share of samples, in any unit; video and images are not mixed.
        num_microbatches: How many.
        seed: Of all that is drawn.
    """
    sets, total = [DATA_SETS[name] for name in mixture], sum(mixture.values())
    shares = [share / total for share in mixture.values()]
    max_waiting = 1 if sets[0].seconds is None else 4
    rng = np.random.default_rng(seed)
    samples = _samples(sets, shares, rng)
    waiting: deque[DataSample] = deque()
    return tuple(_packed(waiting, samples, max_waiting) for _ in range(num_microbatches))


def _samples(sets: list[DataSet], shares: list[float], rng: np.random.Generator) -> Iterator[DataSample]:
    while True:
        yield _cut(sets[int(rng.choice(len(sets), p=shares))].draw(rng))


def _cut(sample: DataSample) -> DataSample:
    """Returns a sample that fits by itself: with as many images and as much text and video as there is room for."""
    images = min(sample.images, CONTEXT // IMAGE_TOKENS)
    return DataSample(
        text_tokens=min(sample.text_tokens, CONTEXT - IMAGE_TOKENS * images),
        images=images,
        video_s=min(sample.video_s, MAX_VIDEO_S),
    )


def _fits(packed: Microbatch) -> bool:
    tokens = packed.text_tokens + IMAGE_TOKENS * packed.images
    return tokens <= CONTEXT and packed.video_s <= MAX_VIDEO_S and packed.clips <= MAX_CLIPS


def _packed(waiting: deque[DataSample], samples: Iterator[DataSample], max_waiting: int) -> Microbatch:
    packed = _as_microbatch(waiting.popleft() if waiting else next(samples))
    for sample in list(waiting):
        more = _joined(packed, sample)
        if _fits(more):
            packed = more
            waiting.remove(sample)
    while len(waiting) < max_waiting:
        more = _joined(packed, sample := next(samples))
        if _fits(more):
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
