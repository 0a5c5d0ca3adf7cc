"""The command line's surface: few options, each declared once."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from mosaic.cli import options
from mosaic.cli.main import COMMANDS
from mosaic.cli.options import open_named_backend
from mosaic.errors import MosaicError

SHARED = {name: hint for name, hint in vars(options).items() if hasattr(hint, "__metadata__")}
"""Types of options that several commands share, with their help."""


def test_there_are_at_most_45_options_and_shared_ones_are_declared_once():
    own = []
    for command in COMMANDS.values():
        hints = get_type_hints(command, include_extras=True)
        own += [field.name for field in dataclasses.fields(command) if hints[field.name] not in SHARED.values()]
    assert len(own) + len(SHARED) <= 45
    assert not {"json", "model", "backend", "method", "max_foreign_share"} & set(own)


@pytest.mark.parametrize("name", ["tpu", "host:x", "cuda:-1", ""])
def test_a_backend_that_is_none_is_refused_with_the_names_that_there_are(name: str):
    with pytest.raises(MosaicError, match="use cuda, host, or cuda:1"):
        open_named_backend(name)
