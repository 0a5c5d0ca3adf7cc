"""The example of gluing learns from the demo's data, and equals the same file without the line that Mosaic adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_cases import Ran, assert_equal, run_colocated, run_plain

from mosaic.glue import MultimodalModel

pytest.importorskip("sklearn", reason="needs the extra demo")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own

PLACED = {"vision", "audio", "language_model"}


def check(arguments: list[str]) -> Ran:
    """Batches without a modality are shorter, and run in place; so does the language model, whose head is tied."""
    ran = run_colocated("glue.py", arguments)
    assert_equal(run_plain("glue.py", arguments), ran)
    assert set(ran.handles[0].graph.names) == PLACED
    assert {f"forward_ms/{name}" for name in PLACED - {"language_model"}} <= ran.metrics[0].keys()
    return ran


def test_a_glued_model_that_is_frozen_in_part_is_equal_and_saved_as_it_was_trained(tmp_path: Path):
    arguments = ["--steps", "3", "--rows", "4", "--device", "cpu", "--save", str(tmp_path)]
    ran = check([*arguments, "--freeze", "vision.model", "audio.model"])
    trained: MultimodalModel = ran.returned[0]
    found = MultimodalModel.from_pretrained(tmp_path, callbacks={"audio.after": trained.audio.after})
    assert found.frozen == ("vision.model", "audio.model")
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in found.state_dict().items())
