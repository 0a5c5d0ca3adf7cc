"""Trains the causal language models of transformers over two context ranks, tiny and in double, beside one process.

``python -m bench.context.families [NAME ...]``

The one process has a dense mask of packed documents, images and padding; for a family with sliding windows, one causal
document and the masks that the family makes. A family ends in one word: ``equal``;
``refused`` by Mosaic; ``raised`` by its own code; ``different``, in silence; ``not made`` so small from one list of
sizes. Ends with 1 if one is different.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.ranks.launch import on_ranks
from bench.record import Figure
from mosaic.context import MaskWords, causal, gemma, packed, plan_context
from mosaic.context.attention import Attend, ContextBatch, attach, layer_windows, sum_gradients
from mosaic.errors import MosaicError

MAX_NUMBERS = 8_000_000
"""Parameters of a model that is tried."""
NOISE = 1e-6
"""Of all gradients together, as a share of their length: some layers compute in 32 bits whatever their type."""
VOCABULARY, BLOCK, SECONDS = 50, 32, 1200.0
IMAGES = np.repeat([-1, 0, -1, 1], [20, 30, 11, 25])
MASK = packed([gemma(IMAGES), causal(70), gemma(IMAGES[::-1])], num_tokens=260)
SIZES: dict[int | float | bool | None, str] = {
    32: "hidden_size n_embd d_model",
    48: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_attention_heads n_head decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts",
    2: "num_hidden_layers n_layer num_layers decoder_layers encoder_layers num_experts_per_tok",
    1: "n_group topk_group",
    512: "max_position_embeddings n_positions",
}
DRAWN = ("pdrop", "dropout", "dropout_prob", "layerdrop", "noise")
"""Ends of names of what is drawn at random, which is switched off."""


def main() -> None:
    """Prints how each family ends."""
    asked = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ends = Counter()
    for figure in on_ranks(partial(tried, asked), 2, SECONDS):
        ends[figure.labels["outcome"]] += 1
        print(f"{figure.name}: {figure.labels['outcome']}: {figure.labels['says']}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in ends.most_common()))
    sys.exit("different" in ends)


def tried(kinds: list[str], rank: int, size: int) -> Iterator[Figure]:
    """On each rank: every family in turn."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    for kind in kinds:
        outcome, says, differs = _outcome(kind, size)
        labels = {"outcome": outcome, "says": says.replace("\n", " ")[:200]}
        yield Figure(name=kind, source="measured", value=differs, labels=labels)


def make(kind: str) -> nn.Module:
    """Makes a tiny model of a family, in double; the same on each call."""
    config = CONFIG_MAPPING[kind]
    known = config()
    sizes: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
    sizes |= {"num_key_value_heads": 4 if hasattr(known, "kv_lora_rank") else 2, "is_decoder": True}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "attn_temperature_tuning": False,
    }
    sizes |= {name: 0.0 for name in vars(known) if name.endswith(DRAWN)}
    chosen = {name: size for name, size in sizes.items() if hasattr(known, name)} | {"vocab_size": VOCABULARY}
    if kinds := getattr(known, "layer_types", None):
        chosen["layer_types"] = [
            "sliding_attention" if "sliding_attention" in kinds else "full_attention",
            "full_attention",
        ]
    cls, settings = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]), config(**chosen)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(settings).parameters())
    if count > MAX_NUMBERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = cls(settings).double()
    for parameter in model.parameters():
        if not parameter.isfinite().all():  # some are left as memory was
            nn.init.normal_(parameter, std=0.02)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no double
    return model


def _outcome(kind: str, size: int) -> tuple[str, str, float | None]:
    try:
        model, plain = make(kind), make(kind)
    except Exception as error:  # whatever a family's code raises ends as a word
        return "not made", f"{type(error).__name__} {error}", None
    ids = torch.randint(1, VOCABULARY, (1, MASK.num_tokens), generator=torch.Generator().manual_seed(1))
    try:
        attach(model)
        windows = layer_windows(model)
        mask = causal(MASK.num_tokens) if any(windows) else MASK
        own = ContextBatch(attend=Attend(plan_context(mask, size, block=BLOCK, windows=windows)))
        model(**own.inputs(input_ids=ids, labels=ids)).loss.backward()
    except Exception as error:  # ours or the family's, which the word says
        is_ours = isinstance(error, MosaicError) or "context" in str(error)
        return "refused" if is_ours else "raised", f"{type(error).__name__} {error}", None
    sum_gradients(model.parameters())
    try:
        _plain_step(plain, ids, own, mask)
    except Exception as error:  # the family's own with a dense mask, as the word says
        return "raised", f"with a dense mask, {type(error).__name__} {error}", None
    pairs = [
        (a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True) if b.grad is not None
    ]
    away = sum(float((a - b).square().sum()) if a is not None else torch.inf for a, b in pairs) ** 0.5
    differs = away / sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    return "equal" if differs < NOISE else "different", f"gradients by {differs:.1e}", differs


def _plain_step(model: Any, ids: torch.Tensor, own: ContextBatch, mask: MaskWords) -> None:
    """The same step of the whole sequence, with a matrix of who sees whom unless the model makes it."""
    caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not caps else "eager")
    seen, padding = torch.from_numpy(mask.dense()), torch.from_numpy(mask.documents) < 0
    seen |= padding[:, None] & torch.eye(MASK.num_tokens, dtype=torch.bool)  # dense attention wants a key each
    labels = own.shift(ids)
    loss = model(
        input_ids=ids,
        labels=labels,
        shift_labels=labels,
        attention_mask=seen[None, None] if mask is MASK else None,
        position_ids=torch.from_numpy(mask.positions())[None],
        use_cache=False,
    ).loss
    loss.backward()


if __name__ == "__main__":
    main()
