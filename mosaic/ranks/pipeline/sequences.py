"""Sharing of sequences: the language model of a pipeline runs on a rank's own tokens, whatever is around it.

Encoders run and features are merged on whole sequences. Where the language model is entered, its ids or embeddings and
its positions are cut to this rank's tokens; labels are shifted and cut before the model is called. So what travels
between pipeline ranks belongs to a rank's own tokens, and masks travel not at all: all ranks make them of the
microbatch, which all have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.context.attention.attend import Attend, ContextBatch, shifted_labels
from mosaic.context.attention.exchange import gather_items
from mosaic.context.attention.hugging_face import check_calls, check_config, layer_windows, use_attention
from mosaic.context.items import ItemShare, share_items
from mosaic.context.plan import ContextPlan, ContextSettings
from mosaic.errors import UnsplittableError, UnsupportedModelError, said_by
from mosaic.find.random_numbers import RandomState, forked, torch_state
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import rows_of_units, take_units
from mosaic.parts.split import ModelSplit

MAX_DIFFERENCE = 1e-3
"""Of a loss from the mean over shifted labels, as a share."""
_TOKENS = ("input_ids", "inputs_embeds", "position_ids")

Microbatch = Mapping[str, Any]
"""Keyword arguments of the model, of whole sequences; or as ``Sequences.cut`` makes them."""


def masks_of(own: Sequence[Microbatch]) -> list[str]:
    """Names the plans of microbatches as ``Sequences.cut`` makes them; of others there are none."""
    return [microbatch["context"].plan.digest() for microbatch in own if isinstance(microbatch.get("context"), Attend)]


class Sequences:
    """Shares the sequences of a model's last module out over a group; all ranks of the group make it.

    It refuses layers outside of a language model of transformers, and attention that mask words cannot say.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        settings: ContextSettings,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
    ) -> None:
        self._settings, self._group, self._model, self._device = settings, group, model, device
        self._text = _language_model(model, split)
        self._names = list(inspect.signature(self._text.forward).parameters)
        check_config(self._text)
        if settings.windows is None:
            self._settings = replace(settings, windows=layer_windows(self._text))
        self._restore = use_attention(self._text)
        self._hooks = (
            self._text.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._text.register_forward_hook(self._leave),
        )
        self._state: RandomState | None = None
        self._ahead: dict[int, tuple[Microbatch, Future[Attend]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mosaic-context")

    def cut(self, microbatch: Microbatch, *, agreed: bool = True) -> dict[str, Any]:
        """Returns the model's arguments on this rank; ranks compare their masks here unless they have ``agreed``."""
        _, planned = self._ahead.get(id(microbatch), (None, None))
        attend = self._attend(microbatch, agreed=agreed) if planned is None else planned.result()
        _check_mask(microbatch, attend.plan)
        own = {**microbatch, "context": attend}
        if microbatch.get("labels") is not None:
            own |= shifted_labels(ContextBatch(attend=attend), microbatch["labels"])
        return own

    def look_ahead(self, microbatches: Sequence[Microbatch]) -> None:
        """Plans the attention of microbatches to come in a thread, while a step runs."""
        self._ahead = {id(each): (each, self._thread.submit(self._attend, each)) for each in microbatches}

    def _attend(self, microbatch: Microbatch, *, agreed: bool = True) -> Attend:
        """Plans the attention of a microbatch; sends nothing if ranks have agreed."""
        return Attend(self._settings.plan(microbatch), self._group, device=self._device, agreed=agreed)

    def check(self, microbatch: Microbatch) -> None:
        """Runs the model with a microbatch once, unless it lacks weights; all ranks of the group call it.

        Raises:
            RankFailedError: Ranks have different masks.
            UnsplittableError: It cannot take a rank's tokens, some layers did not attend over context ranks, or the
                loss is not the mean over labels.
        """
        own = self.cut(microbatch, agreed=False)
        if any(parameter.is_meta for parameter in self._model.parameters()):
            return
        attend: Attend = own["context"]
        before = dict(attend.calls)
        try:
            with torch.no_grad(), forked(self._device):
                output = self._model(**own)
        except (RuntimeError, IndexError, TypeError) as error:  # of shapes and arguments
            raise UnsplittableError(
                f"{type(self._model).__name__} cannot be called with a rank's tokens alone, {said_by(error)}; use no "
                "context="
            ) from error
        try:
            check_calls(self._text, attend, before)
        except UnsupportedModelError as error:
            raise UnsplittableError(f"{error}, with no context=") from error
        logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
        if logits is None or loss is None or "shift_labels" not in own:
            return
        summed = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), own["shift_labels"].flatten(), reduction="sum"
        )
        expected = summed / own["num_items_in_batch"]
        if not float((loss - expected).abs()) <= MAX_DIFFERENCE * float(expected.abs()) + 1e-6:
            raise UnsplittableError(
                f"the loss of {type(self._model).__name__} is {float(loss):.4g} and that of its shifted labels "
                f"{float(expected):.4g}: what else is in it, each rank would count over its own tokens; give "
                "mosaic.pipeline loss= a function that makes this rank's part of a sum over tokens"
            )

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """A block whose errors leave the model as it was."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore()
        self._thread.shutdown(cancel_futures=True)

    def _enter(
        self, text: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cuts the language model's arguments to this rank's tokens."""
        self._state = torch_state(self._device)
        kwargs = dict(zip(self._names, arguments, strict=False)) | kwargs
        attend = kwargs.get("context")
        if not isinstance(attend, Attend):
            raise UnsplittableError(
                f"{type(self._model).__name__} does not hand context= down to its {type(text).__name__}, as models of "
                "transformers do with keywords that they do not know; use no context="
            )
        batch, tokens = ContextBatch(attend=attend), attend.plan.mask.num_tokens
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.from_numpy(attend.plan.mask.positions())[None].to(attend.device)
        cut: dict[str, Any] = {"use_cache": False, **_features_of(kwargs, batch)}
        if getattr(kwargs.get("attention_mask"), "ndim", 0) == 2:  # what is around the model may read it
            cut["attention_mask"] = None
        for name, value in kwargs.items():
            if value is not None and (name in _TOKENS or name.endswith("token_type_ids")):
                cut[name] = batch.cut(value, dim=value.ndim - 1 if name == "position_ids" else 1)
        others = {name: value for name, value in kwargs.items() if name not in cut}
        strange = [name for name, value in others.items() if any(tokens in tensor.shape for tensor in _tensors(value))]
        if strange:
            raise UnsplittableError(
                f"{type(text).__name__} is given {', '.join(strange)} of all {tokens} tokens, which context ranks "
                "cannot cut; use no context="
            )
        return (), kwargs | cut

    def _leave(self, text: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Refuses random numbers, which are all drawn before the first step of each mode."""
        if self._state is not None and not self._state.is_same(torch_state(self._device)):
            raise UnsplittableError(
                f"{type(text).__name__} draws random numbers, as dropout does, and ranks that share a sequence would "
                "draw others than one rank does: set dropout in the language model to 0, or use no context="
            )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _features_of(kwargs: Mapping[str, Any], batch: ContextBatch) -> dict[str, Any]:
    """Returns features that layers add to tokens of images, as Qwen3-VL's do (DeepStack): those of a rank's tokens."""
    marks, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if marks is None or features is None:
        return {}
    rows = marks.flatten().cumsum(0).view_as(marks) - 1  # of all tokens, the last image token's up to there
    own = batch.cut(marks)
    own_rows = batch.cut(rows)[own]
    return {"visual_pos_masks": own, "deepstack_visual_embeds": [feature[own_rows] for feature in features]}


def _language_model(model: nn.Module, split: ModelSplit) -> Any:
    """Returns the model of transformers around the last module's layers."""
    path = split.modules[-1].path
    while path and not hasattr(model.get_submodule(path), "set_attn_implementation"):
        path = path.rpartition(".")[0]
    text = model.get_submodule(path)
    others = [module.path for module in split.modules[:-1] if module.path.startswith(f"{path}.") or not path]
    names = inspect.signature(text.forward).parameters
    if not hasattr(text, "set_attn_implementation") or others or "position_ids" not in names:
        raise UnsplittableError(
            f"the layers of {split.modules[-1].path!r} are in no language model of transformers of their own, and "
            "sequences of such alone are shared out: use no context="
        )
    return text


def _check_mask(microbatch: Microbatch, plan: ContextPlan) -> None:
    """Raises ValueError where a mask of tokens says something else than mask words."""
    tokens = microbatch.get("attention_mask")
    if tokens is None:
        return
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise ValueError("attention_mask is given beside context=, whose mask= says who sees whom: leave it out")
    seen = torch.from_numpy(plan.mask.documents >= 0).to(tokens.device)
    if tokens.shape[1] != len(seen) or not bool((tokens.bool() == seen).all()):
        raise ValueError(
            f"attention_mask has {int(tokens.sum())} tokens of {tuple(tokens.shape)}, and mask= {int(seen.sum())} of "
            f"{len(seen)} in each row: have mask= put padding in no document, or leave attention_mask out"
        )


class SharedItems:
    """Shares units of encoders out over a group; all ranks of the group make it and make the same calls."""

    def __init__(self, model: PartedModel, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def share_of(self, kwargs: Mapping[str, Any], module: str) -> ItemShare | None:
        """Returns the units of each rank, the largest first; None where each rank encodes all.

        That is where there are fewer units than ranks, and where what leaves the module has no rows of its units.
        """
        rows = rows_of_units(self._model.split, kwargs, module)
        if rows is None or len(rows) < self._ranks:
            return None
        share = share_items(rows, self._ranks)
        fits = all(_rows_in(like, share) is not None for like in self._leaving(kwargs, module))
        return share if fits else None

    def own(self, kwargs: Mapping[str, Any], module: str, share: ItemShare) -> Mapping[str, Any]:
        """Returns a microbatch with this rank's units of a module."""
        return take_units(self._model.split, kwargs, module, share.items_of(self._rank))

    def gathered(
        self, tensors: Sequence[Tensor], kwargs: Mapping[str, Any], module: str, share: ItemShare
    ) -> tuple[Tensor, ...]:
        """Returns a module's outputs of all units, from all ranks; gradients go to the rank that encoded them."""
        return tuple(
            self._gathered(tensor, like, share)
            for tensor, like in zip(tensors, self._leaving(kwargs, module), strict=True)
        )

    def _gathered(self, tensor: Tensor, like: Tensor, share: ItemShare) -> Tensor:
        rows = _rows_in(like, share)
        assert rows is not None  # that is what share_of has looked at
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.is_floating_point()):
            gathered = gather_items(tensor.flatten(1), replace(share, rows=rows), self._group)
        return gathered.reshape(like.shape)

    def _leaving(self, kwargs: Mapping[str, Any], module: str) -> tuple[Tensor, ...]:
        """Returns a module's outputs of all units, without data."""
        ends = next(
            index
            for index, parts in enumerate(self._model.chunks)
            if any(part.module == module and part.end == part.total for part in parts)
        )
        return self._model.boundary_like(ends, kwargs)[module]


def _rows_in(like: Tensor, share: ItemShare) -> tuple[int, ...] | None:
    """Returns the rows of each unit in a tensor of all units, which may have merged them; None where it has none."""
    total = sum(share.rows)
    if not like.ndim or not total or any(rows * len(like) % total for rows in share.rows):
        return None
    return tuple(rows * len(like) // total for rows in share.rows)
