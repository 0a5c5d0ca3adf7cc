"""Registers a promoted version with MLflow, as champion: `hooks = ["python hooks/mlflow_hook.py"]` under [promote]."""

import json
import os
from pathlib import Path

from mlflow import MlflowClient, set_experiment
from mlflow.entities import Metric

from mosaic.artifact import steps_in

version, day, client = os.environ["MOSAIC_VERSION"], Path(os.environ["MOSAIC_DAY_FOLDER"]), MlflowClient()
report = json.loads((day / "report.json").read_text())
name = report["title"]
if not client.search_registered_models(f"name = '{name}'"):
    client.create_registered_model(name)
there = [one for one in client.search_model_versions(f"name = '{name}'") if one.tags.get("mosaic_version") == version]
if not there:  # else it ran before, and only the alias is set
    run = client.create_run(set_experiment(name).experiment_id, run_name=f"{report['day']} {version}").info
    steps = steps_in(day / "metrics.jsonl").items()
    losses = [Metric("loss", row["loss"], int(row["at"] * 1000), step) for step, row in steps]
    for first in range(0, len(losses), 1000):  # no more at once
        client.log_batch(run.run_id, metrics=losses[first : first + 1000])
    client.log_artifact(run.run_id, str(day / "report.html"))
    client.log_artifacts(run.run_id, os.environ["MOSAIC_VERSION_FOLDER"], "model")
    client.set_terminated(run.run_id)
    there = [client.create_model_version(name, f"{run.artifact_uri}/model", run.run_id, {"mosaic_version": version})]
client.set_registered_model_alias(name, "champion", there[0].version)
