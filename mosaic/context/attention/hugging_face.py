"""Context parallelism for Hugging Face language models, without code per family.

A registered attention function replaces theirs; ``ContextBatch.inputs`` makes the model's keywords. Each layer passes
its scale, sliding window, soft cap and sinks to the function. Models that would silently compute other numbers are
rejected by their configuration, or in the layer.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from mosaic.context.attention.attend import Attend
from mosaic.errors import UnsupportedModelError

NAME = "mosaic_context"
"""Name of the registered attention function."""
_BIASES = ("sinks", "position_bias", "indices", "block_indices")
"""Unsupported keywords of layers, which change scores or mask keys."""
_CALLS: ContextVar[tuple[Attend | None, ...]] = ContextVar("mosaic_context", default=())
"""The ``context`` of the current call, for layers that drop their keywords."""
_STRETCHED = {"dynamic", "longrope"}
"""Rotary types that depend on the largest position of a call."""
_SECOND_MASK = "attention_mask is passed beside context; leave it out, because the plan has the mask"


class Attached:
    """A model that attends over context ranks, with checked calls."""

    def __init__(self, model: Any) -> None:
        self._restore, self._calls = use_attention(model), Counter[int | None]()
        self._hooks = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True),
        )

    def remove(self) -> None:
        """Restores the model's attention."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def _enter(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        _check_call(model, arguments, keywords)
        self._calls = Counter(keywords["context"].calls)

    def _leave(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], out: object) -> None:
        check_calls(model, keywords["context"], self._calls)


def attach(model: nn.Module) -> Attached:
    """Makes a model's layers attend over context ranks and checks each call; returns a handle with ``remove()``.

    Args:
        model: A ``PreTrainedModel`` of transformers whose layers see the whole sequence or a sliding window.
    """
    check_config(model)
    return Attached(model)


def layer_windows(model: Any) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer by a model's configuration; None for layers without one."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def use_attention(model: Any) -> Callable[[], None]:
    """Makes a model's layers call ``attention``; returns a function that restores the original."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    before: str = model.config._attn_implementation
    if before == NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} already attends over context ranks; attach a model once, and call remove() of "
            "the handle before you attach it again"
        )
    model.set_attn_implementation(NAME)
    hooks = (
        model.register_forward_pre_hook(_begin_call, with_kwargs=True),
        model.register_forward_hook(_end_call, always_call=True),
    )

    def restore() -> None:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)

    return restore


def _begin_call(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    _CALLS.set((*_CALLS.get(), keywords.get("context")))


def _end_call(module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
    _CALLS.set(_CALLS.get()[:-1])


def check_calls(model: Any, attend: Attend, before: Mapping[int | None, int]) -> None:
    """Checks that all layers of a model attended since ``before``, a copy of ``attend.calls``, with their windows."""
    calls, windows = Counter(attend.calls) - Counter(before), Counter(layer_windows(model))
    if calls == windows:
        return
    total, layers = calls.total(), windows.total()
    reason = "the others saw only this rank's tokens"
    if total == layers:
        reason = f"the configuration has windows {dict(windows)}, but layers passed {dict(calls)}"
    raise UnsupportedModelError(
        f"{total} of {layers} layers of {type(model).__name__} attended over context ranks; {reason}: train it "
        "without context parallelism"
    )


def check_config(model: Any) -> None:
    """Checks that all layers of a model attend to the whole sequence or a window, at ``position_ids``."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{name} is not a model of transformers; attach its language model, or call Attend in layers of your own"
        )
    inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)  # inside peft's
    config = model.config.get_text_config()

    def get(field: str) -> Any:
        return getattr(config, field, None)

    strange = ", ".join(sorted({*(get("layer_types") or ())} - {"full_attention", "sliding_attention"}))
    dropout, rope = get("attention_dropout"), get("rope_parameters") or {}
    rope_kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, Mapping)}
    stretched = ", ".join(map(repr, sorted(_STRETCHED & rope_kinds)))
    both_ways = get("use_bidirectional_attention") in (True, "all") and any(layer_windows(model))
    refusals: dict[str, Any] = {
        "has an encoder and a decoder; mask words are for decoders: attach the decoder": get("is_encoder_decoder"),
        f"has layers of {strange}; mask words and windows cannot express them: build it with "
        "layer_types=['full_attention', ...] if it may see everything": strange,
        "has windows in both directions; mask words express only backward windows: use another model": both_ways,
        "adds a loss of its router, which each rank would count over its own tokens: set "
        "output_router_logits=False": get("output_router_logits"),
        f"has attention_dropout={dropout}; ranks would drop different pairs than one rank does: set it to 0": dropout,
        "takes no position_ids and would count this rank's tokens, which are not adjacent: use another "
        "model": "position_ids" not in inspect.signature(inner.forward).parameters,
        f"has rope_type={stretched}, which depends on the largest position of a call, which differs between ranks: "
        "use another, such as 'yarn'": stretched,
        "has attn_temperature_tuning, which counts this rank's tokens instead of positions: set it to False": get(
            "attn_temperature_tuning"
        ),
    }
    for reason, is_refused in refusals.items():
        if is_refused:
            raise UnsupportedModelError(f"{name} {reason}, or train it without context parallelism")


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    context: Attend | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' layers; ``context`` comes from the layer or from the model's call."""
    context = context or next(reversed(_CALLS.get()), None)
    if context is None:
        raise ValueError(
            f"{type(module).__name__} was called without context; call the model with ContextBatch(...).inputs(...). "
            "Layers that drop their keywords, such as StableLM's, cannot be recomputed: disable gradient checkpointing"
        )
    options = {"dropout": dropout or None, **options}
    biases = [name for name in ("dropout", *_BIASES) if options.get(name) is not None]
    if biases:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(biases)}, which attention over context ranks does not support: "
            "set it to 0 or None in the configuration, or train the model without context parallelism"
        )
    if attention_mask is not None:
        raise ValueError(_SECOND_MASK)
    out = context(query, key, value, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _check_call(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    get, attends = keywords.get, isinstance(keywords.get("context"), Attend)
    is_cached = get("past_key_values") is not None or get("use_cache") is not False
    is_shifted, is_counted = get("shift_labels") is not None, get("num_items_in_batch") is not None
    refusals: dict[str, object] = {
        f"{type(model).__name__} attends over context ranks; call it with ContextBatch(...).inputs(...)": not attends,
        f"{len(arguments)} arguments are positional, such as an attention_mask; pass all except "
        "input_ids as keywords": len(arguments) > 1,
        "output_router_logits adds a loss of the router, which each rank would count over its own tokens: leave it "
        "out": get("output_router_logits"),
        _SECOND_MASK: get("attention_mask") is not None,
        "a cache of keys and values is not supported; call the model with use_cache=False": is_cached,
        "position_ids are missing, but a rank's tokens are not adjacent; use ContextBatch.inputs()": get("position_ids")
        is None,
        "labels are passed without shift_labels; the model would shift them over neighbours on this rank: shift them "
        "on the whole sequence, as ContextBatch.inputs(labels=...) does": get("labels") is not None and not is_shifted,
        "num_items_in_batch is missing; the model would divide by this rank's labels: pass the number of labels "
        "of the whole sequence, as ContextBatch.inputs(labels=...) does": is_shifted and not is_counted,
    }
    for reason, is_refused in refusals.items():
        if is_refused:
            raise ValueError(reason)
