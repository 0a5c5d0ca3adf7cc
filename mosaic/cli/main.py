"""The command ``mosaic``: reads the command line, runs one of its commands, and answers with an exit code."""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded. Idle threads that spin would take cores from the other lanes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import arg, subcommand

from mosaic.backends.table import BackendName
from mosaic.cli.checkpoints import Checkpoints
from mosaic.cli.solve import Solve
from mosaic.errors import BackendUnavailableError, InfeasibleError, MosaicError

EXIT_CODES = """exit codes:
  0    done
  1    it could not be done; the message says why and what to do
  2    the command line is wrong
  3    no plan satisfies the constraints
  4    there is no GPU here that could do it; the message says what is needed
  130  interrupted"""

Json = Annotated[Path | None, arg(metavar="FILE")]
Model = Annotated[str, arg(metavar="FILE:FACTORY")]
Method = Literal[
    "auto", "exact", "gahc", "sequential", "megatron", "distmm", "distmm-waves", "spindle", "spindle-optimus"
]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a three-encoder model on real handwriting and synthetic speech, plain and colocated.

    Finds and profiles the encoders, solves for a plan, proves that colocated training gives the same numbers bit
    for bit, trains both ways in turn, and leaves profile, plan, measurements, a picture and a trace in a folder.
    Needs no GPU and under three minutes on two cores.
    """

    output: Path = Path("mosaic-demo")
    """Folder for what it leaves."""
    cache: Path | None = None
    """Folder of the data set; inside the output folder by default."""
    seed: int = 0
    """Seed of model, batches and dropout."""
    rounds: int = 12
    """Rounds of training, plain and colocated in turn."""
    steps_per_round: int = 20
    """Steps of each in a round."""
    max_foreign_share: float = 0.6
    """Refuse to profile where other processes take more of the CPU than this."""
    json: Json = None
    """Also write the run's record here; - for standard output."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine has, what works on it, what is missing and what to do.

    Without a GPU it says so and exits 0. With --model it looks at a model instead: what can be placed, and what cannot,
    with the line of its code and what to do; it exits 1 if the model cannot be colocated. With --trace it compares the
    ranks of a run, and names those that are slow.
    """

    model: Annotated[str | None, arg(metavar="FILE:FACTORY")] = None
    """The model to look at, such as train.py:make; see `mosaic profile --help`."""
    trace: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """What the ranks of a run left by handle.write_trace(folder): the files, or the folder."""
    json: Json = None
    """Write the report as JSON; - for standard output."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measure forward and backward of each module of a model at each quota, and modules side by side.

    FACTORY is a function in FILE that takes nothing and returns (model, sample) or (model, sample, loss): a module,
    one batch (dict of keywords, tuple of positions, or tensor), and a function from the model's output to a scalar.
    """

    model: Model
    """The model, such as train.py:make."""
    output: Path = Path("profile.json")
    """Where to write the profile."""
    quotas: str = "tenths"
    """Quotas to measure: tenths of the device, all, adaptive (where time bends), or numbers of slots such as 1,2,4."""
    bound: float = 0.05
    """With adaptive quotas: stop where samples that are left out are predicted with less than this relative error."""
    spread: float = 0.05
    """Repeat a measurement until its quartiles lie within this share of the median, ..."""
    sample_seconds: float = 1.0
    """... or until this time is spent."""
    degrees: str = "1"
    """Data-parallel degrees, such as 1,2,4. Those above 1 are composed: the time of a share of the batch here, and a
    communication model."""
    cluster: str | None = None
    """Devices and links to compose degrees for: a name such as h100-80g, or a .json file; by default the links that
    are measured between the ranks where torchrun started several, else what is usual for the device."""
    groups: int = 0
    """Groups of modules to run side by side at designed quotas, for fitting interference."""
    fit: Path | None = None
    """Also fit interference to the groups and write the coefficients here, for `mosaic plan --fit` of any model on this
    device. Takes --groups."""
    form: Literal["none", "additive", "full", "pairwise", "mosaic", "ours"] = "ours"
    """With --fit: the paper's Eq. 8, its ablations, or our own form."""
    counters: bool = True
    """Read occupancy and memory bandwidth from the GPU (Hopper or later); takes about a second a sample."""
    cache: Path | None = None
    """Folder in which measurements are kept and found again, also after an interruption; by default mosaic/profiles in
    the user's cache folder."""
    fresh: bool = False
    """Measure everything again, whatever the cache has."""
    backend: BackendName | None = None
    """Where to measure; by default on the GPU if the model's parameters are there, on the host otherwise."""
    device: int = 0
    """Number of the GPU, with --backend cuda."""
    max_foreign_share: float = 0.6
    """Refuse to profile where other processes take more of the CPU than this."""
    json: Json = None
    """Also write the profile here; - for standard output."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Solve for temporal stages and slot quotas, from a profile, a model profiled now, or a model's operators alone.

    With --device h100-80g (or a100-80g, h200, h800, a40, host, or a .json file) the operators of --model are counted
    and nothing is run: no GPU is needed, and --gpus may be any number.
    """

    profile: Path | None = None
    """A profile that `mosaic profile` wrote. Planning from it loads neither torch nor a GPU."""
    model: Annotated[str | None, arg(metavar="FILE:FACTORY")] = None
    """Instead of a profile: a model to profile now; see `mosaic profile --help`."""
    backend: BackendName | None = None
    """Where to profile the model; by default on the GPU if the model's parameters are there, on the host otherwise."""
    device: str = "0"
    """A described device to plan for, by name or file; or the number of the GPU to profile on."""
    gpus: int = 1
    """Devices to plan for. A profile plans for several where it was taken at those degrees."""
    max_foreign_share: float = 0.6
    """Refuse to profile where other processes take more of the CPU than this."""
    communication_slots: Literal["remainder"] | int = 0
    """Slots of each GPU that no module gets, so that collectives do not take theirs; remainder: the SMs that the split
    into slots leaves over (4 of 132)."""
    communication: bool = True
    """With --device and several GPUs: predict routing of rows between GPUs, and sums of gradients beside backwards."""
    nccl_ctas: int = 0
    """SMs that a collective takes from modules while it runs, beyond those that are reserved; 0: not predicted."""
    method: Method = "auto"
    """exact proves its plan best; gahc is the paper's Algorithm 1; sequential runs one module after the other; auto is
    exact wherever that can be had."""
    time_limit: float = 10.0
    """Seconds after which the best plan so far is taken, with a bound on what is possible."""
    interference: Literal["measured", "none", "additive", "full", "pairwise", "mosaic", "ours"] = "measured"
    """How neighbours slow each other down: measured pairs, the paper's Eq. 8 and its ablations, or our own form (ours,
    which is also called mosaic)."""
    fit: Path | None = None
    """Coefficients of that form that `mosaic profile --fit` wrote on this device, for this model or another one."""
    optimizer_bytes: float = 8.0
    """State of the optimizer for each parameter that trains, in bytes, where modules were measured: 8 for AdamW, 0 for
    plain SGD. Of a described device it is counted, for AdamW."""
    compare: bool = False
    """Also show what Megatron, DistMM, Spindle and others would plan, under the same predictions."""
    explain: bool = False
    """Also say what binds each module's quota, and what more slots, devices or memory would bring."""
    output: Path = Path("plan.json")
    """Where to write the plan."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also draw the plan, as .png or .svg."""
    json: Json = None
    """Also write the plan here; - for standard output."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a model for some steps, plain and colocated in turn, and say what was measured.

    For a model without a loss, the mean square of its outputs is used. Started by torchrun
    (torchrun --nproc-per-node 2 --no-python mosaic run --model train.py:make), it trains on all ranks, in turn with
    data-parallel training, and the model's sample is a rank's batch.
    """

    model: Model
    """The model; see `mosaic profile --help`."""
    plan: Path | None = None
    """A plan that `mosaic plan` wrote; it runs as it is. Solved for now by default."""
    method: Method = "auto"
    """Who plans: a solver, or a planner that Mosaic is compared with. The plan of one that is named runs as it is."""
    compare: bool = False
    """Measure the plans of all of these in turn, one after the other."""
    steps: int = 20
    """Steps of each."""
    max_foreign_share: float = 0.6
    """Refuse to profile where other processes take more of the CPU than this."""
    output: Path | None = None
    """Folder for timeline.png and trace.json."""
    json: Json = None
    """Write what was measured; - for standard output."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure how a GPU's SMs can be shared: one question a run, answered as a table, a JSON file and a picture.

    pool: what making a context and a stream costs, against lending one.
    scaling: how much time a kernel or a module takes at every quota.
    interference: what two kernels side by side cost each other, over quotas.
    isolation: which SMs a partition really uses, and whether a long kernel delays a short one next to it.
    overlap: the same two modules one after the other, on plain and prioritised streams, on partitions, under MPS,
    captured or not: what quotas earn, and what concurrency alone does.

    Needs an NVIDIA GPU from Volta on and exits with 4 without one.
    """

    question: tyro.conf.Positional[Literal["pool", "scaling", "interference", "isolation", "overlap"]]
    """Which one."""
    backend: BackendName = "cuda"
    """host goes through the same measurement on CPU cores, for dry runs; its times say nothing about a GPU."""
    device: int = 0
    """Number of the GPU."""
    quick: bool = False
    """Fewer quotas and repetitions."""
    tiny: bool = False
    """The smallest sizes that go through everything, for dry runs; their times mean little on any device."""
    seconds: float = float("inf")
    """Stop after about this long and keep what there is; what was left out is named."""
    model: Annotated[str | None, arg(metavar="FILE:FACTORY")] = None
    """For scaling and overlap: measure the modules of this model; see `mosaic profile --help`."""
    output: Path = Path("mosaic-bench")
    """Folder for QUESTION.json and QUESTION.png."""
    json: Json = None
    """Also write the result here; - for standard output."""


