"""The harness of all studies: rounds in turn, intervals, and a result file that says where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bench.record import Figure, Study
from mosaic.artifact import save
from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance


def study_of(study: str, figures: Sequence[Figure], load: ForeignLoad | None, machine: Device | None = None) -> Study:
    """Returns figures with where they come from; the machine is the host unless it is given."""
    provenance = Provenance.here()
    return Study(
        study=study,
        command=provenance.command,
        created=provenance.created,
        commit=provenance.commit,
        python_version=provenance.python_version,
        torch_version=torch.__version__,
        machine=machine or HostBackend().device,
        foreign_cpu_share=None if load is None else load.share,
        figures=tuple(figures),
    )


def finish(study: str, figures: Sequence[Figure], load: ForeignLoad, path: Path | None) -> Study:
    """Prints the figures and writes the result file."""
    result = study_of(study, figures, load)
    for figure in figures:
        shown = "not measured: " + figure.reason if figure.value is None else f"{figure.value:.3f}"
        interval = f"  [{figure.low:.3f}, {figure.high:.3f}]" if figure.low is not None else ""
        print(f"{figure.name:58} {shown}{interval}  ({figure.source})")
    if path is not None:
        save(result, path)
    return result
