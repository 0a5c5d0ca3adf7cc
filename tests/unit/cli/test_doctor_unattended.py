"""``mosaic doctor --retrain FOLDER``: what is seen of a node, and what each lack is called."""

from __future__ import annotations

import getpass
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mosaic.cli.doctor.gpu_health import GpuHealth, ask_gpus
from mosaic.cli.doctor.node import NodeFacts, look_at_node
from mosaic.cli.doctor.unattended import UnattendedReport, find_in_node, render
from mosaic.cli.main import run

GIB = 1 << 30
HEALTHY = GpuHealth(index=0, name="H100", persistent=True, ecc=True, uncorrected=0, needs_reset=False)
FIT = NodeFacts(
    folder="/srv/shop",
    file_system="ext4",
    free_bytes=100 * GIB,
    checkpoint_bytes=GIB,
    kept=2,
    workers=2,
    shm_bytes=8 * GIB,
    clock_kept=True,
    time_zone="UTC",
    systemd=True,
    user="ada",
    lingers=True,
    panic_seconds=30,
    reboots_itself=None,
    reboot_pending=False,
    battery=False,
    memory_bytes=64 * GIB,
    memory_limit_bytes=None,
    swap_used_bytes=0,
    cublas_workspace=":4096:8",
    gpus=(HEALTHY,),
    kernel_lines=(),
)


def test_a_fit_node_has_nothing_to_do():
    page = io.StringIO()
    render(UnattendedReport(node=FIT, findings=find_in_node(FIT)), Console(file=page, width=200))
    assert find_in_node(FIT) == ()
    assert "Nothing to do." in page.getvalue()


@pytest.mark.parametrize(
    ("lack", "severity", "what", "todo"),
    [
        ({"free_bytes": 3 * GIB}, "error", "4 checkpoints of 1.0 GiB need 4.0 GiB", "free some room"),
        ({"checkpoint_bytes": None}, "note", "100.0 GiB are free", "room for 4 checkpoints"),
        ({"file_system": "nfs4"}, "warning", "lies on nfs4", "one machine only"),
        ({"file_system": "fuse.sshfs"}, "warning", "lies on fuse.sshfs", "local disk"),
        ({"file_system": "overlay"}, "warning", "lies on overlay", "mounted volume"),
        ({"shm_bytes": 64 << 20}, "warning", "/dev/shm has 64 MiB", "--shm-size"),
        ({"memory_limit_bytes": 8 * GIB}, "note", "allows 8.0 GiB of 64.0 GiB", "nothing, if that is enough"),
        ({"swap_used_bytes": 2 * GIB}, "warning", "2.0 GiB of memory lie on the disk", "who takes the memory"),
        ({"clock_kept": False}, "warning", "nothing keeps the clock right", "chrony"),
        ({"time_zone": "CET/CEST"}, "note", "time zone is CET/CEST", "UTC"),
        ({"systemd": False}, "note", "systemd does not run this machine", "examples/retrain"),
        ({"lingers": False}, "note", "units of the user ada end", "loginctl enable-linger ada"),
        ({"panic_seconds": 0}, "note", "kernel.panic = 0", "sysctl kernel.panic=30"),
        ({"reboots_itself": "/etc/apt/x"}, "note", "by themselves (/etc/apt/x)", "Automatic-Reboot-Time"),
        ({"reboot_pending": True}, "note", "wait for a restart", "between two runs"),
        ({"battery": True}, "warning", "has a battery", "mask sleep.target"),
        ({"cublas_workspace": ":0:0"}, "warning", "CUBLAS_WORKSPACE_CONFIG=:0:0", "unset it"),
        ({"kernel_lines": ("NVRM: Xid 79",)}, "warning", "NVRM: Xid 79", "hardware"),
        ({"gpus": (replace(HEALTHY, persistent=False),)}, "note", "persistence mode is off", "nvidia-smi -pm 1"),
        ({"gpus": (replace(HEALTHY, ecc=False),)}, "note", "correction of its memory is off", "nvidia-smi -e 1"),
        ({"gpus": (replace(HEALTHY, uncorrected=3),)}, "warning", "had 3 errors", "ROW_REMAPPER"),
        ({"gpus": (replace(HEALTHY, needs_reset=True),)}, "error", "wait to be replaced", "nvidia-smi -r"),
    ],
)
def test_each_lack_is_one_finding_with_its_way_out(lack: dict[str, Any], severity: str, what: str, todo: str):
    (finding,) = find_in_node(replace(FIT, **lack))
    assert finding.severity == severity
    assert what in finding.what
    assert todo in finding.todo


def test_what_could_not_be_read_is_no_finding_and_errors_come_first():
    unknown = dict.fromkeys(("file_system", "shm_bytes", "clock_kept", "panic_seconds", "memory_bytes"))
    assert find_in_node(replace(FIT, **unknown, swap_used_bytes=None, cublas_workspace=None, gpus=())) == ()  # type: ignore[arg-type]
    found = find_in_node(replace(FIT, clock_kept=False, free_bytes=0, panic_seconds=0))
    assert [one.severity for one in found] == ["error", "warning", "note"]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe's folder with two checkpoints, of 5 and 3 bytes."""
    folder = tmp_path / "my shop"
    days = "days/2026-11-22/checkpoints"
    write(folder, {f"{days}/step-1/a": "12", f"{days}/step-1/b": "345", f"{days}/step-2/a": "678"})
    write(folder, {"retrain.toml": "[budget]\nkeep = 4\nworkers = 3\nranks = 2\n"})
    return folder


