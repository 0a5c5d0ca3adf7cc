"""Options of ``mosaic.colocate``: the same on one rank and on many; what one cannot do somewhere is an error there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mosaic.artifact import load_as
from mosaic.backends.base import Backend
from mosaic.profile import Profile
from mosaic.profiler import ProfileCache, ProfileSettings, ProgressCallback
from mosaic.solver.runnable import DATA_PARALLEL, check_method
from mosaic.take_turns import TrialSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of several ranks.

    Raises:
        ValueError: A time is not above 0 s.
    """

    timeout_s: float = 60.0
    """Time that a rank waits for the others in a step and at the start, in seconds."""
    heartbeat_s: float = 1.0
    """Time between two reports of a rank's position, in seconds."""
    grace_s: float = 10.0
    """Time after which a rank with an error is ended, in seconds."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "heartbeat_s", "grace_s"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value}: a time has to be above 0 s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of ``mosaic.colocate`` for planning, measuring and running.

    Raises:
        ValueError: An option has a value that it does not know.
        TypeError: An option has a value of a type that it does not accept.
        InvalidFileError: The profile's file cannot be read.
    """

    method: str = "auto"
    """A solver, or a planner to compare with (``mosaic.solver.METHODS``), whose plan runs untried; ``auto`` is tried.
    ``data-parallel``, on several ranks only, measures nothing: every module runs on all of them."""
    profile: Profile | str | Path | None = None
    """Measurements, or their file's path, to plan from; on several ranks those of the batch of all of them together.
    A plan leaves room for AdamW's two moments in 32 bits, 8 bytes for each parameter that trains."""
    profiling: ProfileSettings | None = None
    """Care taken in profiling. A time that other processes disturb is measured again within ``retry_seconds``."""
    cache: ProfileCache | str | Path | None = "user"
    """A folder of measurements of earlier runs, on several ranks rank 0's; ``"user"``: ``~/.cache/mosaic/profiles``, or
    under ``$XDG_CACHE_HOME``; None for no cache."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """On a GPU, launch placed modules as CUDA graphs where that is right, for modules of many small operators.
    ``auto``: a trial also tries the best plan that way; without one and on several ranks nothing is captured."""
    sm_target: bool | Literal["auto"] = "auto"
    """On a GPU, give cuBLAS and torch the SM count of a lane, by which they may choose other kernels and grids.
    ``auto``: a trial on one rank tries the best plan that way, where Mosaic comes with a measurement of this kind of
    GPU that shows a gain (``python -m bench.gpu``, rung ``first/products``); else no target is set."""
    trial: TrialSettings | Literal["auto"] | None = "auto"
    """``auto``: a trial with default bounds, unless the plan is given or its method is named. None: no trial."""
    progress: ProgressCallback | None = None
    """Told what is being profiled, how much is done, and how much there is; on several ranks, on the first."""
    ranks: RankSettings | None = None
    """Settings of several ranks; None for the defaults."""

    def __post_init__(self) -> None:
        check_method(self.method)
        object.__setattr__(self, "profile", load_as(Profile, self.profile))
        error: type[Exception]
        for name, allowed, needed, error in (
            ("profiling", (ProfileSettings, None), "a ProfileSettings", TypeError),
            ("cache", (ProfileCache, str, Path, None), 'a folder, a ProfileCache, "user" or None', TypeError),
            ("trial", (TrialSettings, "auto", None), 'a TrialSettings, "auto" or None', TypeError),
            ("ranks", (RankSettings, None), "a RankSettings or None", TypeError),
            ("cuda_graphs", (bool, "auto"), "True, False or 'auto'", ValueError),
            ("sm_target", (bool, "auto"), "True, False or 'auto'", ValueError),
        ):
            value = getattr(self, name)
            if not any(isinstance(value, each) if isinstance(each, type) else value == each for each in allowed):
                raise error(f"{name}={value!r}; use {needed}")
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"progress={self.progress!r} is not callable; pass a function or None")

    @property
    def may_fall_back(self) -> bool:
        """Returns True if the model stays as it was where it cannot be profiled: Mosaic chooses what runs."""
        return self.method == "auto" and not (self.profiling is not None and self.profiling.strict)

    def backend_of(self, backend: Backend) -> Backend:
        """Returns the backend with an SM target if one is asked for."""
        return backend.with_sm_target() if self.sm_target is True else backend

    def check_for_one_rank(self, kind: str) -> None:
        """Raises ValueError where one rank on a device of a kind cannot do what is asked for."""
        if self.cuda_graphs is True and kind == "host":
            raise ValueError("cuda_graphs=True needs a model on a GPU; leave cuda_graphs out on the host")
        for name, is_wanted in {"method": self.method == DATA_PARALLEL, "ranks": self.ranks is not None}.items():
            if is_wanted:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for several ranks, and this process is the only one; start it "
                    f"by torchrun, or leave {name} out"
                )

    def check_for_several_ranks(self) -> None:
        """Raises ValueError where several ranks cannot do what is asked for."""
        if self.cuda_graphs is True:
            raise ValueError("cuda_graphs=True: calls on several ranks exchange rows in the middle; leave it out")


DEFAULT_OPTIONS = Options()
