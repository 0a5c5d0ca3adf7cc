"""The command ``mosaic``: parses the command line, runs a command, and returns an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

import mosaic
from mosaic.cli.bench import Bench
from mosaic.cli.checkpoints import Checkpoints
from mosaic.cli.demo import Demo
from mosaic.cli.doctor import Doctor
from mosaic.cli.options import check
from mosaic.cli.plan import PlanCommand
from mosaic.cli.profile import ProfileCommand
from mosaic.cli.retrain import ACTIONS
from mosaic.cli.run import Run
from mosaic.errors import BackendUnavailableError, InfeasibleError, InvalidRecipeError, MosaicError

EXIT_CODES = """exit codes:
  0    done
  1    failed; the message names the cause and a remedy
  2    wrong command line, model sample or recipe
  3    no plan satisfies the constraints
  4    no usable GPU; the message says what is needed
  5    a day was refused or quarantined
  75   a day was interrupted; the next start resumes it
  130  interrupted"""

EVERYWHERE = """mosaic --version prints the version. Every command also takes
  --quiet    print only errors; results are in the files
  --verbose  log decisions, and print the traceback of an error"""

_LEVELS = {"--quiet": logging.ERROR, "--verbose": logging.INFO}
_CODES = {InvalidRecipeError: 2, InfeasibleError: 3, BackendUnavailableError: 4, MosaicError: 1, ValueError: 2}


def retrain() -> None:
    """Retrain a model on each day's data without supervision, and promote it if it passes the gate."""


COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": Demo,
    "doctor": Doctor,
    "profile": ProfileCommand,
    "plan": PlanCommand,
    "run": Run,
    "bench": Bench,
    "checkpoints": Checkpoints,
    "retrain": retrain,
}
"""Commands by name: dataclasses of options with a method ``execute``; ``retrain`` has subcommands."""


def _commands(words: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Returns the commands; ``plan --pipeline`` and ``plan --context`` have options of their own."""
    options = {word.partition("=")[0] for word in words if words[0] == "plan"}
    if "--pipeline" in options:
        return COMMANDS | {"plan": import_module("mosaic.cli.pipeline").PipelineCommand}
    if "--context" in options:
        return COMMANDS | {"plan": import_module("mosaic.cli.context").ContextCommand}
    return COMMANDS


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; see ``EXIT_CODES``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"mosaic {mosaic.__version__}")
        return 0
    if words[:1] != ["doctor"]:  # doctor reports them; torch and CUDA read them once
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning idle threads take cores from other lanes
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # one hardware queue per lane
    level = next((_LEVELS[word] for word in reversed(words) if word in _LEVELS), logging.WARNING)
    words = [word for word in words if word not in _LEVELS]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("mosaic").setLevel(level)
    parse = partial(
        tyro.extras.subcommand_cli_from_dict, config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    )
    try:
        if words[:1] == ["retrain"]:
            with import_module("mosaic.retrain.folder").named_remedy():
                return parse(ACTIONS, prog="mosaic retrain", description=retrain.__doc__, args=words[1:]) or 0
        description = f"Run the unequal modules of a multimodal model side by side.\n\n{EVERYWHERE}\n\n{EXIT_CODES}"
        command: Any = parse(_commands(words), prog="mosaic", description=description, args=words)
        check(command)
        return command.execute() or 0
    except BrokenPipeError:  # closed standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MosaicError, ValueError, OSError) as error:
        file = error.filename if isinstance(error, OSError) else None  # of a system call
        text = f"cannot use {file}: {error.strerror}" if isinstance(error, OSError) and file is not None else error
        Console(stderr=True).print(f"mosaic: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
        if level <= logging.INFO:
            Console(stderr=True).print_exception()
        return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        Console(stderr=True).print("mosaic: interrupted; no file is incomplete", style="red")
        return 130
