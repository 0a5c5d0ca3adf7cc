"""Models that pipelines are for: one or several lists of layers, of transformers, of torch, and written by hand."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from bench.sweep.models.pieces import LANGUAGE, TEXT, Made, images, labelled, real, words

_DEEP = {**LANGUAGE, "num_hidden_layers": 4, "tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}


def _predicted(drawn):
    """Returns rows of other lengths, of which the last is padded."""
    inputs = labelled(words(drawn, length=16))
    inputs["attention_mask"][-1, 10:] = 0
    return inputs


def _decoder(config: type, model: type, **more) -> Made:
    return model(config(**{**_DEEP, **more})), _predicted


def llama() -> Made:
    return _decoder(tf.LlamaConfig, tf.LlamaForCausalLM, attention_dropout=0.1)


def qwen2() -> Made:
    return _decoder(tf.Qwen2Config, tf.Qwen2ForCausalLM, use_sliding_window=True, sliding_window=8, max_window_layers=2)


def qwen3() -> Made:
    return _decoder(tf.Qwen3Config, tf.Qwen3ForCausalLM)


def qwen3_moe_with_router_loss() -> Made:
    return _decoder(tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM, **_EXPERTS)


def gemma() -> Made:
    return _decoder(tf.GemmaConfig, tf.GemmaForCausalLM)


def gemma3_text() -> Made:
    return _decoder(tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, sliding_window=8)


def mistral() -> Made:
    return _decoder(tf.MistralConfig, tf.MistralForCausalLM, sliding_window=8)


def phi() -> Made:
    return _decoder(tf.PhiConfig, tf.PhiForCausalLM, tie_word_embeddings=False)


def phi3() -> Made:
    return _decoder(tf.Phi3Config, tf.Phi3ForCausalLM)


def gpt_2() -> Made:
    config = tf.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config), _predicted


def gpt_neox() -> Made:
    return _decoder(tf.GPTNeoXConfig, tf.GPTNeoXForCausalLM, hidden_dropout=0.1)


def opt() -> Made:
    config = tf.OPTConfig(vocab_size=99, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4,
                          word_embed_proj_dim=16, max_position_embeddings=64)  # fmt: skip
    return tf.OPTForCausalLM(config), _predicted


def roberta() -> Made:
    return tf.RobertaForMaskedLM(tf.RobertaConfig(**{**TEXT, "num_hidden_layers": 4})), _predicted


def idefics() -> Made:
    vision = {"embed_dim": 32, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 64}  # fmt: skip
    config = tf.IdeficsConfig(
        **{**TEXT, "num_hidden_layers": 4}, vision_config=vision, cross_layer_interval=2, use_resampler=False,
        additional_vocab_size=0, qk_layer_norms=True, alpha_initializer="ones",
    )  # fmt: skip
    return tf.IdeficsForVisionText2Text(config), lambda drawn: labelled(
        words(drawn),
        pixel_values=real(drawn, 4, 1, 3, 32, 32),
        image_attention_mask=torch.ones(4, 12, 1, dtype=torch.long),
    )


def llava_next() -> Made:
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                          num_attention_heads=4, image_size=16, patch_size=8),
        text_config=tf.LlamaConfig(**LANGUAGE), image_token_index=3, image_grid_pinpoints=[[16, 16]],
    )  # fmt: skip

    def draw(drawn):
        tokens = words(drawn, length=24)
        tokens[:, 1:11] = 3  # 4 of the whole image, 4 of its only tile, and 2 ends of rows
        return labelled(tokens, pixel_values=real(drawn, 4, 2, 3, 16, 16), image_sizes=torch.full((4, 2), 16))

    return tf.LlavaNextForConditionalGeneration(config), draw


class _Classifier(nn.Module):
    """Words, layers and a head."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(99, 32), layers, nn.Linear(32, 3)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)).mean(1))


def encoder_of_torch() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(32))
    return _Classifier(layers), lambda drawn: {"ids": words(drawn)}


def transformer_of_torch() -> Made:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(99, 32)
            self.inner = nn.Transformer(32, 4, 3, 3, 64, dropout=0.1, batch_first=True)
            self.head = nn.Linear(32, 99)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.inner(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))

    return Translator(), lambda drawn: {"source": words(drawn), "target": words(drawn, length=8)}


def sequential() -> Made:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 2)), lambda drawn: {"input": real(drawn, 8, 16)}


def sequential_that_writes_in_place() -> Made:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.0))]
    return nn.Sequential(*layers), lambda drawn: {"input": real(drawn, 8, 16)}


class _Block(nn.Module):
    """A block of a vision transformer, with scaled residuals that are dropped by rows."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale, self.rate = nn.Parameter(torch.full((32,), 0.1)), rate

    def forward(self, x):
        normed = self.norm(x)
        x = x + self._dropped(self.attend(normed, normed, normed, need_weights=False)[0] * self.scale)
        return x + self._dropped(self.mlp(x))

    def _dropped(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 1 - self.rate, dtype=x.dtype))


class _Patches(nn.Module):
    """A vision transformer as timm writes it: blocks in a Sequential, a class token, positions."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 17, 32))
        self.pos_drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(32)
        self.blocks = nn.Sequential(*(_Block(0.1 * index) for index in range(depth)))

    def forward(self, image):
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = self.pos_drop(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed)
        return self.norm(self.blocks(x))[:, 0]


def blocks_of_timm() -> Made:
    return nn.Sequential(_Patches(), nn.Linear(32, 3)), lambda drawn: {"input": images(drawn)}


def image_bind() -> Made:
    """Makes towers of three kinds whose results are pulled together, two and two."""

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.image, self.text = _Patches(3), _Classifier(nn.TransformerEncoder(layer, 3))
            self.sound = nn.ModuleDict(
                {"stem": nn.Linear(16, 32), "trunk": nn.ModuleList(_Block(0.1) for _ in range(3))}
            )
            self.text.head = nn.Linear(32, 32)
            self.heat = nn.Parameter(torch.tensor(1.0))

        def forward(self, image, ids, sound):
            heard = self.sound["stem"](sound)
            for block in self.sound["trunk"]:
                heard = block(heard)
            made = [nn.functional.normalize(one, dim=-1) for one in (self.image(image), self.text(ids), heard.mean(1))]
            same = torch.arange(len(ids))
            pairs = ((made[0], made[1]), (made[0], made[2]))
            return sum(nn.functional.cross_entropy(self.heat.exp() * one @ other.T, same) for one, other in pairs)

    return Bound(), lambda drawn: {"image": images(drawn), "ids": words(drawn), "sound": real(drawn, 4, 6, 16)}
