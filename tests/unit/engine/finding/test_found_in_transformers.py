"""The modules that are found in models of transformers, as a table that a person can look through.

``a + b > c`` says that a and b can run beside each other, and c after them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mosaic.engine import find_modules
from mosaic.engine.finding.find import Finding

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra [examples] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]

FAMILIES = {
    "clip": "towers beside each other",
    "x_clip": "heads behind towers",
    "flava": "towers beside each other, and a third behind both",
    "bridge_tower": "towers whose layers feed each other's, and a module that is called twice",
    "clip_distilled": "two whole models",
    "llava": "a tower in front of a language model",
    "paligemma": "a tied head",
    "blip_2": "a module between tower and language model",
    "mllama": "a tower that feeds deeper layers of one language model",
    "florence2": "tables that encoder and decoder share",
    "qwen2_5_omni_thinker": "towers that pack their inputs",
    "wav2vec2_ctc": "speech",
    "seamless_m4t": "text beside speech",
    "detr": "a backbone and heads",
    "perceiver": "latents",
}
"""Models, each of which stands for a mechanism."""
TABLE = Path(__file__).parents[3] / "golden" / "found_in_transformers.txt"


def lines(name: str, finding: Finding) -> Iterator[str]:
    yield f"{name}: {' > '.join(' + '.join(names) for names in finding.graph.levels)}"
    for module, reason in finding.left_out.items():
        yield f"    not {module}: {reason.partition(' (')[0]}"
    for module, reason in finding.in_place.items():
        yield f"    in place {module}: {reason.partition(' (')[0]}"


def built(make: Callable[[], Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model and a batch, always the same, for training without a cache; chance leaves no layer out."""
    torch.manual_seed(0)
    model, draw = make()
    for part in model.modules():
        if hasattr(part, "layerdrop"):
            part.layerdrop = 0.0
        if hasattr(part, "config"):
            part.config.use_cache = False
    return model.train(), draw(torch.Generator().manual_seed(0))


def test_each_model_has_the_modules_that_a_person_would_place(tmp_path: Path):
    from bench.sweep.models import find

    makers = {name: find(name) for name in FAMILIES}
    found = [line for name, make in makers.items() for line in lines(name, find_modules(*built(make)))]
    (made := tmp_path / TABLE.name).write_text("\n".join(found) + "\n", encoding="utf-8")
    expected = TABLE.read_text(encoding="utf-8").splitlines()
    difference = "\n".join(difflib.unified_diff(expected, found, str(TABLE), str(made), lineterm="", n=0))
    assert found == expected, difference


def test_a_module_that_is_left_out_for_its_cache_is_placed_once_the_advice_is_taken():
    from bench.sweep.models import find

    model, draw = find("encoder_decoder")()
    batch = draw(torch.Generator().manual_seed(0))
    left_out = find_modules(model, batch).left_out
    caching = {name for name, why in left_out.items() if "model(..., use_cache=False)" in why.remedy}
    assert caching
    assert caching <= set(find_modules(model, {**batch, "use_cache": False}).graph.names)
