"""A parametric multimodal model: towers for each modality, and one of four fusions.

================  ========================================================================  =====================
fusion            what it does                                                              loss
================  ========================================================================  =====================
`Contrast`        pooled vectors of pairs of modalities are pulled together (CLIP)          InfoNCE
`Decode`          tokens take placeholders' places in one language model (LLaVA)            next token
`Translate`       all tokens go into an encoder, from which a decoder writes targets (T5)   a mean over targets
`Denoise`         a transformer takes noise out of a tower's latents, beside a text (DiT)   squared velocity
================  ========================================================================  =====================

A batch is a mapping of keywords. `Contrast` and `Translate` also take several tasks at once, each with a batch of its
own by the task's name: each tower, encoder and decoder then runs once, over the rows of all tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers import Blocks, Encoder, Stack, Tower, embedding

Rows = Mapping[str, Tensor]
"""Samples by modality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Modalities in a common space."""

    width: int
    """Width of the space."""
    pairs: tuple[tuple[str, str], ...]
    """Pairs of modalities of contrastive losses, if a batch has both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A decoder-only language model."""

    blocks: Blocks
    vocabulary: int
    """Number of ids; the last ones are the encoders' placeholders."""
    tokens: int
    """Tokens per row, including placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A decoder's output."""

    tokens: int
    """Number of decoder steps."""
    ids: tuple[int, int] = (0, 0)
    """Range of its ids in the shared vocabulary, first and last + 1."""
    features: int = 0
    """Numbers per step, instead of ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translate:
    """An encoder and a decoder with one vocabulary."""

    encoder: Blocks
    """Encoder of the tokens of all towers."""
    decoder: Blocks
    """Decoder of the targets, concatenated in one sequence without seeing each other."""
    vocabulary: int
    """Number of ids of all words and codes."""
    targets: Mapping[str, Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoise:
    """A diffusion transformer over the latents of ``video`` that attends to ``text``, for video generation."""

    blocks: Blocks
    channels: int
    """Width of a latent token of the ``video`` tower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Inputs and outputs of one task of a multi-task model."""

    reads: tuple[str, ...]
    """Encoders."""
    writes: tuple[str, ...] = ()
    """Targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Dimensions of a multimodal model."""

    encoders: Mapping[str, Encoder]
    fusion: Contrast | Decode | Translate | Denoise
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """Tasks of a batch; empty: one batch with everything."""

    def tiny(self) -> Config:
        """Returns the same graph of modules with towers and stacks of two narrow layers."""
        encoders = {name: encoder.tiny() for name, encoder in self.encoders.items()}
        fusion = self.fusion
        if isinstance(fusion, Contrast):
            return replace(self, encoders=encoders, fusion=replace(fusion, width=16))
        if isinstance(fusion, Denoise):
            return replace(self, encoders=encoders, fusion=replace(fusion, blocks=fusion.blocks.tiny(), channels=4))
        if isinstance(fusion, Decode):
            tokens = 8 + sum(encoder.out_tokens for encoder in encoders.values())
            small = replace(fusion, blocks=fusion.blocks.tiny(), vocabulary=64, tokens=tokens)
            return replace(self, encoders=encoders, fusion=small)
        targets = {
            name: replace(target, tokens=6, ids=(0, 64) if target.ids[1] else (0, 0), features=min(target.features, 8))
            for name, target in fusion.targets.items()
        }
        stacks = {"encoder": fusion.encoder.tiny(), "decoder": fusion.decoder.tiny()}
        return replace(self, encoders=encoders, fusion=replace(fusion, **stacks, vocabulary=64, targets=targets))

    def cut(self, share: float) -> Config:
        """Returns the same widths and samples with a share of all stacks' layers and vocabularies."""

        def shorter(blocks: Blocks) -> Blocks:
            return replace(blocks, layers=max(1, round(blocks.layers * share)) if blocks.layers else 0)

        def fewer(ids: int) -> int:
            return 64 * round(ids * share / 64)

        encoders = {
            name: replace(encoder, blocks=shorter(encoder.blocks), vocabulary=fewer(encoder.vocabulary))
            for name, encoder in self.encoders.items()
        }
        fusion = self.fusion
        if isinstance(fusion, Decode):
            fusion = replace(fusion, blocks=shorter(fusion.blocks), vocabulary=fewer(fusion.vocabulary))
        elif isinstance(fusion, Denoise):
            fusion = replace(fusion, blocks=shorter(fusion.blocks))
        elif isinstance(fusion, Translate):
            targets = {
                name: replace(target, ids=(fewer(target.ids[0]), fewer(target.ids[1])))
                for name, target in fusion.targets.items()
            }
            stacks = {"encoder": shorter(fusion.encoder), "decoder": shorter(fusion.decoder)}
            fusion = replace(fusion, **stacks, vocabulary=fewer(fusion.vocabulary), targets=targets)
        return replace(self, encoders=encoders, fusion=fusion)

    def make(self) -> nn.Module:
        """Returns the model with random weights."""
        if isinstance(self.fusion, Contrast):
            return ContrastiveModel(self, self.fusion)
        if isinstance(self.fusion, Decode):
            return DecoderModel(self, self.fusion)
        if isinstance(self.fusion, Denoise):
            return DiffusionModel(self, self.fusion)
        return TranslatingModel(self, self.fusion)

    def sample(self, draw: Draw, tasks: Sequence[str] | None = None) -> dict[str, Any]:
        """Draws a batch of some tasks or of all.

        Raises:
            ValueError: A task is unknown.
        """
        task_names = tuple(self.tasks) if tasks is None else tuple(tasks)
        for task in task_names:
            if task not in self.tasks:
                raise ValueError(f"unknown task {task!r}; choose from: {', '.join(self.tasks) or 'none'}")
        if isinstance(self.fusion, Decode):
            reads = [self.tasks[task].reads for task in task_names] or [tuple(self.encoders)]
            return self._placed(self.fusion, draw, reads)
        targets = tuple(self.fusion.targets) if isinstance(self.fusion, Translate) else ()
        if not task_names:
            return self._drawn(draw, tuple(self.encoders), targets)
        return {task: self._drawn(draw, self.tasks[task].reads, self.tasks[task].writes) for task in task_names}

    def _drawn(self, draw: Draw, reads: Sequence[str], writes: Sequence[str]) -> dict[str, Tensor]:
        words = self.fusion.vocabulary if isinstance(self.fusion, Decode | Translate) else 0
        sample = {name: draw.sample(self.encoders[name], words) for name in reads}
        if isinstance(self.fusion, Denoise):
            noise = draw.normal(self.encoders["video"].out_tokens, self.fusion.channels)
            sample |= {"noise": noise, "level": draw.normal(1).sigmoid()}
        for name in writes:
            assert isinstance(self.fusion, Translate)
            target = self.fusion.targets[name]
            if target.features:
                sample[f"{name}_targets"] = draw.normal(target.tokens, target.features)
            else:
                sample[f"{name}_targets"] = draw.ids(target.tokens, *target.ids)
        return sample

    def _placed(self, fusion: Decode, draw: Draw, reads: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Draws rows of text of each kind, with placeholders for images and sounds after the first token."""
        words = fusion.vocabulary - len(self.encoders)
        rows: list[Tensor] = []
        samples: dict[str, list[Tensor]] = {name: [] for name in self.encoders}
        for names in reads:
            ids, start = draw.ids(fusion.tokens, 0, words), 1
            for name in names:
                end = start + self.encoders[name].out_tokens
                ids[:, start:end] = words + tuple(self.encoders).index(name)
                samples[name].append(draw.sample(self.encoders[name], words))
                start = end
            rows.append(ids)
        ids = torch.cat(rows)
        labels = ids.masked_fill(ids >= words, -100)
        inputs = {name: torch.cat(tensors) for name, tensors in samples.items() if tensors}
        return {"input_ids": ids, "labels": labels, **inputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutual:
    """A small and a large model with the same inputs and vocabulary that learn from each other (CTVLM)."""

    small: Config
    """With fusion ``Decode``, like ``large``."""
    large: Config
    """With encoders of the same numbers of tokens."""

    def tiny(self) -> Mutual:
        return Mutual(small=self.small.tiny(), large=self.large.tiny())

    def cut(self, share: float) -> Mutual:
        """Returns both with a share of their layers and vocabularies."""
        return Mutual(small=self.small.cut(share), large=self.large.cut(share))

    def make(self) -> nn.Module:
        return MutualModel(self)

    def sample(self, draw: Draw, tasks: Sequence[str] | None = None) -> dict[str, Any]:
        return self.small.sample(draw, tasks)


class Draw:
    """Draws random samples on one device (on ``meta`` only shapes), reproducible by seed."""

    def __init__(self, batch: int, device: torch.device, seed: int) -> None:
        self.batch, self.device = batch, device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Returns normal numbers, (batch, *shape)."""
        return torch.randn(self.batch, *shape, generator=self._generator, device=self.device)

    def ids(self, tokens: int, first: int, end: int) -> Tensor:
        """Returns ids from ``first`` to before ``end``, (batch, tokens)."""
        return torch.randint(first, end, (self.batch, tokens), generator=self._generator, device=self.device)

    def sample(self, encoder: Encoder, words: int) -> Tensor:
        """Returns an encoder's samples; ids are below its vocabulary's size or ``words``."""
        if encoder.patch or encoder.convolutions:
            return self.normal(*(() if encoder.count == 1 else (encoder.count,)), *encoder.sample)
        return self.ids(encoder.sample[0], 0, encoder.vocabulary or words)


class ContrastiveModel(nn.Module):
    """Towers into a common space, and a learned temperature."""

    def __init__(self, config: Config, fusion: Contrast) -> None:
        super().__init__()
        self.tasks, self.pairs = tuple(config.tasks), fusion.pairs
        self.encoders = nn.ModuleDict(
            {name: Tower(encoder, fusion.width, pooled=True) for name, encoder in config.encoders.items()}
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """Encodes samples by modality, or by task and modality.

        Returns ``loss``, the mean over pairs, and each modality's vectors, (batch, width), or each task's own loss.
        """
        tasks = _tasks(batch, self.tasks, tuple(self.encoders))
        vectors: dict[str, dict[str, Tensor]] = {task: {} for task in tasks}
        for name, rows in _by_encoder(tasks, tuple(self.encoders)).items():
            for task, vector in _split(self.encoders[name], rows).items():
                vectors[task][name] = F.normalize(vector, dim=-1)
        losses = {task: loss for task, own in vectors.items() if (loss := self._loss(own)) is not None}
        result = dict(vectors[""]) if "" in vectors else dict(losses)
        return result | ({"loss": torch.stack(list(losses.values())).mean()} if losses else {})

    def _loss(self, vectors: Rows) -> Tensor | None:
        losses = []
        for left, right in self.pairs:
            if left in vectors and right in vectors:
                logits = self.log_scale.exp() * vectors[left].float() @ vectors[right].float().t()
                goal = torch.arange(len(logits), device=logits.device)
                losses.append((F.cross_entropy(logits, goal) + F.cross_entropy(logits.t(), goal)) / 2)
        return torch.stack(losses).mean() if losses else None


class DecoderModel(nn.Module):
    """Towers, embedding, language model and head."""

    def __init__(self, config: Config, fusion: Decode) -> None:
        super().__init__()
        width = fusion.blocks.width
        self.first_placeholder = fusion.vocabulary - len(config.encoders)
        self.encoders = nn.ModuleDict({name: Tower(encoder, width) for name, encoder in config.encoders.items()})
        self.embed_tokens = embedding(fusion.vocabulary, width)
        self.language_model = Stack(fusion.blocks)
        self.lm_head = nn.Linear(width, fusion.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **samples: Tensor) -> dict[str, Tensor]:
        """Merges the encoders' features into the text and predicts the next tokens.

        Args:
            input_ids: (batch, tokens), with a placeholder per token of an encoder.
            labels: Ids to predict, (batch, tokens); -100: none.
            samples: Samples by encoder, of the rows with its placeholders, in order.
        """
        hidden = self.embed_tokens(input_ids)
        for place, name in enumerate(self.encoders):
            if name in samples:
                hidden = merge(hidden, input_ids == self.first_placeholder + place, self.encoders[name](samples[name]))
        hidden = self.language_model(hidden, causal=True)
        output = {"hidden": hidden, "logits": self.lm_head(hidden)}
        if labels is not None:
            logits = output["logits"][:, :-1].flatten(0, 1).float()
            output["loss"] = F.cross_entropy(logits, labels[:, 1:].flatten())
        return output


class DiffusionModel(nn.Module):
    """A transformer over a video's noised latents that attends to a text and predicts the velocity.

    The noise level is a token before the latents, as in DiT's in-context conditioning; the target is that of rectified
    flow. A batch includes its noise, so a step draws no random numbers.
    """

    def __init__(self, config: Config, fusion: Denoise) -> None:
        super().__init__()
        width = fusion.blocks.width
        out_widths = {"video": fusion.channels, "text": width}
        self.encoders = nn.ModuleDict(
            {name: Tower(encoder, out_widths[name]) for name, encoder in config.encoders.items()}
        )
        self.enter = nn.Linear(fusion.channels, width)
        self.levels = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.transformer = Stack(fusion.blocks, context_width=width)
        self.leave = nn.Linear(width, fusion.channels)

    def forward(self, video: Tensor, text: Tensor, noise: Tensor, level: Tensor) -> dict[str, Tensor]:
        """Predicts the velocity of a video's latents at the noise ``level``, (batch, 1)."""
        latents, context = self.encoders["video"](video), self.encoders["text"](text)
        share = level.unsqueeze(-1)
        hidden = torch.cat((self.levels(share), self.enter((1 - share) * latents + share * noise)), dim=1)
        velocity = self.leave(self.transformer(hidden, context)[:, 1:])
        return {"velocity": velocity, "loss": F.mse_loss(velocity.float(), (latents - noise).float())}


def merge(embedded: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """Merges a tower's features into the tokens.

    Like ``masked_scatter``, whose backward synchronizes with the device and cannot be captured in a CUDA graph.
    ``where`` is (batch, tokens) of bool, True for as many tokens as features, in order.
    """
    index = (where.flatten().cumsum(0) - 1).clamp(min=0)
    spread = features.flatten(0, -2).index_select(0, index).unflatten(0, where.shape)
    return torch.where(where.unsqueeze(-1), spread.to(embedded.dtype), embedded)


class MutualModel(nn.Module):
    """Two models on the same batch; each learns from the labels and from the other's predictions."""

    temperature = 2.0

    def __init__(self, config: Mutual) -> None:
        super().__init__()
        self.small, self.large = config.small.make(), config.large.make()
        small, large = config.small.fusion, config.large.fusion
        assert isinstance(small, Decode)
        assert isinstance(large, Decode)
        self.align = nn.Linear(small.blocks.width, large.blocks.width)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns ``loss``: both cross-entropies, both distillations, and the distance of hidden states."""
        small, large = self.small(**batch), self.large(**batch)
        away = F.mse_loss(self.align(small["hidden"]).float(), large["hidden"].detach().float())
        learned = self._distil(small["logits"], large["logits"]) + self._distil(large["logits"], small["logits"])
        return {"loss": small["loss"] + large["loss"] + away + learned}

    def _distil(self, learner: Tensor, teacher: Tensor) -> Tensor:
        words, goal = (part.float().div(self.temperature).log_softmax(-1) for part in (learner, teacher.detach()))
        return F.kl_div(words, goal, reduction="none", log_target=True).sum(-1).mean() * self.temperature**2


class TranslatingModel(nn.Module):
    """Towers, a shared embedding, an encoder and a decoder; logits share the embedding's weights."""

    def __init__(self, config: Config, fusion: Translate) -> None:
        super().__init__()
        width = fusion.encoder.width
        self.tasks, self.targets = tuple(config.tasks), dict(fusion.targets)
        self.words = tuple(
            name for name, row in config.encoders.items() if not (row.patch or row.convolutions or row.vocabulary)
        )
        self.embed_tokens = embedding(fusion.vocabulary, width)
        self.encoders = nn.ModuleDict({name: Tower(encoder, width) for name, encoder in config.encoders.items()})
        self.encoder = Stack(fusion.encoder)
        self.decoder = Stack(fusion.decoder, context_width=width)
        longest = max(target.tokens for target in fusion.targets.values())
        self.positions = nn.Parameter(0.02 * torch.randn(longest, width))
        features = {name: target.features for name, target in fusion.targets.items() if target.features}
        self.readers = nn.ModuleDict({name: nn.Linear(count, width) for name, count in features.items()})
        self.writers = nn.ModuleDict({name: nn.Linear(width, count) for name, count in features.items()})

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """Encodes samples by encoder and predicts ``NAME_targets`` by target, or such a batch by task.

        Returns ``loss``, the mean over targets and tasks, and of several tasks each one's own by its name.
        """
        fields = (*self.encoders, *(f"{name}_targets" for name in self.targets))
        tasks = _tasks(batch, self.tasks, fields)
        goals = {
            task: {name: rows[f"{name}_targets"] for name in self.targets if f"{name}_targets" in rows}
            for task, rows in tasks.items()
        }
        words = self._embed(tasks, goals)
        read: dict[str, list[Tensor]] = {task: [] for task in tasks}
        for name, rows in _by_encoder(tasks, tuple(self.encoders)).items():
            own = {task: words.get((task, name), part) for task, part in rows.items()}
            for task, tokens in _split(self.encoders[name], own).items():
                read[task].append(tokens)
        if not all(read.values()) or not all(goals.values()):
            raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}; pass an input and a target")
        context, context_mask = _padded([torch.cat(parts, dim=1) for parts in read.values()])
        context = self.encoder(context, mask=context_mask)
        return self._write(context, context_mask, words, goals)

    def _embed(self, tasks: Mapping[str, Rows], goals: Mapping[str, Rows]) -> dict[tuple[str, str], Tensor]:
        """Embeds the input and target ids of all tasks in one call."""
        ids: dict[tuple[str, str], Tensor] = {}
        for task, rows in tasks.items():
            ids |= {(task, name): rows[name] for name in self.words if name in rows}
            ids |= {(task, f"{n}_targets"): _shifted(g) for n, g in goals[task].items() if n not in self.readers}
        if not ids:
            return {}
        embedded = self.embed_tokens(torch.cat([part.flatten() for part in ids.values()]))
        parts = embedded.split([part.numel() for part in ids.values()])
        return {key: part.unflatten(0, ids[key].shape) for key, part in zip(ids, parts, strict=True)}

    def _write(
        self,
        context: Tensor,
        context_mask: Tensor | None,
        words: Mapping[tuple[str, str], Tensor],
        goals: Mapping[str, Rows],
    ) -> dict[str, Tensor]:
        rows, masks = [], []
        longest = max(sum(goal.shape[1] for goal in own.values()) for own in goals.values())
        for task, own in goals.items():
            before = [
                self.readers[name](_shifted(goal)) if name in self.readers else words[task, f"{name}_targets"]
                for name, goal in own.items()
            ]
            lengths = [part.shape[1] for part in before]
            rows.append(torch.cat([part + self.positions[: part.shape[1]] for part in before], dim=1))
            mask = target_mask([*lengths, longest - sum(lengths)], context.device)
            masks.append(mask if len(goals) == 1 else mask.expand(len(rows[-1]), 1, -1, -1))
        tokens, _ = _padded(rows)
        hidden = self.decoder(tokens, context, mask=torch.cat(masks), context_mask=context_mask)
        counts = [len(part) for part in rows]
        losses = {task: self._loss(part, goals[task]) for task, part in zip(goals, hidden.split(counts), strict=True)}
        by_task = {} if "" in losses else dict(losses)
        return by_task | {"loss": torch.stack(list(losses.values())).mean()}

    def _loss(self, hidden: Tensor, goals: Rows) -> Tensor:
        losses, start = [], 0
        for name, goal in goals.items():
            part, (first, end) = hidden[:, start : start + goal.shape[1]], self.targets[name].ids
            start += goal.shape[1]
            if name in self.writers:
                losses.append(F.l1_loss(self.writers[name](part).float(), goal.float()))
            else:
                logits = F.linear(part, self.embed_tokens.weight[first:end])
                losses.append(F.cross_entropy(logits.flatten(0, 1).float(), goal.flatten() - first))
        return torch.stack(losses).mean()


def target_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the attention mask of concatenated causal targets, (tokens, tokens) of bool.

    ::

        lengths (2, 3)   1 . . . .
                         1 1 . . .
                         . . 1 . .
                         . . 1 1 .
                         . . 1 1 1
    """
    # filled on the device: a copy from the host cannot be captured in a CUDA graph
    target = torch.cat([torch.full((length,), number, device=device) for number, length in enumerate(lengths)])
    return (target.unsqueeze(1) == target).tril()


def _tasks(batch: Mapping[str, Any], tasks: Sequence[str], names: Sequence[str]) -> dict[str, Rows]:
    """Returns the batch by task; one without tasks has the name ``""``."""
    is_of_tasks = any(isinstance(value, Mapping) for value in batch.values())
    allowed = tasks if is_of_tasks else names
    if not batch or set(batch) - set(allowed):
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}; choose from: {', '.join(allowed)}")
    return dict(batch) if is_of_tasks else {"": batch}


def _by_encoder(tasks: Mapping[str, Rows], encoders: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    by_encoder = {name: {task: rows[name] for task, rows in tasks.items() if name in rows} for name in encoders}
    return {name: rows for name, rows in by_encoder.items() if rows}


def _split(module: nn.Module, rows: Rows) -> dict[str, Tensor]:
    """Runs a module once over the rows of all tasks; returns the results per task."""
    if len(rows) == 1:
        return {task: module(part) for task, part in rows.items()}
    results = module(torch.cat(list(rows.values())))
    return dict(zip(rows, results.split([len(part) for part in rows.values()]), strict=True))


def _shifted(goal: Tensor) -> Tensor:
    """Returns the decoder's inputs: targets shifted by one, with a leading zero, (batch, tokens, ...)."""
    return F.pad(goal[:, :-1], [0, 0] * (goal.dim() - 2) + [1, 0])


def _padded(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Returns rows of unequal lengths as one tensor, and the mask of real tokens, (rows, 1, 1, tokens); None: all."""
    if len(parts) == 1:
        return parts[0], None
    longest = max(part.shape[1] for part in parts)
    rows = torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])
    lengths = torch.cat([torch.full((len(part),), part.shape[1], device=part.device) for part in parts])
    return rows, (torch.arange(longest, device=rows.device) < lengths.unsqueeze(1))[:, None, None]
