"""Random samples like the data sets of PipeWeaver's Fig. 3, of which the text has few numbers.

Text tokens beside an image or a second of video are lognormal here: positive, with a long tail, as the figure shows
them. The means are the data sets' own or PipeWeaver's where a source is named; spreads (of the logarithm) are assumed:

* OBELICS: 141 million documents with 353 million images and 115 billion tokens (arXiv 2306.16527): 2.5 images a
  document, geometric and at most 30, its filter, and 816 tokens, spread 1.0. Tokens an image are cut to PipeWeaver's
  range, 0.4 to 3,115; one document in 100 is cut from above.
* LAION-2B: 16.4 tokens an image (PipeWeaver), spread 0.6; one image a sample, and at most CLIP's 77 tokens.
* ScienceQA: question, choices, hint, lecture and solution of a school book's exercise beside one image; 180 tokens are
  assumed, spread 0.7.
* InternVid: 760,000 hours in 234 million clips with 4.1 billion words (arXiv 2307.06942): 11.7 s a clip and 17.5 words,
  at 1.3 tokens a word; spreads 0.7 and 0.4.
* ShareGPT4Video: captions of 270 words for clips of 26 s (assumed); spreads 0.4 and 0.8.
* MMTrail: 94 million seconds in 21 million clips (arXiv 2407.20962, section 3): 4.5 s; captions of 80 words (assumed);
  spreads 0.7 and 0.4.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Content of one microbatch."""

    text_tokens: int = 0
    """Tokens of text, without those of other modalities."""
    images: int = 0
    audio_s: float = 0.0
    video_s: float = 0.0
    clips: int = 0
    """Equally long clips of the video; 0: one, if it has video."""


TOKENS_PER_WORD = 1.3
"""Of English text."""
MAX_IMAGES = 30
"""In a document of OBELICS."""
MAX_VIDEO_S = 16.0
"""Seconds of all clips of a microbatch, as of any clip of PipeWeaver's."""
Draw = Callable[[np.random.Generator], Microbatch]


def _lognormal(rng: np.random.Generator, mean: float, spread: float, least: float, most: float) -> float:
    """Draws a number whose logarithm is normal, with this mean before it is cut to a range."""
    return min(most, max(least, float(rng.lognormal(math.log(mean) - spread**2 / 2, spread))))


def _documents(rng: np.random.Generator) -> Microbatch:
    tokens = _lognormal(rng, 816, 1.0, 4, 8192)
    images = min(MAX_IMAGES, int(rng.geometric(1 / 2.5)))
    return Microbatch(text_tokens=max(1, round(min(3115 * images, max(0.4 * images, tokens)))), images=images)


def _images(mean: float, spread: float, least: float, most: float) -> Draw:
    return lambda rng: Microbatch(text_tokens=round(_lognormal(rng, mean, spread, least, most)), images=1)


def _clips(words: float, spread: float, seconds: float, spread_of_seconds: float) -> Draw:
    def draw(rng: np.random.Generator) -> Microbatch:
        tokens = round(_lognormal(rng, words * TOKENS_PER_WORD, spread, 1, 2048))
        video_s = round(_lognormal(rng, seconds, spread_of_seconds, 1.0, MAX_VIDEO_S), 2)
        return Microbatch(text_tokens=tokens, video_s=video_s, clips=1)

    return draw


DATA_SETS: Mapping[str, Draw] = MappingProxyType(
    {
        "obelics": _documents,
        "laion-2b": _images(16.4, 0.6, 1, 77),
        "scienceqa": _images(180, 0.7, 8, 1024),
        "sharegpt4video": _clips(270, 0.4, 26.0, 0.8),
        "internvid": _clips(17.5, 0.4, 11.7, 0.7),
        "mmtrail": _clips(80, 0.4, 4.5, 0.7),
    }
)
"""Sampling functions by data set."""

IMAGE_MIXTURE: Mapping[str, float] = MappingProxyType({"obelics": 0.4, "laion-2b": 0.4, "scienceqa": 0.2})
"""Shares of samples; PipeWeaver does not state them."""
VIDEO_MIXTURE: Mapping[str, float] = MappingProxyType({"sharegpt4video": 0.2, "internvid": 0.4, "mmtrail": 0.4})
"""Shares of samples; PipeWeaver does not state them."""


CONTEXT = 8192
"""Tokens of text and images together in a microbatch, as in PipeWeaver."""
IMAGE_TOKENS = 169
"""Of an image; 48 images fill a microbatch."""
MAX_CLIPS = 8


def draw_step(mixture: Mapping[str, float], *, num_microbatches: int, seed: int) -> tuple[Microbatch, ...]:
    """Returns a step of packed microbatches, filled one after the other.

    1 sample that does not fit waits with images and 4 with video, while later ones are tried: the largest of 100
    microbatches then has 3 to 5 times the operations of the smallest, and 4.15 times in PipeWeaver (section 1).
    ``mixture`` has each data set's share of samples, in any unit; video and images are not mixed.
    """
    sets, total = [DATA_SETS[name] for name in mixture], sum(mixture.values())
    shares = [share / total for share in mixture.values()]
    max_waiting = 4 if mixture.keys() & VIDEO_MIXTURE.keys() else 1
    rng = np.random.default_rng(seed)
    samples = (_cut(sets[int(rng.choice(len(sets), p=shares))](rng)) for _ in itertools.count())
    waiting: deque[Microbatch] = deque()
    return tuple(_packed(waiting, samples, max_waiting) for _ in range(num_microbatches))


def _cut(sample: Microbatch) -> Microbatch:
    """Returns a sample truncated to the size of a microbatch."""
    images = min(sample.images, CONTEXT // IMAGE_TOKENS)
    tokens = min(sample.text_tokens, CONTEXT - IMAGE_TOKENS * images)
    return replace(sample, text_tokens=tokens, images=images, video_s=min(sample.video_s, MAX_VIDEO_S))


def _packed(waiting: deque[Microbatch], samples: Iterator[Microbatch], max_waiting: int) -> Microbatch:
    packed = waiting.popleft() if waiting else next(samples)
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


def _joined(packed: Microbatch, sample: Microbatch) -> Microbatch:
    return Microbatch(
        **{field.name: getattr(packed, field.name) + getattr(sample, field.name) for field in fields(Microbatch)}
    )


def _fits(packed: Microbatch) -> bool:
    tokens = packed.text_tokens + IMAGE_TOKENS * packed.images
    return tokens <= CONTEXT and packed.video_s <= MAX_VIDEO_S and packed.clips <= MAX_CLIPS
