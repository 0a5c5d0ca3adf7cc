"""Random batches: what a sample of each modality looks like, and how large it is in the paper's Table 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FRAMES_PER_SECOND = 100
"""Of a log-mel spectrum: one every 10 ms, as Whisper, AST and ImageBind have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizes:
    """Size of a sample of each modality; by default those of the paper's Table 2."""

    text_tokens: int = 2048
    """Tokens of a text."""
    image_px: int = 512
    """Height and width of an image with three channels."""
    video_frames: int = 32
    """Frames of a video."""
    video_px: int = 512
    """Height and width of a frame."""
    audio_frames: int = 8 * FRAMES_PER_SECOND
    """Frames of a spectrum: 8 s of sound at 16 kHz, one frame every 160 samples."""
    audio_mels: int = 128
    """Mel bands of a frame; the table does not say."""
    depth_px: int = 224
    """Height and width of a depth map with one channel."""
    thermal_px: int = 256
    """Height and width of a thermal image with one channel."""
    imu_axes: int = 6
    """Axes of an inertial sensor: three of acceleration, three of rotation."""
    imu_samples: int = 800
    """Samples of an axis: 8 s at 100 Hz."""
    action_tokens: int = 256
    """Steps of a sequence of actions."""
    boxes: int = 16
    """Boxes of a sample, each x1, y1, x2, y2; the table gives no number."""


TABLE_2 = InputSizes()
"""The paper's Table 2."""
TINY = InputSizes(
    text_tokens=12,
    image_px=32,
    video_frames=4,
    video_px=32,
    audio_frames=32,
    audio_mels=16,
    depth_px=32,
    thermal_px=32,
    imu_samples=32,
    action_tokens=6,
    boxes=2,
)
"""The same modalities, as small as they go."""


class Draw:
    """Draws random samples of all modalities on one device; the same ones for the same seed.

    Args:
        sizes: How large samples are.
        batch: Samples.
        device: Where they are made; ``meta`` for shapes alone.
        seed: Of their numbers.
    """

    def __init__(self, sizes: InputSizes, batch: int, device: torch.device, seed: int = 0) -> None:
        self.sizes = sizes
        self.batch = batch
        self.device = device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Returns normal numbers, (batch, *shape)."""
        return torch.randn(self.batch, *shape, generator=self._generator, device=self.device)

    def ids(self, tokens: int, vocabulary: int) -> Tensor:
        """Returns ids below a vocabulary's size, (batch, tokens)."""
        return torch.randint(vocabulary, (self.batch, tokens), generator=self._generator, device=self.device)

    def text(self, vocabulary: int) -> Tensor:
        """Returns ids of a text, (batch, text tokens)."""
        return self.ids(self.sizes.text_tokens, vocabulary)

    def image(self) -> Tensor:
        """Returns images, (batch, 3, height, width)."""
        return self.normal(3, self.sizes.image_px, self.sizes.image_px)

    def video(self) -> Tensor:
        """Returns videos, (batch, 3, frames, height, width)."""
        return self.normal(3, self.sizes.video_frames, self.sizes.video_px, self.sizes.video_px)

    def audio(self) -> Tensor:
        """Returns log-mel spectra, (batch, 1, mel bands, frames)."""
        return self.normal(1, self.sizes.audio_mels, self.sizes.audio_frames)

    def depth(self) -> Tensor:
        """Returns depth maps, (batch, 1, height, width)."""
        return self.normal(1, self.sizes.depth_px, self.sizes.depth_px)

    def thermal(self) -> Tensor:
        """Returns thermal images, (batch, 1, height, width)."""
        return self.normal(1, self.sizes.thermal_px, self.sizes.thermal_px)

    def imu(self) -> Tensor:
        """Returns an inertial sensor's signals, (batch, axes, samples)."""
        return self.normal(self.sizes.imu_axes, self.sizes.imu_samples)

    def boxes(self) -> Tensor:
        """Returns boxes as x1, y1, x2, y2 in the image's unit square, (batch, boxes, 4), with x1 <= x2 and y1 <= y2."""
        shape = (self.batch, self.sizes.boxes, 2, 2)
        corners = torch.rand(shape, generator=self._generator, device=self.device).sort(dim=2).values
        return corners.flatten(2)
