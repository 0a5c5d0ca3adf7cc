"""The sweep's transformers models and their batches, one row each.

A batch is a function of a generator, described by its parts. A row has the class, the batch and the settings of the
class's configuration; ``sub`` is a nested configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Generator, Tensor, nn

from bench.sweep.device import moved
from bench.sweep.session import Session

Inputs = dict[str, Any]
Draw = Callable[[Generator], Inputs]
NUM_WORDS = 99


def words(drawn: Generator, rows: int = 4, length: int = 12, *, end: int = NUM_WORDS) -> Tensor:
    """Returns tokens other than special ones."""
    return torch.randint(10, end, (rows, length), generator=drawn)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def with_marks(tokens: Tensor, token: int, count: int, *, start: int = 1) -> Tensor:
    """Returns tokens with ``count`` image or audio placeholders."""
    tokens = tokens.clone()
    tokens[:, start : start + count] = token
    return tokens


def labelled(tokens: Tensor, **more: Any) -> Inputs:
    """Returns the inputs of a language model that predicts its tokens."""
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, **more}


def batch(**parts: Any) -> Draw:
    """Returns a batch of parts: a tuple is a shape of normal numbers, a function draws values, all else is constant."""
    return lambda drawn: _drawn(parts, drawn)


def sentences(*, length: int = 12, marks: int = 0, **parts: Any) -> Draw:
    """Returns a language model's batch with ``marks`` image or audio placeholders."""
    return lambda drawn: labelled(with_marks(words(drawn, length=length), 3, marks), **_drawn(parts, drawn))


def _drawn(parts: Inputs, drawn: Generator) -> Inputs:
    def value(part: Any) -> Any:
        if isinstance(part, tuple):
            return torch.randn(*part, generator=drawn)
        if callable(part):
            return part(drawn)
        return part.clone() if isinstance(part, Tensor) else part

    return {name: value(part) for name, part in parts.items()}


def chosen(*shape: int) -> Callable[[Generator], Tensor]:
    """Returns a function that draws which elements are masked."""
    return lambda drawn: torch.rand(*shape, generator=drawn) > 0.5


IMAGES, LARGE = (4, 3, 32, 32), (2, 3, 64, 64)
CLASSES = torch.tensor([0, 1, 0, 1])
ANSWER = partial(words, length=6)

pair = batch(input_ids=words, pixel_values=IMAGES, return_loss=True)
both = batch(input_ids=words, pixel_values=IMAGES)
classified = batch(pixel_values=IMAGES, labels=CLASSES)
classified_large = batch(pixel_values=(4, 3, 64, 64), labels=CLASSES)
translated = batch(input_ids=words, labels=partial(words, length=8))
predicted = sentences(length=16)
waves = batch(input_values=(4, 512), labels=partial(words, length=5))


def boxes(drawn: Generator) -> Inputs:
    labels = [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=drawn) * 0.4 + 0.1} for _ in range(2)
    ]
    return {"pixel_values": torch.randn(*LARGE, generator=drawn), "labels": labels}


def ragged(drawn: Generator) -> Inputs:
    """Returns rows of different lengths; the last is padded."""
    inputs = predicted(drawn)
    inputs["attention_mask"][-1, 10:] = 0
    return inputs


def tiles(drawn: Generator) -> Inputs:
    """Returns images of LLaVA-NeXT: 4 tokens of the whole, 4 of its only tile, and 2 ends of rows."""
    tokens = words(drawn, length=24)
    tokens[:, 1:11] = 3
    return labelled(tokens, pixel_values=torch.randn(4, 2, 3, 16, 16, generator=drawn), image_sizes=ones(4, 2) * 16)


def qwen(drawn: Generator) -> Inputs:
    """Returns four images of 4 x 4 patches, each of which becomes 4 tokens."""
    tokens = with_marks(words(drawn, length=16), 3, 4, start=2)
    return labelled(
        with_marks(tokens, 5, 1),
        pixel_values=torch.randn(4 * 16, 3 * 2 * 8 * 8, generator=drawn),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 4),
        mm_token_type_ids=(tokens == 3).long(),
    )