Command = (
    Annotated[Demo, subcommand(name="demo")]
    | Annotated[Doctor, subcommand(name="doctor")]
    | Annotated[Profile, subcommand(name="profile")]
    | Annotated[PlanCommand, subcommand(name="plan")]
    | Annotated[Run, subcommand(name="run")]
    | Annotated[Bench, subcommand(name="bench")]
    | Annotated[Solve, subcommand(name="solve")]
    | Annotated[Checkpoints, subcommand(name="checkpoints")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; see ``EXIT_CODES``."""
    console = Console(stderr=True)
    command = tyro.cli(
        Command,  # type: ignore[arg-type]  # a union of annotated types
        prog="mosaic",
        description=f"Run the unequal modules of a multimodal model side by side.\n\n{EXIT_CODES}",
        args=list(arguments) if arguments is not None else None,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        _dispatch(command)
    except InfeasibleError as error:
        console.print(f"mosaic: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 3
    except BackendUnavailableError as error:
        console.print(f"mosaic: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 4
    except (MosaicError, ValueError) as error:
        console.print(f"mosaic: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("mosaic: interrupted; files are whole or not there", style="red")
        return 130
    return 0


def _dispatch(command: Demo | Doctor | Profile | PlanCommand | Run | Bench | Solve | Checkpoints) -> None:
    from mosaic.cli import commands  # after the environment is set, and only what is needed

    if isinstance(command, Demo):
        commands.demo(command)
    elif isinstance(command, Doctor):
        commands.doctor(command)
    elif isinstance(command, Profile):
        commands.profile(command)
    elif isinstance(command, PlanCommand):
        commands.plan(command)
    elif isinstance(command, Run):
        commands.run(command)
    elif isinstance(command, Solve):
        from mosaic.cli.solve import solve

        solve(command)
    elif isinstance(command, Checkpoints):
        from mosaic.cli.checkpoints import checkpoints

        checkpoints(command)
    else:
        from mosaic.cli.bench import bench

        bench(command)
