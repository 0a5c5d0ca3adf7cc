"""Later calls of a kind that do something else than its first one: found out, and made good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, pair_batch, run_both, train


def number(self: Doing, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return self.layers(x), int((x > 0).sum())


def key(self: Doing, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"many" if x[0, 0] > 0 else "few": self.layers(x)}


def passed_on(self: Doing, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(x)
    return hidden if x[0, 0] > 0 else hidden * 2


def layout(self: Doing, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(x)
    return hidden.T.contiguous().T if x[0, 0] > 0 else hidden


def by_number(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (left, weight), (right, other) = self.left(x), self.right(y)
    return left * weight + right * other


def by_key(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    return left.get("many", 0) * 3 + left.get("few", 0) + next(iter(right.values()))


def by_order(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    return left * left.stride(0) + right.is_contiguous()


def both(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) + self.right(y)


@pytest.mark.parametrize(("what", "glue"), [(number, by_number), (key, by_key), (passed_on, both), (layout, by_order)])
def test_what_a_result_is_besides_its_shape_may_depend_on_values(what: Callable[..., Any], glue: Callable[..., Any]):
    run_both(lambda: Glued(glue, Doing(what), Doing(what)), pair_batch(), SIDE_BY_SIDE, train(10), on_lanes=False)


def test_a_hook_that_takes_another_s_place_is_seen():
    def loop(model: Any, record: Record) -> None:
        for step in range(8):
            hook = model.left.register_forward_hook(lambda _, given, made, step=step: made * (1 + step // 4))
            loss = model(*pair_batch(step)).square().mean()
            loss.backward()
            hook.remove()
            record.note(loss)
            record.note_model(model)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop, on_lanes=False)
