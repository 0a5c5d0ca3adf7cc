"""The share of the CPU that other processes take, read from a made-up machine's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mosaic.profiler import ForeignLoad, noise

HERTZ = os.sysconf("SC_CLK_TCK")
OWN = os.getpid()
TAKEN = ForeignLoad.taken
"""As it is without the quiet machine that other tests have."""


class Machine:
    """Four cores; what each process and core has used, in seconds."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.now = root, 0.0
        monkeypatch.setattr(ForeignLoad, "taken", TAKEN)
        monkeypatch.setattr(noise.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(noise, "available_cores", lambda: (0, 1, 2, 3))
        self.write("sys/fs/cgroup/none", "")
        self.write("proc/self/cgroup", "0::/\n")
        self.cores(0, 0, 0, 0)
        self.process(OWN)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cores(self, *busy_s: float) -> None:
        lines = [f"cpu{core} {round(busy * HERTZ)} 0 0 999 0 0 0 0 0 0" for core, busy in enumerate(busy_s)]
        self.write("proc/stat", "\n".join([f"cpu  {round(sum(busy_s) * HERTZ)} 0 0 999 0 0 0 0 0 0", *lines, "intr 1"]))

    def process(self, number: int, used_s: float = 0.0, ended_s: float = 0.0, children: tuple[int, ...] = ()) -> None:
        before = " ".join(["0"] * 10)
        ticks = f"{round(used_s * HERTZ)} 0 {round(ended_s * HERTZ)} 0"
        self.write(f"proc/{number}/stat", f"{number} (a (b) c) S {before} {ticks} 20 0")
        self.write(f"proc/{number}/task/{number}/children", " ".join(map(str, children)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_share_of_others_is_what_is_left_after_one_s_own(machine: Machine):
    load = ForeignLoad(machine.root)
    machine.now = 10.0
    machine.cores(4, 4, 4, 4)
    machine.process(OWN, used_s=5, ended_s=1)
    assert load.share == pytest.approx((16 - 6) / 40)
    load = ForeignLoad(machine.root)
    machine.now = 20.0
    assert load.share == 0.0
    machine.cores(90, 90, 90, 90)
    assert load.share == 1.0


def test_ranks_that_torchrun_started_are_no_others(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine.process(os.getppid(), children=(OWN, 7))
    machine.process(7)
    load = ForeignLoad(machine.root)
    machine.now = 10.0
    machine.cores(5, 5, 0, 0)
    machine.process(OWN, used_s=4)
    machine.process(7, used_s=4)
    assert load.share == pytest.approx(2 / 40)


def test_the_quota_of_a_control_group_counts_where_it_allows_fewer_cores(machine: Machine):
    machine.write("proc/self/cgroup", "4:memory:/x\n0::/jobs/mine\n")
    machine.write("sys/fs/cgroup/jobs/mine/cpu.max", "max 100000\n")
    machine.write("sys/fs/cgroup/jobs/cpu.max", "200000 100000\n")
    machine.write("sys/fs/cgroup/jobs/cpu.stat", "usage_usec 0\nuser_usec 0\n")
    load = ForeignLoad(machine.root)
    machine.now = 10.0
    machine.cores(10, 10, 10, 10)  # of the whole host, which other groups use
    machine.write("sys/fs/cgroup/jobs/cpu.stat", "usage_usec 9000000\nuser_usec 0\n")
    machine.process(OWN, used_s=7)
    assert load.share == pytest.approx(2 / 20)
