"""``mosaic plan --pipeline``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.artifact import load
from mosaic.cli.main import run
from mosaic.pipelining.schedule import PipelineSchedule

QUICK = ("--seconds", "0.2")


def test_a_model_of_the_zoo_is_planned_beside_baselines_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output, picture = tmp_path / "schedule.json", tmp_path / "schedule.png"
    code = run(["plan", "--pipeline", "4", "--tensor", "4", *QUICK, "--output", str(output), "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert code == 0
    assert load(PipelineSchedule, output).num_microbatches == 16
    assert picture.stat().st_size > 10_000
    for word in ("planned", "megatron", "zb-v", "zb-v computes weight gradients separately", "longer than the best"):
        assert word in printed


def test_a_model_of_hugging_face_of_any_size_is_counted_on_the_meta_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "large.py").write_text(
        "import accelerate, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def make():\n"
        "    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=8,\n"
        "        num_attention_heads=64, num_key_value_heads=8, vocab_size=32000, use_cache=False)\n"
        "    with accelerate.init_empty_weights(include_buffers=False):\n"
        "        model = LlamaForCausalLM(config).bfloat16()\n"
        "    step = [torch.zeros(1, length, dtype=torch.long) for length in (1024, 512)] * 4\n"
        "    return model, [{'input_ids': ids, 'labels': ids} for ids in step]\n"
    )
    output = tmp_path / "s.json"
    asked = ["--tensor", "8", "--context", "2", "--data", "64", *QUICK, "--output", str(output)]
    assert run(["plan", "--pipeline", "4", "--model", f"{tmp_path / 'large.py'}:make", *asked]) == 0  # 4,096 GPUs
    printed = " ".join(capsys.readouterr().out.split())
    assert load(PipelineSchedule, output).num_microbatches == 8
    assert "gradient reduction over 128 ranks" in printed
