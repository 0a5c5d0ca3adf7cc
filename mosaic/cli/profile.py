"""``mosaic profile``: finds and measures a user's modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mosaic.artifact import save
from mosaic.cli.options import BackendName, Json, Model, Strict, console_beside, open_named_backend, write_json
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.hardware import Cluster, find_cluster, hardware_of
from mosaic.profile import Profile
from mosaic.report.progress import Progress
from mosaic.report.table import graph_table, profile_table


@dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measure forward and backward of each module at each quota, alone and beside other modules."""

    model: Model
    output: Path = Path("profile.json")
    """File of the profile."""
    quotas: Literal["tenths", "all"] | tuple[int, ...] = "tenths"
    """Quotas to measure: tenths of the device, all, or numbers of slots such as 1 2 4."""
    degrees: tuple[int, ...] = (1,)
    """Data-parallel degrees, such as 1 2 3. Above 1, a share of the batch is measured, communication is predicted."""
    cluster: str | None = None
    """Devices and links for degrees above 1: a name such as h100-80g, or a .json file; by default the usual ones."""
    cache: Path | None = None
    """Folder of measurements to reuse; by default mosaic/profiles in the user's cache folder."""
    fresh: bool = False
    """Ignore the cache and measure everything again."""
    backend: BackendName = None
    strict: Strict = False
    json: Json = None

    def execute(self) -> None:
        profile = measure(self)
        save(profile, self.output)
        console = console_beside(self.json)
        console.print(graph_table(profile.graph))
        console.print(profile_table(profile))
        console.print(*_notes(profile), f"wrote {self.output}", sep="\n", highlight=False, markup=False)
        write_json(profile, self.json)


def measure(command: ProfileCommand) -> Profile:
    """Loads a model, finds its modules and measures them."""
    from mosaic.cli.workload import load_workload, moved
    from mosaic.engine import find_modules
    from mosaic.profiler import ProfileCache, ProfileSettings, open_cache, profile_modules

    workload = load_workload(command.model)
    first = next(iter(workload.model.parameters()), None)
    on_gpu = first is not None and first.device.type == "cuda"
    backend = open_named_backend(command.backend or (str(first.device) if first is not None and on_gpu else "host"))
    max_degree = max(command.degrees, default=0)
    network = _described_links(command.cluster, max_degree, backend.device) if max_degree > 1 else None
    with Progress() as progress:
        finding = find_modules(
            workload.model.to(backend.torch_device),
            moved(workload.sample, backend.torch_device),
            may_share=max_degree > 1,  # several ranks allow it
        )
        return profile_modules(
            workload.model,
            finding.subjects,
            finding.graph,
            backend,
            quotas=command.quotas,
            degrees=command.degrees,
            network=network,
            cache=ProfileCache(open_cache(command.cache or "user").folder, reuse=not command.fresh),
            settings=ProfileSettings(strict=command.strict),
            progress=progress.follow("profiling"),
        )


def _described_links(cluster: str | None, gpus: int, device: Device) -> Cluster:
    """Returns the links for gradient reduction, from a description or the device's usual ones."""
    if cluster is not None:
        return find_cluster(cluster, None if cluster.endswith(".json") else gpus)
    hardware = hardware_of(device)
    if hardware is None:
        raise MosaicError(f"links between several {device.name} are unknown; describe them with --cluster FILE.json")
    return find_cluster(hardware.name, gpus)


def _notes(profile: Profile) -> list[str]:
    composed = sum(sample.degree > 1 for sample in profile.samples)
    infeasible = [sample for sample in profile.samples if sample.infeasible is not None]
    counts = f"{len(profile.samples)} samples ({composed} composed, {len(infeasible)} infeasible)"
    notes = [f"{counts}, {len(profile.pairs)} beside one other module"]
    reasons: dict[tuple[str, int, str], set[int]] = {}
    for sample in infeasible:
        reasons.setdefault((sample.module, sample.degree, sample.infeasible or ""), set()).add(sample.quota)
    for (module, degree, reason), quotas in reasons.items():
        where = f" of each of {degree} devices" if degree > 1 else ""
        notes.append(f"{module} cannot run at {', '.join(map(str, sorted(quotas)))} slots{where}: {reason}")
    return notes
