"""Files for systemd, Slurm, Kubernetes and cron: read by their own tools where these are, and run where they can be."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mosaic.errors import MosaicError
from mosaic.retrain.templates import KINDS, next_steps, write_template

FAKE_PYTHON = """#!{python} -S
import json, signal, sys
with open({arguments!r}, "w") as file:
    json.dump(sys.argv[1:], file)
if {waits!r}:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", flush=True)
    signal.pause()
sys.exit({code})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe's folder whose name has what shells, units and cron take for something else."""
    folder = tmp_path / 'it\'s 100% "$HOME" Shop'
    folder.mkdir()
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Stands for Slurm and the clock: each command writes its arguments, one a line."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sbatch", "scontrol"):
        write_program(tools / name, f'#!/bin/sh\nprintf "%s\\n" "$@" > {tools}/{name}.said\n')
    return tools


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_python(tools: Path, *, code: int = 0, waits: bool = False) -> str:
    text = FAKE_PYTHON.format(python=sys.executable, arguments=str(tools / "arguments"), waits=waits, code=code)
    return str(write_program(tools / "python", text))


def said(tools: Path, name: str) -> list[str]:
    path = tools / f"{name}.said"
    return path.read_text().splitlines() if path.exists() else []


def unit(path: Path) -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(path)
    return read


@pytest.mark.parametrize("kind", KINDS)
def test_files_lie_in_the_folder_are_filled_in_and_can_be_written_again(kind: Any, folder: Path):
    written = write_template(kind, folder)
    assert {path.parent for path in written} == {folder / kind}
    assert not any(re.search(r"@\w+@", path.name + path.read_text()) for path in written)
    assert write_template(kind, folder) == written
    assert str(folder.resolve() / kind).split("'")[0] in next_steps(kind, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_a_person_changed_is_not_written_over(kind: Any, folder: Path):
    changed = write_template(kind, folder)[0]
    changed.write_text("mine")
    with pytest.raises(MosaicError, match="says something else; move it away"):
        write_template(kind, folder)
    assert changed.read_text() == "mine"


@pytest.mark.parametrize("wrong", ["1:00", "24:00", "01:60", "01:00Z", ""])
def test_a_wrong_time_says_how_a_time_is_written(wrong: str, folder: Path):
    with pytest.raises(ValueError, match="hour and minute in UTC, as 01:00"):
        write_template("systemd", folder, time=wrong)


def test_an_unknown_kind_and_a_folder_that_breaks_lines_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="use systemd, slurm, kubernetes, cron"):
        write_template("airflow", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="control character"):
        write_template("cron", tmp_path / "a\nb")


def test_the_service_has_what_an_unattended_run_needs(folder: Path):
    service = unit(next(path for path in write_template("systemd", folder) if path.name.endswith("shop.service")))
    assert service["Service"]["Type"] == "exec"
    assert service["Service"]["Restart"] == "on-failure"
    assert service["Service"]["RestartPreventExitStatus"].split() == ["2", "5"]
    assert service["Service"]["KillMode"] == "mixed"
    assert {"RuntimeMaxSec", "TimeoutStopSec", "RestartSec"} <= set(service["Service"])
    assert {"StartLimitIntervalSec", "StartLimitBurst", "OnFailure"} <= set(service["Unit"])
    run = service["Service"]["ExecStart"]
    assert run.startswith(f'"{sys.executable}" -m mosaic retrain run "')
    assert run.endswith('/it\'s 100%% \\"$$HOME\\" Shop"')


def test_the_timer_is_in_utc_and_also_starts_after_a_boot(folder: Path):
    timer = unit(next(path for path in write_template("systemd", folder, time="23:45") if path.suffix == ".timer"))
    assert timer["Timer"]["OnCalendar"] == "*-*-* 23:45:00 UTC"
    assert timer["Timer"]["Persistent"] == "true"
    assert "OnBootSec" in timer["Timer"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here (Debian: systemd)")
def test_systemd_takes_the_units_and_the_time(folder: Path):
    units = write_template("systemd", folder)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *map(str, units)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    when = unit(next(path for path in units if path.suffix == ".timer"))["Timer"]["OnCalendar"]
    calendar = subprocess.run(["systemd-analyze", "calendar", when], capture_output=True, text=True, timeout=120)
    assert calendar.returncode == 0
    assert "01:00:00 UTC" in calendar.stdout


def start_job(folder: Path, tools: Path, **environment: str) -> subprocess.Popen[str]:
    (script,) = write_template("slurm", folder, python=str(tools / "python"))
    given = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **environment}
    return subprocess.Popen(["bash", str(script)], env=given, stdout=subprocess.PIPE, text=True)


def end_of(job: subprocess.Popen[str]) -> int:
    job.communicate(timeout=120)
    return job.returncode


