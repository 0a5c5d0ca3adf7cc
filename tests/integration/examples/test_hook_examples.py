"""The hook for MLflow, run as `mosaic retrain` runs it, beside a stand-in for the library."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from mosaic.retrain.folder import Folder
from mosaic.retrain.hooks import remember, run_pending
from mosaic.retrain.recipe import Promote

HOOKS = Path(__file__).parents[3] / "examples" / "hooks"
DAY = "2026-11-22"
GATE = {"comparisons": [{"name": "frozen", "new": 0.9}]}
NOTES = """
import json
def note(*what, **more):
    with open("heard.jsonl", "a") as file:
        file.write(json.dumps([*what, more]) + "\\n")
"""
STAND_INS = {
    "notes.py": NOTES,
    "mlflow/__init__.py": """
import json
from pathlib import Path
from types import SimpleNamespace
from notes import note
def set_experiment(name):
    return SimpleNamespace(experiment_id="7")
class MlflowClient:
    def __getattr__(self, name):
        return lambda *what, **more: note(name, *what, **more)
    def _heard(self, name):
        return [each for each in map(json.loads, Path("heard.jsonl").read_text().splitlines()) if each[0] == name]
    def search_registered_models(self, wanted):
        assert wanted == "name = 'shop'"
        return Path("heard.jsonl").exists() and self._heard("create_registered_model")
    def search_model_versions(self, wanted):
        made = self._heard("create_model_version")
        return [SimpleNamespace(version=str(i + 1), tags=each[4]) for i, each in enumerate(made)]
    def create_run(self, experiment, run_name):
        assert experiment == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id="run", artifact_uri="store/run"))
    def create_model_version(self, *what):
        note("create_model_version", *what)
        return SimpleNamespace(version=str(len(self._heard("create_model_version"))))
""",
    "mlflow/entities.py": "def Metric(*what): return what",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    made = Folder(tmp_path / "shop")
    shutil.copytree(HOOKS, made.path / "hooks")
    for name, text in STAND_INS.items():
        file = tmp_path / "stand-ins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stand-ins'}:{HOOKS.parents[1]}")
    day, version = made.day(DAY).path, made.versions / "0001"
    for each in (day, version):
        each.mkdir(parents=True)
    report = {"title": "shop", "day": DAY, "outcome": "promoted", "reason": "It is better.", "gate": GATE}
    (day / "report.json").write_text(json.dumps(report))
    rows = [{"step": step, "loss": 1 / step, "at": 1795454644.25, "ms": 50.0} for step in (1, 2, 2)]
    (day / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "lo')
    return made


def test_mlflow_has_each_version_once_and_the_champions_alias(folder: Folder):
    promote = Promote(hooks=(f"{sys.executable} hooks/mlflow_hook.py",))
    for _ in range(2):  # a hook may be run again
        remember(folder, promote, "0001", DAY)
        assert run_pending(folder, promote, "0001") == ()
    heard = [json.loads(line) for line in (folder.path / "heard.jsonl").read_text().splitlines()]
    names = [each[0] for each in heard]
    assert names.count("create_registered_model") == names.count("create_model_version") == 1
    assert names.count("set_registered_model_alias") == 2
    assert heard[-1] == ["set_registered_model_alias", "shop", "champion", "1", {}]
    (batch,) = (each for each in heard if each[0] == "log_batch")
    assert batch[-1]["metrics"] == [["loss", 1.0, 1795454644250, 1], ["loss", 0.5, 1795454644250, 2]]
    model = next(each for each in heard if each[0] == "log_artifacts")
    assert model[1:4] == ["run", str((folder.versions / "0001").resolve()), "model"]
