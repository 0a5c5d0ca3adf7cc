"""What pieces of ``mosaic.parallel`` read besides their arguments: as in the plain code, or on the host an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from engine_cases import Glued, Record, assert_same
from hidden_state_cases import CASES, train
from stream_cases import FakeBackend
from torch import nn

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.errors import UnforeseenError


class Piece:
    """Stands for a part of a model whose calls are pieces of a block."""

    def __init__(self, name: str, part: nn.Module, block: Any) -> None:
        vars(self).update(_name=name, _part=part, _block=block)

    def __call__(self, *args: Any) -> Any:
        return self._block.run(self._name, self._part, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)

    def __getitem__(self, index: int) -> Any:
        return self._part[index]


class InPieces:
    """Stands for a model in one block."""

    def __init__(self, model: nn.Module, block: Any) -> None:
        self._model = model
        self.left, self.right = Piece("left", model.left, block), Piece("right", model.right, block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


RAISED = "an attribute is set around the call"
"""Nothing in a block is called again: what is set around a piece and back while its lane runs is an error."""
UNSEEN = ("an attribute of the class is", "a global is")
"""Outside of the contract of host lanes; without a model there is no sample's run that could show it."""
PIECES = [(case, "streams") for case in list(CASES)[::6]] + [
    (case, "host") for case in list(CASES)[::2] if case not in UNSEEN
]


@contextmanager
def error_of(case: str) -> Iterator[None]:
    """Lets pass what may be raised in a case, depending on how quick its lane is."""
    try:
        yield
    except UnforeseenError as error:
        told = "was changed while its lane had not finished" in str(error) and "call 'left' without run()" in str(error)
        if case != RAISED or not told:
            raise


@pytest.mark.parametrize(("case", "where"), PIECES)
def test_what_is_done_around_a_piece_is_seen_by_the_piece(case: str, where: str):
    torch.manual_seed(0)
    model: Any = CASES[case]()
    model.is_on, model.step = False, 0
    twin = copy.deepcopy(model)
    glue, backend = twin.glue, HostBackend(num_slots=2, num_threads=1) if where == "host" else FakeBackend(2)
    watching = backend.api.watching() if isinstance(backend, FakeBackend) else nullcontext()

    def in_block(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with mosaic.parallel({"left": 1, "right": 1}, backend=backend) as block:
            out = glue(InPieces(self, block), x, y)
        return out + 0

    twin.glue = in_block
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, ours = Record(), Record()
        torch.manual_seed(1)
        train(model, plain)
        torch.manual_seed(1)
        with error_of(case if where == "host" else ""), watching:
            train(twin, ours)
            assert_same(plain, ours)
    finally:
        torch.set_num_threads(threads)
