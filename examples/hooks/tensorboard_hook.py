"""Shows a promoted day's training in TensorBoard: `hooks = ["python hooks/tensorboard_hook.py"]` in [promote].

Look at it with `tensorboard --logdir tensorboard`. Run again, it replaces what it wrote.
"""

import json
import os
import shutil
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from mosaic.artifact import steps_in

version, day = os.environ["MOSAIC_VERSION"], Path(os.environ["MOSAIC_DAY_FOLDER"])
report = json.loads((day / "report.json").read_text())
folder = Path("tensorboard") / f"{report['day']} {version}"  # hooks run in the recipe's folder
shutil.rmtree(folder, ignore_errors=True)
with SummaryWriter(str(folder)) as writer:
    for row in steps_in(day / "metrics.jsonl").values():
        for name in sorted({"loss", "ms"} & row.keys()):
            writer.add_scalar(f"train/{name}", row[name], row["step"], walltime=row["at"])
    for one in (report["gate"] or {}).get("comparisons", []):
        writer.add_scalar(f"gate/{one['name']}", one["new"], int(version))
    writer.add_text("verdict", f"{report['outcome']}: {report['reason']}")
