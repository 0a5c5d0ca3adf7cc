"""Random generators of the process and of the user are captured, compared and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mosaic.find.random_numbers import forked, generator_state, python_state, random_state, set_generator_state


def draws(gpus: tuple[torch.Generator, ...]) -> list[Any]:
    of_gpus = [torch.rand(2, generator=gpu).tolist() for gpu in gpus]
    return [torch.randn(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), *of_gpus]


def test_all_generators_of_the_process_go_on_where_they_were_behind_a_fork(monkeypatch: pytest.MonkeyPatch):
    gpus = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    before = random_state()
    with forked():
        first = draws(gpus)
        assert not before.is_same(random_state())
    assert before.is_same(random_state())
    assert draws(gpus) == first


def test_a_fork_of_torch_alone_leaves_the_numbers_of_python_and_numpy_where_they_are():
    before = python_state()
    with forked(torch.device("cpu"), python=False):
        first = torch.rand(2)
        random.random()
    assert torch.equal(torch.rand(2), first)
    assert not before.is_same(python_state())


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState])
def test_a_users_generator_goes_on_where_it_was(make: Any):
    generator = make()

    def draw() -> Any:
        if isinstance(generator, torch.Generator):
            return torch.rand(1, generator=generator).item()
        return generator.random() if hasattr(generator, "random") else generator.random_sample()

    state = generator_state(generator)
    first = draw()
    assert draw() != first
    set_generator_state(generator, state)
    assert draw() == first
