"""The command line's surface: few options, each declared once."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import tyro

from mosaic.cli import options
from mosaic.cli.main import COMMANDS
from mosaic.cli.retrain import Retrain

POSITIONAL = get_args(tyro.conf.Positional[int])[1]
SHARED = {name: hint for name, hint in vars(options).items() if hasattr(hint, "__metadata__")}
"""Types of options that several commands share, with their help."""


def is_positional(hint: object) -> bool:
    return POSITIONAL in getattr(hint, "__metadata__", ())


def test_there_are_at_most_45_options_and_shared_ones_are_declared_once():
    own = []
    choices = get_args(get_type_hints(Retrain, include_extras=True)["action"])
    actions = [get_args(choice)[0] for choice in choices]
    commands = [command for name, command in COMMANDS.items() if name != "retrain"]
    for command in (*commands, *actions):
        hints = get_type_hints(command, include_extras=True)
        own += [
            field.name
            for field in dataclasses.fields(command)
            if hints[field.name] not in SHARED.values() and not is_positional(hints[field.name])
        ]
    shared = [hint for hint in SHARED.values() if not is_positional(hint)]
    assert len(own) + len(shared) <= 45
    assert not {"json", "model", "backend", "method", "strict"} & set(own)
