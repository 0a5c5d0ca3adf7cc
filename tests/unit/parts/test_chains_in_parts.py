"""Models of one list of layers, cut between them."""

from __future__ import annotations

import pytest
from part_models import DECODERS, ENCODERS
from parted_equality import check_equal


@pytest.mark.parametrize("name", DECODERS)
def test_chunks_of_a_decoder_give_the_plain_models_loss_and_gradients(name: str):
    check_equal(DECODERS[name])


@pytest.mark.parametrize("name", ENCODERS)
def test_chunks_of_an_encoder_give_the_plain_models_loss_and_gradients(name: str):
    check_equal(ENCODERS[name])
