from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mosaic.retrain.worker.seeds import drawn_under, generators_of, seed_step


def draw() -> tuple[float, ...]:
    return torch.rand(()).item(), float(np.random.rand()), float(np.random.normal()), random.random()


def test_what_is_drawn_depends_on_seed_and_position_alone():
    with drawn_under(3, 7):
        first = draw()
    draw()
    with drawn_under(3, 7):
        assert draw() == first
    for seed, position in ((3, 8), (4, 7)):
        with drawn_under(seed, position):
            assert not set(draw()) & set(first)


def test_random_states_are_as_before_also_after_an_error():
    np.random.seed(0)
    np.random.normal()  # leaves the other half of a pair
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with pytest.raises(ZeroDivisionError), drawn_under(0, 5):
        int(draw()[0]) / 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert str(states[2]) == str(np.random.get_state())
    assert states[2][3] == np.random.get_state()[3] == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.generator = torch.Generator()
        self.rngs = [np.random.default_rng(0), random.Random(0), np.random.RandomState(0)]
        self.rngs.append(self.rngs[0])

    def draw(self) -> list[float]:
        generator, other, legacy = self.rngs[:3]
        return [
            torch.rand((), generator=self.inner.generator).item(),
            generator.random(),
            other.random(),
            legacy.rand(),
        ]


def test_a_step_seeds_the_default_generators_and_the_models_own():
    model = Noisy()
    generators = generators_of(model)
    found: dict[Any, tuple[float, ...]] = {}
    for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)):
        seed_step(*key, generators)
        found[key] = (*draw(), *model.draw())
    seed_step(1, 0, 0, generators)
    assert (*draw(), *model.draw()) == found[1, 0, 0]
    assert len({value for values in found.values() for value in values}) == 4 * 8


def test_generators_of_a_data_set_are_found_within_its_transforms():
    class Transform:
        def __init__(self) -> None:
            self.rng = random.Random(0)

    class Data:
        def __init__(self) -> None:
            self.transforms = {"image": [Transform()]}
            self.rows = [Transform()] * 100

    data = Data()
    data.itself = data  # type: ignore[attr-defined]
    assert generators_of(data) == (data.transforms["image"][0].rng,)


def test_generators_within_a_block_are_put_back():
    rng = np.random.default_rng(5)
    with drawn_under(0, 1, (rng,)):
        first = rng.random()
    after = rng.random()
    with drawn_under(0, 1, (rng,)):
        assert rng.random() == first
    assert after == np.random.default_rng(5).random()
