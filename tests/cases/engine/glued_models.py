"""Small glued models, and Hugging Face's own that they have to equal."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from mosaic.glue import MultimodalModel, Tower

VOCABULARY, WIDTH = 48, 16
IMAGE, AUDIO = 50, 51
"""Placeholders, beyond the vocabulary."""

TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "image_size": 8,
    "patch_size": 4,
}
"""Four patches an image."""
HEARING = {
    "num_mel_bins": 4,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "max_source_positions": 3,
}
"""Three features a clip of six frames."""


def language_model(**more: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT | more))


def vision(**more: Any) -> nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION | more, vision_use_head=False))


def hearing(**more: Any) -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(transformers.WhisperConfig(**HEARING | more))


def glued(**more: Any) -> MultimodalModel:
    """SigLIP, Whisper's encoder and Qwen3, with more that its configuration says."""
    return MultimodalModel(
        language_model=language_model(**more),
        vision=Tower(vision(), token=IMAGE),
        audio=Tower(hearing(), projector="linear", token=AUDIO),
    )


def nested() -> MultimodalModel:
    """A language model with a tower that is a multimodal model itself: it listens, and its last states are features."""
    speech = MultimodalModel(language_model=language_model(), audio=Tower(hearing(), projector="linear", token=AUDIO))
    tower = Tower(speech, token=IMAGE, width=WIDTH, before=with_states, after=last_states)
    return MultimodalModel(language_model=language_model(), speech=tower)


def with_states(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "output_hidden_states": True}


def last_states(_: dict[str, Any], output: Any) -> torch.Tensor:
    return output.hidden_states[-1]


def nested_batch() -> dict[str, Any]:
    """One text that begins with what was heard, and another text for the tower, with one clip."""
    heard = torch.randint(1, VOCABULARY, (1, 6))
    heard[:, 1:4] = AUDIO
    ids = torch.cat([torch.full((1, 6), IMAGE), torch.randint(1, VOCABULARY, (1, 5))], 1)
    speech = {"input_ids": heard, "audio": {"input_features": torch.randn(1, 4, 6)}}
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= VOCABULARY, -100), "speech": speech}


def batch(images: int = 3, clips: int = 2, *, rows: int = 2, words: int = 5) -> dict[str, Any]:
    """Texts that begin with images and clips, shared out evenly over rows; what is left out is not there."""
    ids = torch.randint(1, VOCABULARY, (rows, 4 * images + 3 * clips + words))
    for row in range(rows):
        own, heard = 4 * len(range(row, images, rows)), 3 * len(range(row, clips, rows))
        ids[row, 1 : 1 + own] = IMAGE
        ids[row, 1 + own : 1 + own + heard] = AUDIO
    found: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(ids >= VOCABULARY, -100)}
    if images:
        found["vision"] = {"pixel_values": torch.randn(images, 3, 8, 8)}
    if clips:
        found["audio"] = {"input_features": torch.randn(clips, 4, 6)}
    return found


def llava(vision_config: Any, text_config: Any, **more: Any) -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=vision_config, text_config=text_config, image_token_id=7, image_seq_length=4, **more
    )
    return transformers.LlavaForConditionalGeneration(config)


def as_glue(model: nn.Module, text: type[nn.Module], *, layer: int, skips_first: bool) -> MultimodalModel:
    """Returns a LLaVA's own modules, glued: the same weights, under other names.

    Args:
        model: A LLaVA.
        text: Class of its language model with a head.
        layer: Of which the projector sees the result.
        skips_first: Whether the first token is left out.
    """

    def after(inputs: dict[str, Any], output: Any) -> torch.Tensor:
        hidden = output.hidden_states[layer]
        return hidden[:, 1:] if skips_first else hidden

    language = text(model.config.text_config)
    language.load_state_dict(
        {f"model.{name}": value for name, value in model.model.language_model.state_dict().items()}
        | {"lm_head.weight": model.lm_head.weight}
    )
    tower = type(model.model.vision_tower)(model.config.vision_config)
    tower.load_state_dict(model.model.vision_tower.state_dict())
    found = MultimodalModel(
        language_model=language,
        vision=Tower(
            tower,
            token=model.config.image_token_id,
            before=lambda inputs: {**inputs, "output_hidden_states": True},
            after=after,
        ),
    )
    theirs = model.model.multi_modal_projector
    for place, own in ((0, theirs.linear_1), (2, theirs.linear_2)):
        found.get_submodule("vision.projector")[place].load_state_dict(own.state_dict())  # type: ignore[index]
    return found


def in_llavas_names(name: str) -> str:
    """Returns the name that a weight of ``as_glue`` has in the LLaVA."""
    for own, theirs in (
        ("vision.model.", "model.vision_tower."),
        ("vision.projector.0.", "model.multi_modal_projector.linear_1."),
        ("vision.projector.2.", "model.multi_modal_projector.linear_2."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
    ):
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    raise AssertionError(name)
