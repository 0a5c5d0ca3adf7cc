"""Hugging Face's models in its own loops, and peft's: equal to the same file without the line that Mosaic adds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from example_cases import check

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra [examples] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]

MERGING = {"model.multi_modal_projector", "model.language_model", "lm_head"}
PLACED = {
    "clip": {"vision_model", "text_model"},
    "llava": MERGING | {"model.vision_tower"},
    "audio": {"model.audio_tower", "model.language_model", "lm_head"},
}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Lets each test choose its precision, which accelerate keeps for the process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("model", "loop", "options"), [("llava", "trainer", []), ("audio", "bare", ["--bf16"])])
def test_a_hugging_face_model_is_equal(model: str, loop: str, options: list[str]):
    check("huggingface.py", ["--model", model, "--loop", loop, *options], placed=PLACED[model])


def test_a_model_with_lora_adapters_is_equal():
    check("frozen.py", ["--what", "lora"], placed={f"base_model.model.{name}" for name in PLACED["clip"]})
