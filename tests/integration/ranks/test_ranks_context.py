"""One sequence over several ranks: the attention of one process, and models of transformers that train the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from attention_cases import cases
from hugging_face_cases import FAMILIES
from ranks.nursery import run_program, run_programs

SIZES = (1, 2, 4)


def answers(folder: Path, name: str, size: int) -> list[Any]:
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(size)]


def run(function: str, sizes: tuple[int, ...], folder: Path) -> None:
    asked = [(f"ranks.programs.context.{function}", size, folder / str(size)) for size in sizes]
    for ranks in run_programs(asked, seconds=90.0):
        assert [(rank.code, rank.said) for rank in ranks] == [(0, "")] * len(ranks)


def test_attention_is_dense_attention_and_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path):
    run("attention:compare", SIZES, tmp_path)
    found = {size: answers(tmp_path / str(size), "rank", size) for size in SIZES}
    bits: dict[str, set[str]] = {}
    for case in map(str, [*cases()]):
        for size, ranks in found.items():
            assert max(max(of_rank[case]["differs by"]) for of_rank in ranks) < 1e-13, (case, size)
            assert all(of_rank[case]["same twice"] for of_rank in ranks)
            mask = case.split("'")[1]
            bits.setdefault(mask, set()).update(str(of_rank[case]["out and dq"]) for of_rank in ranks)
    assert {mask: len(different) for mask, different in bits.items()} == dict.fromkeys(bits, 1)


def test_other_sequences_are_named_a_missing_modality_hangs_nobody_and_images_are_encoded_once(tmp_path: Path):
    run("attention:disagree", (3,), tmp_path)
    for ranks, said in answers(tmp_path / "3", "rank", 3):
        assert ranks == [1]
        assert said.startswith("ranks [1] of the context group have a different mask, block size or distribution")
    found = answers(tmp_path / "3", "items", 3)
    assert sorted(count for _, _, count in found) == [0, 1, 1]
    assert max(max(gradient, feature) for gradient, feature, _ in found) < 1e-14
    for tower, backbone, unused in answers(tmp_path / "3", "summed", 3):
        assert (tower, backbone, unused) == ([[1.0] * 3] * 3, [[3.0] * 3] * 3, None)


def test_models_of_transformers_train_as_on_one_rank(tmp_path: Path):
    run("hugging_face:train", (2,), tmp_path)
    for found in answers(tmp_path / "2", "rank", 2):
        assert found.keys() == FAMILIES.keys()
        for family, differs in found.items():
            assert differs["gradients"] < 1e-14, family
            assert differs["loss"] < 1e-6  # transformers computes it in 32 bits


def test_the_example_trains_as_one_process_does(tmp_path: Path):
    ended = run_program("ranks.programs.context.hugging_face:example", 2, tmp_path / "2", seconds=90.0)
    assert [one.code for one in ended] == [0, 0], ended
    said = re.findall(r"the loss differs by (\S+), gradients by (\S+)", ended[0].said)
    assert len(said) == 3
    assert max(float(loss) for loss, _ in said) < 1e-5  # transformers computes it in 32 bits
    assert max(float(gradients) for _, gradients in said) < 1e-11
    assert (tmp_path / "2" / "mask.png").exists()