@pytest.fixture
def root(tmp_path: Path, folder: Path) -> Path:
    """The files of another machine."""
    root = tmp_path / "machine"
    place = str(folder).replace(" ", "\\040")
    files = {
        "proc/self/mountinfo": f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {place} rw shared:1 - nfs4 host:/x rw\n",
        "proc/self/cgroup": "0::/user/session\n",
        "sys/fs/cgroup/user/session/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.max": str(8 * GIB),
        "proc/meminfo": "MemTotal: 1024 kB\nSwapTotal: 300 kB\nSwapFree: 100 kB\n",
        "proc/sys/kernel/panic": "0\n",
        "etc/apt/apt.conf.d/50unattended": 'Unattended-Upgrade::Automatic-Reboot "true";\n',
        "run/reboot-required": "",
        "run/systemd/system/x": "",
        "sys/class/power_supply/BAT0/type": "Battery\n",
        "dev/kmsg": "4,1,2,-;NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus\n6,2,3,-;usb 1-1: new device\n",
    }
    write(root, files)
    return root


def test_a_node_is_read_from_its_files(folder: Path, root: Path):
    node = look_at_node(folder, root=root, environ={"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert (node.checkpoint_bytes, node.kept, node.workers) == (5, 4, 6)
    assert (node.file_system, node.memory_limit_bytes) == ("nfs4", 8 * GIB)
    assert (node.memory_bytes, node.swap_used_bytes, node.panic_seconds) == (1024**2, 200 * 1024, 0)
    assert node.reboots_itself == str(root / "etc/apt/apt.conf.d/50unattended")
    assert (node.reboot_pending, node.systemd, node.battery) == (True, True, True)
    assert node.kernel_lines == ("NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus",)
    assert node.cublas_workspace == ":0:0"


def test_limits_of_old_control_groups_are_read(folder: Path, root: Path):
    group = "sys/fs/cgroup/memory"
    write(root, {"proc/self/cgroup": "9:cpuset:/\n4:memory:/job/7\n", f"{group}/job/memory.limit_in_bytes": "4096"})
    write(root, {f"{group}/job/7/memory.limit_in_bytes": "9223372036854771712"})
    assert look_at_node(folder, root=root).memory_limit_bytes == 4096


def test_a_user_lingers_by_a_file(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOGNAME", "ada")
    assert getpass.getuser() == "ada"
    assert not look_at_node(folder, root=root).lingers
    write(root, {"var/lib/systemd/linger/ada": ""})
    assert look_at_node(folder, root=root).lingers


@pytest.mark.parametrize("recipe", ["budget = 3", "[budget]\nkeep = 'many'", "[", "[budget]\nkeep = []"])
def test_an_empty_machine_and_a_wrong_recipe_raise_nothing(tmp_path: Path, recipe: str):
    write(tmp_path, {"folder/retrain.toml": recipe})
    node = look_at_node(tmp_path / "folder", root=tmp_path / "nothing")
    assert (node.kept, node.workers, node.file_system, node.memory_limit_bytes) == (2, 2, None, None)
    assert look_at_node(tmp_path / "not" / "there", root=tmp_path / "nothing").free_bytes > 0


class FakeNvmlError(Exception):
    """Stands for ``pynvml.NVMLError``."""


def refuse(*_: Any) -> Any:
    raise FakeNvmlError


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """Stands for ``pynvml``: two GPUs, the second of which tells nothing but its name."""

    def told(value: Any) -> Any:
        return lambda gpu, *_: value if gpu == 0 else refuse()

    return SimpleNamespace(
        **{
            "NVMLError": FakeNvmlError,
            "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
            "NVML_AGGREGATE_ECC": 1,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda gpu: b"H100" if gpu else "H200",
            "nvmlDeviceGetPersistenceMode": told(0),
            "nvmlDeviceGetEccMode": told((1, 1)),
            "nvmlDeviceGetTotalEccErrors": told(7),
            "nvmlDeviceGetRemappedRows": told((2, 1, 1, 0)),
            **answers,
        }
    )


def test_gpus_tell_what_they_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    first, second = ask_gpus()
    assert first == GpuHealth(index=0, name="H200", persistent=False, ecc=True, uncorrected=7, needs_reset=True)
    assert second == GpuHealth(index=1, name="H100", persistent=None, ecc=None, uncorrected=None, needs_reset=None)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_an_nvml_that_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch, broken: str):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{broken: refuse}))
    assert ask_gpus() == ()


def test_the_command_answers_for_people_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", "--retrain", str(folder)]) == 0
    assert "Runs without anyone watching" in capsys.readouterr().out
    assert run(["doctor", "--retrain", str(folder), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["node"]["folder"] == os.fspath(folder.resolve())
    assert {"severity", "what", "todo"} == set(report["findings"][0])