def omni(drawn: Generator) -> Inputs:
    """Returns images, and audio of 16 frames that becomes 4 tokens each."""
    inputs = qwen(drawn)
    tokens = with_marks(with_marks(inputs["input_ids"], 7, 4, start=10), 8, 1, start=9)
    sounds = {"input_features": torch.randn(4, 16, 16, generator=drawn), "feature_attention_mask": ones(4, 16)}
    return {**inputs, "input_ids": tokens, "labels": tokens, **sounds}


def omni_of_other_lengths(drawn: Generator) -> Inputs:
    """Returns the same with different audio lengths in tensors of equal shapes in each step."""
    inputs = omni(drawn)
    shorter = int(torch.randint(0, 2, (), generator=drawn))
    for row, length in enumerate((16 - 2 * shorter, 12 + 2 * shorter)):  # 4 + 3 tokens, or 3 + 3
        inputs["feature_attention_mask"][row, length:] = 0
        inputs["input_ids"][row, 10 + length // 4 : 14] = 20
    return {**inputs, "labels": inputs["input_ids"]}


Make = Callable[[], tuple[nn.Module, Draw]]
"""Makes a model, and a function that draws a batch for it."""


@dataclass(frozen=True)
class Sub:
    name: str
    settings: dict[str, Any]

    def build(self) -> Any:
        return getattr(tf, self.name)(**built(self.settings))


def built(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.build() if isinstance(value, Sub) else value for name, value in settings.items()}


def sub(name: str, **settings: Any) -> Sub:
    return Sub(f"{name}Config", settings)


def row(name: str, draw: Draw, **settings: Any) -> Make:
    def make() -> tuple[nn.Module, Draw]:
        model = getattr(tf, name)
        return model(config=model.config_class(**built(settings))), draw

    return make


def encoder_decoder(name: str, draw: Draw, encoder: Sub) -> Make:
    """Returns the row of an encoder with Bert as its decoder."""
    decoder = sub("Bert", **TEXT, is_decoder=True, add_cross_attention=True)

    def make() -> tuple[nn.Module, Draw]:
        joined = getattr(tf, f"{name}Config").from_encoder_decoder_configs(
            encoder.build(), decoder.build(), decoder_start_token_id=1, pad_token_id=0
        )
        return getattr(tf, f"{name}Model")(config=joined), draw

    return make


def without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def clip_distilled() -> tuple[nn.Module, Draw]:
    """Returns two models; the frozen one teaches the other by its hidden states."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = tf.CLIPVisionConfig(**VISION, attn_implementation="eager")
            self.student, self.teacher = tf.CLIPVisionModel(config), tf.CLIPVisionModel(config).requires_grad_(False)

        def forward(self, pixel_values):
            student = self.student(pixel_values, output_hidden_states=True, output_attentions=True)
            with torch.no_grad():
                teacher = self.teacher(pixel_values, output_hidden_states=True)
            pairs = zip(student.hidden_states, teacher.hidden_states, strict=True)
            return sum((mine - theirs).square().mean() for mine, theirs in pairs) + student.attentions[0].std()

    return Distilled(), batch(pixel_values=IMAGES)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": NUM_WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
LANGUAGE = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
DEEP = {**LANGUAGE, "num_hidden_layers": 4, "tie_word_embeddings": True}
MEL = {"num_mel_bins": 16, "max_source_positions": 32}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
# fmt: off
ENCODED = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
DECODED = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
SEQ2SEQ = {**ENCODED, **DECODED, "vocab_size": 99, "pad_token_id": 0, "decoder_start_token_id": 1}
BART = {**SEQ2SEQ, "max_position_embeddings": 64}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}
WAVES = {**SIZES, "conv_dim": (16, 16), "conv_kernel": (8, 8), "conv_stride": (4, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 99}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
DETR = {**ENCODED, **DECODED, "num_queries": 6, "num_labels": 3, "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None}
SWIN = {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 2,
        "patch_size": 2}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_TEXT = {**LANGUAGE, "rope_scaling": ROPE, "rope_parameters": ROPE}
QWEN_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
OMNI_TOKENS = without(QWEN_TOKENS, "vision_end_token_id") | {"audio_token_id": 7, "audio_start_token_id": 8}
QWEN_EYES = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
             "hidden_size": 32}
WINDOWED = QWEN_EYES | {"intermediate_size": 64, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
STACKED = QWEN_EYES | {"intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 16,
                       "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
           "decoder_intermediate_size": 32}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MARKED, MARKED_LONG = {"length": 16, "marks": 4}, {"length": 24, "marks": 16}
OMNI = {"image_token_index": 3, "audio_token_index": 7, "audio_config": {**MEL, **ENCODED, "output_dim": 32,
        "n_window": 8}, "vision_config": WINDOWED, "text_config": QWEN_TEXT, **OMNI_TOKENS}

TOWERS = {
    "clip": row("CLIPModel", pair, text_config=TEXT | {"eos_token_id": 2}, vision_config=VISION, projection_dim=16),
    "siglip": row("SiglipModel", pair, text_config=TEXT, vision_config=VISION),
    "x_clip": row("XCLIPModel", batch(input_ids=words, pixel_values=(4, 2, 3, 32, 32), return_loss=True),
        text_config=TEXT | {"eos_token_id": 2}, projection_dim=32, vision_config={
            **VISION, "num_frames": 2, "mit_hidden_size": 32, "mit_intermediate_size": 64,
            "mit_num_attention_heads": 4}),
    "flava": row("FlavaModel", both, text_config=TEXT, image_config=VISION, multimodal_config=SIZES,
                 image_codebook_config={}, projection_dim=16),
    "bridge_tower": row("BridgeTowerModel", both, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        contrastive_hidden_size=16, text_config=TEXT | {"max_position_embeddings": 80, "hidden_size": 64},
        vision_config=VISION | {"num_hidden_layers": 3, "hidden_size": 64}),
    "clip_distilled": clip_distilled,
}

SEEING = {
    "llava": row("LlavaForConditionalGeneration", sentences(**MARKED_LONG, pixel_values=IMAGES, use_cache=False),
        vision_config=sub("CLIPVision", **VISION), text_config=sub("Llama", **LANGUAGE), image_token_index=3),
    "paligemma": row("PaliGemmaForConditionalGeneration", sentences(
        **MARKED_LONG, pixel_values=IMAGES, token_type_ids=ones(4, 24),
    ), vision_config=sub("SiglipVision", **VISION, projection_dim=32), text_config=sub("Gemma", **LANGUAGE),
        image_token_id=3, projection_dim=32),
    "gemma3_with_images": row("Gemma3ForConditionalGeneration", sentences(
        **MARKED, pixel_values=IMAGES, token_type_ids=with_marks(ones(4, 16) * 0, 1, 4),
    ), vision_config=VISION | {"model_type": "siglip_vision_model"}, text_config=LANGUAGE | {"sliding_window": 8},
        mm_tokens_per_image=4, image_token_index=3, boi_token_index=4, eoi_token_index=5),
    "blip_2": row("Blip2ForConditionalGeneration", sentences(length=16, marks=6, pixel_values=IMAGES),
        vision_config=VISION, qformer_config=TEXT | {"encoder_hidden_size": 32}, num_query_tokens=6,
        image_token_index=3, text_config=sub("OPT", **SIZES, vocab_size=99, ffn_dim=64, word_embed_proj_dim=32,
                                             max_position_embeddings=64)),
    "mllama": row("MllamaForConditionalGeneration", sentences(
        length=16, marks=1, pixel_values=(4, 1, 1, 3, 32, 32), aspect_ratio_ids=ones(4, 1),
        aspect_ratio_mask=ones(4, 1, 1), cross_attention_mask=ones(4, 16, 1, 1),
    ), image_token_index=3, vision_config={
        **SIZES, "image_size": 32, "patch_size": 8, "num_global_layers": 1, "vision_output_dim": 64,
        "attention_heads": 4, "intermediate_layers_indices": [0], "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]]},
        text_config={**LANGUAGE, "cross_attention_layers": [1], "rope_scaling": PLAIN_ROPE,
                     "rope_parameters": PLAIN_ROPE}),
    "florence2": row("Florence2ForConditionalGeneration", batch(
        input_ids=lambda drawn: with_marks(words(drawn, length=24), 3, 17), pixel_values=IMAGES, labels=ANSWER,
    ), image_token_id=3, vision_config={
        "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4], "depths": [1, 1], "projection_dim": 32,
        "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True],
        "window_size": 4},
        text_config=sub("Bart", **without(BART, "pad_token_id", "decoder_start_token_id"))),
    "voxtral": row("VoxtralForConditionalGeneration", sentences(**MARKED_LONG, input_features=(4, 16, 64)),
                   audio_config=SIZES | MEL, text_config=sub("Llama", **LANGUAGE), audio_token_id=3),
    "qwen3_vl": row("Qwen3VLForConditionalGeneration", qwen, vision_config=STACKED, text_config=QWEN_TEXT,
                    **QWEN_TOKENS),
    "qwen2_5_omni_thinker": row("Qwen2_5OmniThinkerForConditionalGeneration", omni, **OMNI),
    "qwen2_5_omni_thinker_other_lengths": row("Qwen2_5OmniThinkerForConditionalGeneration",
                                              omni_of_other_lengths, **OMNI),
}

SPEECH = {
    "wav2vec2_ctc": row("Wav2Vec2ForCTC", waves, **WAVES, layerdrop=0.3, mask_time_length=2),
    "wav2vec2_pretraining": row("Wav2Vec2ForPreTraining", batch(
        input_values=(4, 512), mask_time_indices=chosen(4, 30),
        sampled_negative_indices=lambda drawn: torch.randint(0, 30, (4, 30, 3), generator=drawn),
    ), **WAVES, codevector_dim=16, num_codevectors_per_group=8, num_codevector_groups=2, proj_codevector_dim=16),
    "whisper": row("WhisperForConditionalGeneration", batch(input_features=(4, 16, 64), labels=ANSWER), **SEQ2SEQ,
                   **MEL, max_target_positions=32, apply_spec_augment=True, mask_time_length=2),
    "speecht5_to_text": row("SpeechT5ForSpeechToText", waves, **WAVES, **without(SEQ2SEQ, "d_model", "vocab_size"),
                            mask_time_length=2),
    "speech_encoder_decoder": encoder_decoder("SpeechEncoderDecoder", waves,
                                              sub("Wav2Vec2", **WAVES, mask_time_length=2)),
    "seamless_m4t": row("SeamlessM4TForSpeechToText", batch(input_features=(4, 24, 16), labels=ANSWER),
        vocab_size=99, t2u_vocab_size=99, hidden_size=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, speech_encoder_layers=1,
        speech_encoder_attention_heads=4, speech_encoder_intermediate_size=64, feature_projection_input_dim=16,
        t2u_encoder_layers=1, t2u_decoder_layers=1, unit_embed_dim=8, lang_embed_dim=8, spkr_embed_dim=8,
        upsample_initial_channel=16, pad_token_id=0, decoder_start_token_id=1, max_position_embeddings=64),
}

LANGUAGES = {
    "t5": row("T5ForConditionalGeneration", translated, **T5),
    "switch_transformers": row("SwitchTransformersForConditionalGeneration", translated, **T5, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.1),
    "bart": row("BartForConditionalGeneration", translated, **BART, encoder_layerdrop=0.2, decoder_layerdrop=0.2),
    "encoder_decoder": encoder_decoder("EncoderDecoder", translated, sub("Bert", **TEXT)),
    "mixtral": row("MixtralForCausalLM", predicted, **LANGUAGE, num_local_experts=4, num_experts_per_tok=2),
    "mamba": row("MambaForCausalLM", predicted, vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2,
                 use_cache=False),
    "recurrent_gemma": row("RecurrentGemmaForCausalLM", predicted,
        **without(LANGUAGE, "head_dim", "max_position_embeddings"), lru_width=32, attention_window_size=8,
        block_types=["recurrent", "attention"], use_cache=False),
    "llama_with_cache": row("LlamaForCausalLM", predicted, **LANGUAGE),
    "gemma2": row("Gemma2ForCausalLM", predicted, **LANGUAGE, sliding_window=8),
    "gpt2": row("GPT2LMHeadModel", predicted, vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                bos_token_id=1, eos_token_id=2),
    "big_bird": row("BigBirdForMaskedLM", sentences(length=64), **TEXT | {"max_position_embeddings": 128},
                    block_size=4, num_random_blocks=1),
    "xlnet": row("XLNetLMHeadModel", predicted, vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=64),
}

PICTURES = {
    "dinov2": row("Dinov2ForImageClassification", classified, **VISION, drop_path_rate=0.3),
    "vit_mae": row("ViTMAEForPreTraining", batch(pixel_values=IMAGES), **VISION, **DECODER),
    "resnet": row("ResNetForImageClassification", classified_large, **RESNET),
    "detr": row("DetrForObjectDetection", boxes, **DETR,
                backbone_config=sub("ResNet", **RESNET, out_features=["stage4"])),
    "grounding_dino": row("GroundingDinoForObjectDetection", batch(
        pixel_values=LARGE, input_ids=lambda drawn: words(drawn, 2, 8),
    ), backbone_config=sub("Swin", **SWIN, out_features=STAGES[1:]), text_config=sub("Bert", **TEXT), **ENCODED,
        **DECODED, num_queries=6, num_feature_levels=3, max_text_len=16, use_timm_backbone=False, backbone=None),
    "perceiver": row("PerceiverForImageClassificationLearned", batch(inputs=IMAGES, labels=CLASSES), num_latents=8,
        d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4,
        num_cross_attention_heads=4, image_size=32, num_labels=3),
}

LISTS = {
    "llama": row("LlamaForCausalLM", ragged, **DEEP, attention_dropout=0.1),
    "qwen2": row("Qwen2ForCausalLM", ragged, **DEEP, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3_moe_with_router_loss": row("Qwen3MoeForCausalLM", ragged, **DEEP, **EXPERTS, output_router_logits=True),
    "gemma3_text": row("Gemma3ForCausalLM", ragged, **DEEP, sliding_window=8),
    "opt": row("OPTForCausalLM", ragged, vocab_size=99, hidden_size=32, ffn_dim=64, num_hidden_layers=4,
               num_attention_heads=4, word_embed_proj_dim=16, max_position_embeddings=64),
    "idefics": row("IdeficsForVisionText2Text", sentences(
        pixel_values=(4, 1, 3, 32, 32), image_attention_mask=ones(4, 12, 1),
    ), **TEXT | {"num_hidden_layers": 4}, cross_layer_interval=2, use_resampler=False, additional_vocab_size=0,
        qk_layer_norms=True, alpha_initializer="ones", vision_config={
            "embed_dim": 32, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64}),
    "llava_next": row("LlavaNextForConditionalGeneration", tiles,
        vision_config=sub("CLIPVision", **VISION | {"image_size": 16}), text_config=sub("Llama", **LANGUAGE),
        image_token_index=3, image_grid_pinpoints=[[16, 16]]),
}
# fmt: on

TRANSFORMERS = {
    "transformers: dual and fusion encoders": TOWERS,
    "transformers: language models that see and hear": SEEING,
    "transformers: speech": SPEECH,
    "transformers: text and series": LANGUAGES,
    "transformers: images and videos": PICTURES,
}
"""By kind, then by name."""


def find(name: str) -> Make:
    return next(table[name] for table in TRANSFORMERS.values() if name in table)


def train_model(session: Session, make: Make, steps: int = 4) -> None:
    """Colocates a model and trains it for a few steps, each on another batch."""
    model, draw = make()
    model.train()
    session.colocate(model, moved(draw(Generator().manual_seed(0))))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        loss = _loss_of(model(**moved(draw(Generator().manual_seed(step)))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.note(loss.item())


def _loss_of(output: Any) -> Tensor:
    """Returns the loss of a model, or the sum of its results' mean squares if it has none."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    return torch.stack([tensor.square().mean() for tensor in _trained_tensors(output)]).sum()


def _trained_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad and output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _trained_tensors(part)
