"""``mosaic checkpoints``: lists and verifies the checkpoints of a run, and exports weights as one plain file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from mosaic.cli.options import Json, takes_stdout, write_json
from mosaic.errors import InvalidCheckpointError

if TYPE_CHECKING:
    from mosaic.checkpoint.folder import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """List the checkpoints of a run, verify them, or export one as a plain safetensors file. Builds no model.

    Exits with 1 if there are none or one of those listed is damaged.
    """

    folder: Annotated[tyro.conf.Positional[Path], arg(metavar="FOLDER")]
    """The folder passed to handle.save()."""
    verify: bool = False
    """Read every file and compare it with its checksum."""
    step: int | None = None
    """Use the newest checkpoint of this step only."""
    export: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the weights of the newest checkpoint (or of --step) to one safetensors file that the plain model loads."""
    json: Json = None

    def execute(self) -> None:
        from mosaic.checkpoint.folder import choose

        checkpoints = choose(self.folder, self.step)
        if self.step is not None or self.export is not None:
            checkpoints = checkpoints[:1]
        rows = [_row(checkpoint, verify=self.verify or self.export is not None) for checkpoint in checkpoints]
        write_json(json.dumps(rows, indent=2) + "\n", self.json)
        out = sys.stderr if takes_stdout(self.json) else sys.stdout
        for row in rows:
            line = f"step {row['step']}: {row['path']}, {row['state']}"
            if "created" in row:
                size = f"{row['num_bytes'] / 2**20:.1f} MiB"
                line += f", {row['created']}, ranks: {row['num_ranks']}, tensors: {row['num_tensors']}, {size}"
            print(line, file=out)
        if damage := [sentence for row in rows for sentence in row["damage"]]:
            raise InvalidCheckpointError("\n".join(damage))
        if self.export is not None:
            from mosaic.checkpoint.tensors import extract_weights

            count = extract_weights(checkpoints[0].path, self.export)
            print(f"wrote {count} tensors of {checkpoints[0].path} to {self.export}", file=out)


def _row(checkpoint: Checkpoint, *, verify: bool) -> dict[str, Any]:
    from mosaic.checkpoint.folder import Manifest, damage_of

    row: dict[str, Any] = {"path": str(checkpoint.path), "step": checkpoint.step, "verified": verify}
    try:
        manifest = Manifest.read(checkpoint.path)
    except InvalidCheckpointError as error:
        return {**row, "damage": [str(error)], "state": "damaged"}
    damage = list(damage_of(checkpoint.path)) if verify else []
    facts = {name: getattr(manifest, name) for name in ("created", "num_ranks", "num_bytes", "plan", "mosaic", "torch")}
    state = "damaged" if damage else "whole" if verify else "not verified"
    return {**row, **facts, "num_tensors": len(manifest.tensors), "damage": damage, "state": state}
