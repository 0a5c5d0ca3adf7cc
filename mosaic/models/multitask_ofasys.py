"""OFASys on seven tasks at once (Spindle, section 5 and appendix C).

Spindle states 0.66 B parameters and a ViT for images and no dimensions. ``spindle`` is what fits of OFASys's published
parts: the architecture ``large`` (12 + 12 layers, 1024 wide) with the adaptor ``image_vit`` of 18 x 1024 over patches
of 14 x 14; counted here: 0.68 B.

Spindle names five of its seven: summarization, captioning, visual grounding, speech recognition and text-to-SQL; the
captioning of videos and motion from text are our choice. A step runs each adaptor once over the rows of all tasks that
have its modality, and encoder and decoder once over all rows, padded to the longest and masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from mosaic.models.inputs import Draw
from mosaic.models.layers.targets import shifted, token_loss
from mosaic.models.ofasys import (
    BACKBONE,
    ENCODERS,
    HUGE,
    MODALITIES,
    SIZES,
    WORDS,
    WRITTEN_WORDS,
    Ofasys,
    OfasysConfig,
)
from mosaic.models.ofasys import make_batch as make_samples
from mosaic.models.zoo_model import ZooModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OfasysTask:
    """What a task reads and writes."""

    reads: tuple[str, ...]
    """Modalities."""
    writes: str
    """Target."""


TASKS: Mapping[str, OfasysTask] = MappingProxyType(
    {
        "summarization": OfasysTask(reads=("text",), writes="text"),
        "captioning": OfasysTask(reads=("text", "image"), writes="text"),
        "grounding": OfasysTask(reads=("text", "image"), writes="box"),
        "speech_recognition": OfasysTask(reads=("text", "audio"), writes="text"),
        "text_to_sql": OfasysTask(reads=("text", "struct"), writes="text"),
        "video_captioning": OfasysTask(reads=("text", "video"), writes="text"),
        "text_to_motion": OfasysTask(reads=("text",), writes="motion"),
    }
)
_LARGE = replace(HUGE.encoder, layers=12, width=1024)
_SPINDLE = replace(
    HUGE,
    encoder=_LARGE,
    decoder=_LARGE,
    inputs=replace(HUGE.inputs, image_px=224, video_px=224),
    own_layers=(("image", 18),),
    residual=None,
    image_patch=14,
    patch=(2, 32, 32),
)
Rows = dict[str, Tensor]
"""Something of each task."""


class MultitaskOfasys(Ofasys):
    """An OFASys that is trained on several tasks at once."""

    def forward(self, **tasks: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """Reads and writes the rows of all tasks.

        Args:
            tasks: Batches of tasks of ``TASKS``: what the task reads, by modality, and its target, ``text_targets``
                and so on, as ``Ofasys`` takes them. Any number of tasks, of any batch sizes.

        Returns:
            ``loss``, the mean over tasks, and each task's own by its name.

        Raises:
            ValueError: There is no task, or one is unknown.
        """
        if not tasks or set(tasks) - set(TASKS):
            raise ValueError(f"got {', '.join(tasks) or 'no tasks'}; the tasks are {', '.join(TASKS)}")
        goals = {
            task: self._goal(TASKS[task].writes, batch[f"{TASKS[task].writes}_targets"])
            for task, batch in tasks.items()
        }
        words = self._words(tasks, goals)
        parts = {name: self._adapt(name, tasks, words) for name in MODALITIES}
        inputs = {task: torch.cat([parts[name][task] for name in TASKS[task].reads], dim=1) for task in tasks}
        seen = _real(inputs)
        context = self.encoder(_padded(inputs), mask=seen)
        read = {
            task: words[f"{task}/before"] if TASKS[task].writes in WRITTEN_WORDS else self._read(task, goal)
            for task, goal in goals.items()
        }
        before = {task: part + self.positions[: part.shape[1]] for task, part in read.items()}
        hidden = self.decoder(_padded(before), context, context_mask=seen, causal=True)
        losses = self._losses(dict(zip(tasks, hidden.split([len(part) for part in read.values()]), strict=True)), goals)
        return losses | {"loss": torch.stack(list(losses.values())).mean()}

    def _words(self, tasks: Mapping[str, Mapping[str, Tensor]], goals: Rows) -> Rows:
        """Embeds the words of all tasks, read and written before, in one call; keys are task/modality, task/before."""
        ids: Rows = {}
        for task, batch in tasks.items():
            for name in TASKS[task].reads:
                if name in WORDS:
                    ids[f"{task}/{name}"] = self._bins(batch[name]) if name == "box" else batch[name]
            if TASKS[task].writes in WRITTEN_WORDS:
                ids[f"{task}/before"] = shifted(goals[task])
        embedded = self.embed_tokens(torch.cat([part.flatten() for part in ids.values()]))
        parts = embedded.split([part.numel() for part in ids.values()])
        return {name: part.unflatten(0, ids[name].shape) for name, part in zip(ids, parts, strict=True)}

    def _adapt(self, modality: str, tasks: Mapping[str, Mapping[str, Tensor]], words: Rows) -> Rows:
        """Returns a modality's tokens by task, after one call of its adaptor."""
        found = {
            task: words[f"{task}/{modality}"] if modality in WORDS else batch[modality]
            for task, batch in tasks.items()
            if modality in TASKS[task].reads
        }
        if not found:
            return {}
        adapted = self.adaptors[modality](torch.cat(list(found.values())))
        return dict(zip(found, adapted.split([len(rows) for rows in found.values()]), strict=True))

    def _read(self, task: str, goal: Tensor) -> Tensor:
        found: Tensor = self.readers[TASKS[task].writes](shifted(goal))
        return found

    def _losses(self, hidden: Rows, goals: Rows) -> Rows:
        losses = {}
        for task, goal in goals.items():
            name, part = TASKS[task].writes, hidden[task][:, : goal.shape[1]]
            if name in WRITTEN_WORDS:
                losses[task] = token_loss(F.linear(part, self.embed_tokens.weight), goal)
            else:
                losses[task] = F.l1_loss(self.writers[name](part).float(), goal.float())
        return losses


def make_batch(config: OfasysConfig, draw: Draw, tasks: Sequence[str] = tuple(TASKS)) -> dict[str, dict[str, Tensor]]:
    """Draws a batch of each task."""
    made = {}
    for task in tasks:
        samples = make_samples(config, draw)
        made[task] = {name: samples[name] for name in (*TASKS[task].reads, f"{TASKS[task].writes}_targets")}
    return made


def _padded(rows: Rows) -> Tensor:
    """Returns the rows of all tasks, (rows, longest, width), zeros behind the shorter ones."""
    longest = max(part.shape[1] for part in rows.values())
    return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in rows.values()])


def _real(rows: Rows) -> Tensor:
    """Returns which tokens of ``_padded`` are no padding, (rows, 1, 1, longest) of bool."""
    longest = max(part.shape[1] for part in rows.values())
    first = next(iter(rows.values()))
    lengths = torch.cat([torch.full((len(part),), part.shape[1], device=first.device) for part in rows.values()])
    return (torch.arange(longest, device=first.device) < lengths.unsqueeze(1))[:, None, None]


MODEL = ZooModel(
    name="multitask-ofasys",
    make=MultitaskOfasys,
    sample=make_batch,
    sizes={size: SIZES[size] for size in ("tiny", "public", "paper")} | {"spindle": _SPINDLE},
    source="Spindle, section 5 and appendix C",
    workload="spindle",
    encoders=ENCODERS,
    backbone=BACKBONE,
    tasks=tuple(TASKS),
)
