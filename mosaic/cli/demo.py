"""``mosaic demo``: the complete workflow on a real data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mosaic.cli.options import BackendName, Json, Strict, console_beside, open_named_backend, write_json


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a three-encoder model on real handwriting and synthetic speech, plain and colocated.

    Finds and profiles the encoders, solves for a plan, and checks that colocated training gives the numbers of plain
    training (bit for bit on the host, within 1e-4 on a GPU). Then it trains both ways in turn, and writes profile,
    plan, measurements, a picture and a trace to a folder. Uses a GPU and a larger model if a GPU is present. Takes
    under three minutes on a GPU or on two cores.
    """

    output: Path = Path("mosaic-demo")
    """Folder for the results."""
    backend: BackendName = None
    rounds: int = 12
    """Number of rounds; each trains plain and colocated in turn."""
    strict: Strict = False
    json: Json = None

    def execute(self) -> None:
        from mosaic.demo.loop import DemoSettings
        from mosaic.demo.record import summary_table
        from mosaic.demo.run import run_demo
        from mosaic.report.progress import Progress

        console, backend = console_beside(self.json), open_named_backend(self.backend)
        settings = DemoSettings(kind=backend.device.kind, rounds=self.rounds, strict=self.strict)
        with Progress() as progress:
            record = run_demo(settings, self.output, backend, progress, console)
        console.print(summary_table(record))
        files = ", ".join(sorted(path.name for path in self.output.glob("*.*")))
        console.print(f"wrote to {self.output}: {files}")
        write_json(record, self.json)
