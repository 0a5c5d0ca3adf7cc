"""Fills in the files of one scheduler and writes them into the recipe's folder."""

from __future__ import annotations

import getpass
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Literal, get_args

from mosaic.artifact import write_text
from mosaic.errors import MosaicError
from mosaic.retrain.templates.quoting import for_cron, for_exec, for_unit, slug

TemplateKind = Literal["systemd", "slurm", "kubernetes", "cron"]
KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)

_FILES: dict[TemplateKind, dict[str, str]] = {
    "systemd": {
        "retrain.service": "@unit@.service",
        "retrain.timer": "@unit@.timer",
        "failed.service": "@unit@-failed.service",
    },
    "slurm": {"retrain.sbatch": "retrain.sbatch"},
    "kubernetes": {"cronjob.yaml": "cronjob.yaml"},
    "cron": {"retrain.crontab": "crontab"},
}
"""Template files and their names in the recipe's folder; ``@name@`` is filled in in both."""

_NEXT_STEPS: dict[TemplateKind, str] = {
    "systemd": """\
Look at {place}, then as root:
  cp {place}/{unit}* /etc/systemd/system/
  systemctl daemon-reload
  systemctl enable --now {unit}.timer
A first run by hand: systemctl start {unit}; its log: journalctl -u {unit}
Without root: delete the line User=, copy to ~/.config/systemd/user/, use systemctl --user, and let your units run while
you are logged out: loginctl enable-linger
""",
    "slurm": """\
Set partition, GPUs, memory and time in {place}/retrain.sbatch, then once, where logs may lie:
  sbatch {place}/retrain.sbatch
Each job submits the next day's first; scancel --name={unit} ends the chain.
""",
    "kubernetes": """\
Build an image with Python, mosaic-colocate and what train.py imports; set it, the storage and the GPUs in
{place}/cronjob.yaml, then:
  kubectl apply -f {place}/cronjob.yaml
Copy this folder (retrain.toml, train.py, data) to the volume's root, which the pod sees as /retrain.
A first run by hand: kubectl create job --from=cronjob/{unit} {unit}-first
""",
    "cron": """\
Add the lines to your own crontab:
  (crontab -l; cat {place}/crontab) | crontab -
cron does not start again what failed, and keeps no log: see cron.log in the folder. Prefer systemd where there is one.
""",
}


def write_template(
    kind: TemplateKind,
    folder: Path,
    *,
    time: str = "01:00",
    python: str = sys.executable,
    image: str = "mosaic-retrain:latest",
) -> tuple[Path, ...]:
    """Writes files that start ``mosaic retrain run FOLDER`` every day into ``folder/KIND``.

    Args:
        kind: The scheduler.
        folder: The recipe's folder.
        time: Hour and minute, UTC.
        python: The interpreter with Mosaic.
        image: The container's image, for Kubernetes.

    Returns:
        The files, for a person to check and install by ``next_steps``.

    Raises:
        ValueError: An argument is wrong.
        MosaicError: A file exists with other content, or cannot be written.
    """
    values = _values(folder, time, python, image)
    here, there = Path(__file__).parent, folder.resolve() / _known(kind)
    texts = {
        there / _filled(target, values): _filled((here / source).read_text(encoding="utf-8"), values)
        for source, target in _FILES[kind].items()
    }
    for target, text in texts.items():
        if target.exists() and target.read_text(encoding="utf-8") != text:
            raise MosaicError(f"{target} is there and says something else; move it away, or keep it and go on without")
    for target, text in texts.items():
        write_text(text, target)
    return tuple(texts)


def next_steps(kind: TemplateKind, folder: Path) -> str:
    """Returns the instructions to install the files of ``write_template``."""
    place = shlex.quote(str(folder.resolve() / kind))
    return _NEXT_STEPS[_known(kind)].format(place=place, unit=_unit(folder))


def _known(kind: TemplateKind) -> TemplateKind:
    if kind not in KINDS:
        raise ValueError(f"--template {kind} is not known; use {', '.join(KINDS)}")
    return kind


def _unit(folder: Path) -> str:
    return f"mosaic-retrain-{slug(folder.resolve().name)}"


def _values(folder: Path, time: str, python: str, image: str) -> dict[str, str]:
    """Values of each ``@name@`` in the files."""
    clock = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)", time)
    if clock is None:
        raise ValueError(f"time {time!r} is no time of day; use two digits each for hour and minute in UTC, as 01:00")
    where = str(folder.resolve())
    if any(ord(letter) < 32 for letter in where + python + image):
        raise ValueError(f"{where!r} has a control character, which no scheduler takes; use another folder")
    hour, minute = clock.groups()
    unit = _unit(folder)
    run = (python, "-m", "mosaic", "retrain", "run", where)
    log = for_cron(f"{where}/cron.log")
    complaint = f"retraining {where} needs a person: see report.html of the last day, and journalctl -u {unit}"
    return {
        "name": slug(folder.resolve().name),
        "unit": unit,
        "user": getpass.getuser(),
        "time": time,
        "folder_unit": for_unit(where),
        "folder_exec": for_exec(where),
        "python_unit": for_unit(python),  # ExecStart allows no variables in the program itself
        "complaint_exec": for_exec(complaint),
        "folder_shell": shlex.quote(where),
        "python_shell": shlex.quote(python),
        "seconds": str(3600 * int(hour) + 60 * int(minute)),
        "cron_time": f"{int(minute)} {int(hour)} * * *",
        "image_json": json.dumps(image),
        "hour": hour,
        # Zones are whole quarters of an hour from UTC.
        "minutes": ",".join(
            str(value) for value in sorted((int(minute) + quarter) % 60 for quarter in (0, 15, 30, 45))
        ),
        "command_cron": f"{for_cron('flock', '-n', '-o', f'{where}/cron.lock', *run)} >> {log} 2>&1",
    }


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)
