"""Steps of microbatches: samples packed as PipeWeaver packs them (section 8), and its scenario of rising images (8.1).

The same seed gives the same steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bench.papers.data_sets import DATA_SETS, DataSample, DataSet
from mosaic.pipelining.workload.microbatch import Microbatch

MAX_CLIPS = 8
"""In a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What fits into a microbatch.

    Raises:
        ValueError: A limit is below what one sample needs.
    """

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

    def __post_init__(self) -> None:
        if not 1 <= self.image_tokens < self.context:
            raise ValueError(
                f"image_tokens={self.image_tokens} of context={self.context}; an image fits into a context"
            )
        if not (0 < self.max_video_s < math.inf and self.max_clips >= 1):
            raise ValueError(f"max_video_s={self.max_video_s}, max_clips={self.max_clips}; at least one clip fits")
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting}; use 1 or more")

    @property
    def max_images(self) -> int:
        """Images that fill a microbatch: 48 in PipeWeaver."""
        return self.context // self.image_tokens

    def fits(self, packed: Microbatch) -> bool:
        """Returns whether it is not too much."""
        tokens = packed.text_tokens + self.image_tokens * packed.images
        return tokens <= self.context and packed.video_s <= self.max_video_s and packed.num_clips <= self.max_clips

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

    Raises:
        ValueError: An unknown data set, a share that is negative or not finite, no share at all, images mixed with
            video, or no microbatch.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}; a step has at least one")
    sets, shares = _checked(mixture)
    packing = packing or Packing(max_waiting=1 if sets[0].seconds is None else 4)
    rng = np.random.default_rng(seed)
    samples = _samples(sets, shares, packing, rng)
    waiting: deque[DataSample] = deque()
    return tuple(_packed(waiting, samples, packing) for _ in range(num_microbatches))


def image_bounds(iteration: int) -> tuple[float, float]:
    """Returns the least and the most images of a microbatch in iteration 1 to 40 of the rise-and-fall scenario.

    Twice: in iterations 1 to 5 the lower bound rises from 0 towards 16 under an upper one of 32, in 6 to 20 both fall
    to 0, in equal steps. The mean is then highest, 22.4, in iterations 5 and 6; the paper says 22.

    Raises:
        ValueError: There is no such iteration.
    """
    if not 1 <= iteration <= 40:
        raise ValueError(f"iteration={iteration}; the scenario has 1 to 40")
    place = (iteration - 1) % 20 + 1
    if place <= 5:
        return 16 * (place - 1) / 5, 32.0
    left = (20 - place) / 15
    return 16 * left, 32 * left


def rise_and_fall(
    *, num_microbatches: int, seed: int, packing: Packing | None = None
) -> tuple[tuple[Microbatch, ...], ...]:
    """Returns the 40 steps of PipeWeaver's dynamic workload: images evenly between the bounds, the rest is text.

    Raises:
        ValueError: No microbatch, or a context too short for 32 images.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}; a step has at least one")
    packing = packing or Packing()
    if packing.max_images < 32:
        raise ValueError(f"a context of {packing.context} has room for {packing.max_images} images; it needs 32")
    rng = np.random.default_rng(seed)
    steps = []
    for iteration in range(1, 41):
        least, most = (round(bound) for bound in image_bounds(iteration))
        images = [int(one) for one in rng.integers(least, most, size=num_microbatches, endpoint=True)]
        steps.append(
            tuple(
                Microbatch(text_tokens=packing.context - packing.image_tokens * count, images=count) for count in images
            )
        )
    return tuple(steps)


def _checked(mixture: Mapping[str, float]) -> tuple[list[DataSet], list[float]]:
    for name, share in mixture.items():
        if name not in DATA_SETS:
            raise ValueError(f"no data set is named {name!r}; there are {', '.join(DATA_SETS)}")
        if not 0 <= share < math.inf:  # also catches NaN
            raise ValueError(f"share {share} of {name!r}; use a finite number, 0 or more")
    total = sum(mixture.values())
    if not total:
        raise ValueError("a mixture without any data set; give at least one a share above 0")
    sets = [DATA_SETS[name] for name, share in mixture.items() if share]
    if len({one.seconds is None for one in sets}) > 1:
        raise ValueError(f"{', '.join(mixture)} mix images with video; a microbatch has one of them")
    return sets, [share / total for share in mixture.values() if share]


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
