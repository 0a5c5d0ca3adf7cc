"""Models of several lists of layers that feed each other."""

from __future__ import annotations

import pytest
from part_models import SEVERAL_MODULES
from parted_equality import check_equal


@pytest.mark.parametrize("name", SEVERAL_MODULES)
def test_chunks_of_several_modules_give_the_plain_models_loss_and_gradients(name: str):
    check_equal(SEVERAL_MODULES[name])
