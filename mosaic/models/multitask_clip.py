"""Multitask-CLIP: ten contrastive tasks over ImageBind's six modalities (Spindle, section 5 and appendix C).

It has ImageBind's structure: ``public`` has the 1,200.8 M parameters that Spindle states as 1.20 B. Each task is a pair
of modalities with a batch of its own; which ten of the fifteen pairs Spindle took is not told, so ``TASKS`` is our
choice: images with all others, text with the other four, audio with depth. A step has any of them
(``make_batch(..., tasks=list(TASKS)[:3])``) and runs each encoder once, over the rows of all its tasks that have its
modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from mosaic.models.imagebind import ENCODERS, FIXED_SCALES, MODALITIES, SIZES, ImageBind, ImageBindConfig
from mosaic.models.imagebind import make_batch as make_samples
from mosaic.models.inputs import Draw
from mosaic.models.layers.targets import contrastive_loss
from mosaic.models.zoo_model import ZooModel

TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        f"{first}_{second}": (first, second)
        for first, second in (
            *(("image", other) for other in ("text", "audio", "depth", "thermal", "imu")),
            *(("text", other) for other in ("audio", "depth", "thermal", "imu")),
            ("audio", "depth"),
        )
    }
)
"""The two modalities of each task."""

Tasks = Mapping[str, Mapping[str, Tensor]]
"""By task, its batch by modality."""


class MultitaskClip(ImageBind):
    """An ImageBind that is trained on several tasks at once."""

    def forward(self, **tasks: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """Embeds the rows of all tasks and pulls each task's pairs together.

        Args:
            tasks: Batches of tasks of ``TASKS``; any number of them, of any batch sizes.

        Returns:
            ``loss``, the mean over tasks, and each task's own by its name.

        Raises:
            ValueError: There is no task, or one is unknown.
        """
        if not tasks or set(tasks) - set(TASKS):
            raise ValueError(f"got {', '.join(tasks) or 'no tasks'}; the tasks are {', '.join(TASKS)}")
        embedded = {name: self._rows(name, tasks) for name in MODALITIES}
        losses = {}
        for task in tasks:
            first, second = TASKS[task]
            scale = self.scale(second if second in FIXED_SCALES else first)
            losses[task] = contrastive_loss(embedded[first][task], embedded[second][task], scale)
        return losses | {"loss": torch.stack(list(losses.values())).mean()}

    def _rows(self, modality: str, tasks: Tasks) -> dict[str, Tensor]:
        """Returns a modality's embeddings by task, after one call of its encoder."""
        found = {task: batch[modality] for task, batch in tasks.items() if modality in TASKS[task]}
        if not found:
            return {}
        embedded = self.embed(modality, torch.cat(list(found.values())))
        return dict(zip(found, embedded.split([len(rows) for rows in found.values()]), strict=True))


def make_batch(
    config: ImageBindConfig, draw: Draw, tasks: Sequence[str] = tuple(TASKS)
) -> dict[str, dict[str, Tensor]]:
    """Draws a batch of each task."""
    made = {}
    for task in tasks:
        samples = make_samples(config, draw)
        made[task] = {modality: samples[modality] for modality in TASKS[task]}
    return made


MODEL = ZooModel(
    name="multitask-clip",
    make=MultitaskClip,
    sample=make_batch,
    sizes={size: SIZES[size] for size in ("tiny", "public", "paper")},
    source="Spindle, section 5 and appendix C",
    workload="spindle",
    encoders=ENCODERS,
    modules=ENCODERS,
    tasks=tuple(TASKS),
)
