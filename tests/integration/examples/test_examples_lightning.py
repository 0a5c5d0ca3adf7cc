"""Lightning's Trainer and Fabric: equal to the same file without the line that Mosaic adds."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from example_cases import check

pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="the extra [examples] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]


@pytest.mark.parametrize(("form", "precision"), [("trainer", "bf16-mixed"), ("fabric", "32-true")])
def test_a_lightning_loop_is_equal(form: str, precision: str):
    check("lightning_loop.py", ["--form", form, "--precision", precision], placed={"image", "sound", "text"})
