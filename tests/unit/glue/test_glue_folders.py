"""Glued models in folders: round trips are equal bit for bit, and what a folder does not hold is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import glued_models as cases
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from mosaic.errors import InvalidCheckpointError, UnsupportedModelError
from mosaic.glue import MultimodalModel, Tower

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # transformers' own


class OwnEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 24)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.layer(pixel_values.flatten(2).unflatten(2, (4, 16)).transpose(1, 2).flatten(2))


def half(inputs: dict[str, Any], output: Any) -> torch.Tensor:
    return getattr(output, "last_hidden_state", output) / 2


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    own, theirs = one.state_dict(), other.state_dict()
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    assert_same_weights(one, other)
    given = cases.batch()
    assert torch.equal(one.eval()(**given).logits, other(**given).logits)


def test_a_folder_gives_back_the_model_that_was_saved_bit_for_bit(tmp_path: Path):
    torch.manual_seed(0)
    model = cases.glued(tie_word_embeddings=True).freeze("vision.model", "language_model.lm_head")
    model.save_pretrained(tmp_path)
    found = MultimodalModel.from_pretrained(tmp_path)
    assert_equal(model, found)
    assert found.frozen == ("vision.model", "language_model.lm_head")
    assert not found.training
    assert found.language_model.lm_head.weight is found.language_model.get_input_embeddings().weight
    for each in (model, found):
        each.unfreeze("vision.model", "language_model.lm_head")
    trains = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trains == {name for name, weight in found.named_parameters() if weight.requires_grad}


def test_modules_and_callbacks_of_the_users_own_are_handed_over(tmp_path: Path):
    torch.manual_seed(0)
    model = MultimodalModel(
        language_model=cases.language_model(tie_word_embeddings=True),
        vision=Tower(OwnEncoder(), projector=nn.Linear(24, cases.WIDTH), token=cases.IMAGE, after=half),
        audio=Tower(cases.hearing(), token=cases.AUDIO),
    )
    model.save_pretrained(tmp_path)
    modules = {"vision.model": OwnEncoder(), "vision.projector": nn.Linear(24, cases.WIDTH)}
    found = MultimodalModel.from_pretrained(tmp_path, modules=modules, callbacks={"vision.after": half})
    assert_equal(model, found)
    with pytest.raises(ValueError, match=r"pass callbacks=\{'vision.after': ...\}"):
        MultimodalModel.from_pretrained(tmp_path, modules=modules)
    with pytest.raises(ValueError, match=r"pass modules=\{'vision.model': ...\}"):
        MultimodalModel.from_pretrained(
            tmp_path,
            modules={"vision.projector": modules["vision.projector"]},
            callbacks={"vision.after": half},
        )
    with pytest.raises(ValueError, match=r"callbacks has audio\.after, which the saved model lacks"):
        MultimodalModel.from_pretrained(
            tmp_path, modules=modules, callbacks={"vision.after": half, "audio.after": half}
        )
    modules["vision.projector"] = nn.Linear(24, 3)
    with pytest.raises(InvalidCheckpointError, match=r"projector.safetensors does not have the projector of 'vision'"):
        MultimodalModel(language_model=found.language_model, vision=found.vision) and MultimodalModel.from_pretrained(
            tmp_path, modules=modules, callbacks={"vision.after": half}
        )


def test_a_tower_that_is_a_multimodal_model_is_a_folder_in_the_folder(tmp_path: Path):
    torch.manual_seed(0)
    model = cases.nested().freeze("speech.model.audio.model")
    model.speech.model.audio.after = half
    model.save_pretrained(tmp_path)
    callbacks = {"speech.before": cases.with_states, "speech.after": cases.last_states}
    found = MultimodalModel.from_pretrained(tmp_path, callbacks=callbacks | {"speech.model.audio.after": half})
    assert_same_weights(model, found)
    given = cases.nested_batch()
    assert torch.equal(model.eval()(**given).logits, found(**given).logits)
    assert found.frozen == ("speech.model.audio.model",)
    with pytest.raises(ValueError, match=r"pass callbacks=\{'speech.model.audio.after': ...\}"):
        MultimodalModel.from_pretrained(tmp_path, callbacks=callbacks)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("os:system", "which this version of transformers does not have"),
        ("somebody:Model", "which this version of transformers does not have"),
        ("transformers.models.qwen3.modeling_qwen3:Qwen3Config", "which this version of transformers does not have"),
        ("transformers.models.llama.modeling_llama:LlamaForCausalLM", "does not have the weights of"),
    ],
)
def test_a_class_that_is_not_the_one_that_was_saved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, match: str
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "somebody.py").write_text("raise SystemExit('code of a folder was run')")
    cases.glued().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "glue.json").read_text())
    (tmp_path / "glue.json").write_text(json.dumps(record | {"language_model": kind}))
    with pytest.raises((UnsupportedModelError, InvalidCheckpointError), match=match):
        MultimodalModel.from_pretrained(tmp_path)


def test_weights_that_are_missing_or_damaged_are_refused(tmp_path: Path):
    cases.glued().save_pretrained(tmp_path)
    weights = tmp_path / "audio" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(InvalidCheckpointError, match=r"audio does not have 'audio.model'"):
        MultimodalModel.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(InvalidCheckpointError, match=r"audio does not have 'audio.model'"):
        MultimodalModel.from_pretrained(tmp_path)


def test_adapters_are_merged_before_a_model_is_saved(tmp_path: Path):
    torch.manual_seed(0)
    model = cases.glued()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model.language_model = get_peft_model(model.language_model, config)
    with pytest.raises(UnsupportedModelError, match=r"adapters of peft; call merge_and_unload\(\) first"):
        model.save_pretrained(tmp_path)
    model.language_model = model.language_model.merge_and_unload()
    model.save_pretrained(tmp_path)
    assert_equal(model, MultimodalModel.from_pretrained(tmp_path))
