from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from mosaic.retrain.worker.positions import drawn_under, generators_of, seed_step


def draw() -> tuple[float, ...]:
    return torch.rand(()).item(), float(np.random.rand()), float(np.random.normal()), random.random()


def test_drawn_numbers_depend_on_seed_and_position_and_states_are_restored_also_after_an_error():
    np.random.seed(0)
    np.random.normal()  # leaves the other half of a pair
    own = np.random.default_rng(5)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    drawn = []

    def draw_and_fail() -> None:
        drawn.append((*draw(), own.random()))
        raise ZeroDivisionError

    for seed, position in ((3, 7), (3, 8), (4, 7), (3, 7)):
        with pytest.raises(ZeroDivisionError), drawn_under(seed, position, (own,)):
            draw_and_fail()
    assert drawn[0] == drawn[-1]
    assert len({value for values in drawn for value in values}) == 3 * 5
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))
    assert own.random() == np.random.default_rng(5).random()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.generator = torch.Generator()
        self.rngs = [np.random.default_rng(0), random.Random(0), np.random.RandomState(0)]
        self.rngs.append(self.rngs[0])

    def draw(self) -> tuple[float, ...]:
        own, other, legacy = self.rngs[:3]
        return torch.rand((), generator=self.inner.generator).item(), own.random(), other.random(), legacy.rand()


def test_a_step_seeds_the_default_generators_and_the_models_own():
    model = Noisy()
    generators = generators_of(model)
    keys = ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0))
    drawn = []
    for key in keys:
        seed_step(*key, generators)
        drawn.append((*draw(), *model.draw()))
    assert drawn[-1] == drawn[0]
    assert len({value for values in drawn for value in values}) == 4 * 8


def test_generators_of_a_data_set_lie_in_its_transforms():
    class Transform:
        def __init__(self) -> None:
            self.rng = random.Random(0)

    class Data:
        def __init__(self) -> None:
            self.transforms, self.rows, self.itself = {"image": [Transform()]}, [Transform()] * 100, self

    data = Data()
    assert generators_of(data) == (data.transforms["image"][0].rng,)
