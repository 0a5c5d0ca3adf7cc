"""``mosaic retrain``: a folder whose model is retrained on each day's data, judged, and promoted or kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

FolderOption = Annotated[tyro.conf.Positional[Path], arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Take the folder from where it stands to where it should be; can be started at any time."""

    folder: FolderOption = Path()
    """The folder with retrain.toml."""

    def execute(self) -> int:
        from mosaic.retrain.run import run

        return run(self.folder, print)