@pytest.mark.parametrize("code", [0, 2, 5])
def test_a_job_submits_tomorrows_runs_the_folder_and_ends_as_it_ended(folder: Path, tools: Path, code: int):
    fake_python(tools, code=code)
    before = time.time()
    assert end_of(start_job(folder, tools)) == code
    assert json.loads((tools / "arguments").read_text()) == ["-m", "mosaic", "retrain", "run", str(folder)]
    begin, script = said(tools, "sbatch")
    seconds = int(begin.removeprefix("--begin=now+"))
    assert 0 < seconds <= 86400
    assert (3600 - int(before) - seconds) % 86400 <= time.time() - before + 1  # submitted so long after ``before``
    assert script == str(folder / "slurm" / "retrain.sbatch")
    assert said(tools, "scontrol") == []


@pytest.mark.parametrize(
    ("environment", "name"),
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "5_3")],
)
def test_at_the_end_of_its_time_a_job_is_interrupted_and_requeued(
    folder: Path, tools: Path, environment: dict[str, str], name: str
):
    fake_python(tools, waits=True)
    job = start_job(folder, tools, **environment)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGUSR1)
    assert end_of(job) == 75
    assert said(tools, "scontrol") == ["requeue", name]


def test_a_job_that_was_cancelled_is_interrupted_and_not_requeued(folder: Path, tools: Path):
    fake_python(tools, waits=True)
    job = start_job(folder, tools)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    assert end_of(job) == 75
    assert said(tools, "scontrol") == []


def test_a_requeued_job_does_not_submit_tomorrows_again(folder: Path, tools: Path):
    fake_python(tools)
    assert end_of(start_job(folder, tools, SLURM_RESTART_COUNT="2")) == 0
    assert said(tools, "sbatch") == []


def test_the_job_asks_slurm_for_a_signal_a_requeue_and_one_log(folder: Path):
    (script,) = write_template("slurm", folder)
    asked = re.findall(r"^#SBATCH --(\S+)", script.read_text(), re.MULTILINE)
    assert {"signal=B:USR1@600", "requeue", "open-mode=append", "dependency=singleton"} <= set(asked)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here (Debian: shellcheck)")
def test_shellcheck_finds_nothing_in_the_job(tmp_path: Path):
    (script,) = write_template("slurm", tmp_path)
    found = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=120)
    assert found.stdout == ""


def test_the_cronjob_is_in_utc_never_twice_at_once_and_keeps_its_folder(folder: Path):
    (path,) = write_template("kubernetes", folder, time="00:05", image='registry/"mine":1')
    claim, cronjob = yaml.safe_load_all(path.read_text())
    assert (claim["kind"], cronjob["apiVersion"], cronjob["kind"]) == ("PersistentVolumeClaim", "batch/v1", "CronJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", cronjob["metadata"]["name"])
    assert len(cronjob["metadata"]["name"]) <= 52
    spec = cronjob["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("5 0 * * *", "Etc/UTC")
    assert (spec["concurrencyPolicy"], spec["startingDeadlineSeconds"]) == ("Forbid", 7200)
    job = spec["jobTemplate"]["spec"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 5]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    # A policy on exit codes wants pods that never restart, and names a container that is there.
    assert pod["restartPolicy"] == "Never"
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["image"] == 'registry/"mine":1'
    assert container["command"][-3:] == ["retrain", "run", "/retrain"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def cron_commands(path: Path) -> list[tuple[str, str]]:
    """Reads a crontab as cron does: when, and what its shell gets."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("#") or re.match(r"\w+=", line):
            continue
        when, command = re.fullmatch(r"(@reboot|(?:[\d,*]+ ){4}[\d,*]+) (.+)", line).groups()  # type: ignore[union-attr]
        assert not re.search(r"(?<!\\)%", command), "cron ends a command at a bare %"
        found.append((when, command.replace("\\%", "%")))
    return found


@pytest.mark.parametrize(("hour", "runs"), [("01", True), ("02", False)])
def test_cron_runs_the_folder_in_its_hour_of_utc(folder: Path, tools: Path, hour: str, runs: bool):
    write_program(tools / "date", f'#!/bin/sh\n[ "$*" = "-u +%H" ] && echo {hour}\n')
    (path,) = write_template("cron", folder, time="01:10", python=fake_python(tools))
    daily, reboot = cron_commands(path)
    assert (daily[0], reboot[0]) == ("10,25,40,55 * * * *", "@reboot")
    subprocess.run(["/bin/sh", "-c", daily[1]], env={"PATH": f"{tools}:/usr/bin:/bin"}, timeout=120, check=False)
    assert (tools / "arguments").exists() == runs
    if runs:
        assert json.loads((tools / "arguments").read_text())[-1] == str(folder)


def test_cron_starts_no_second_run_beside_one(folder: Path, tools: Path):
    write_program(tools / "date", "#!/bin/sh\necho 01\n")
    (path,) = write_template("cron", folder, python=fake_python(tools))
    daily, _ = cron_commands(path)
    held = ["flock", str(folder / "cron.lock"), "/bin/sh", "-c", daily[1]]
    subprocess.run(held, env={"PATH": f"{tools}:/usr/bin:/bin"}, timeout=120, check=False)
    assert not (tools / "arguments").exists()
