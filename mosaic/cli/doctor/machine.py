"""``mosaic doctor``: this machine's devices, what works, what is missing, and remedies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import mosaic
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda import probe as cuda_probe
from mosaic.cache_folder import default_cache_folder, folder_use
from mosaic.cli.doctor import findings as findings_of
from mosaic.cli.doctor.printing import SEVERITIES, print_findings
from mosaic.cli.doctor.report import (
    CacheReport,
    DeviceReport,
    Diagnosis,
    DoctorReport,
    HostReport,
    PackageReport,
    TorchReport,
)
from mosaic.errors import BackendUnavailableError, CudaError

# Distribution name -> the extra that brings it, or none if always needed.
_PACKAGES: Mapping[str, str | None] = {
    "torch": None,
    "numpy": None,
    "ortools": None,
    "cuda-python": None,
    "nvidia-ml-py": None,
    "pydantic": None,
    "tyro": None,
    "rich": None,
    "safetensors": None,
    "matplotlib": "plot",
    "scikit-learn": "demo",
    "espeakng-loader": "demo",
}


def collect_report(environ: Mapping[str, str] = os.environ) -> DoctorReport:
    """Examines the machine; a broken driver raises no error.

    Imports no heavy package such as torch.

    Args:
        environ: The environment to examine.
    """
    findings: list[Diagnosis] = []
    host, torch = _host(environ), _torch()
    packages = tuple(PackageReport(name=name, version=_version(name), extra=extra) for name, extra in _PACKAGES.items())
    extension_loads = _extension_loads(findings)
    driver = _driver(findings) if extension_loads else None
    devices = _devices(driver, findings) if driver is not None else ()
    nvml = _nvml(findings, has_driver=driver is not None)
    findings += findings_of.find_in_device_counts(nvml, devices) if driver is not None else []
    findings += findings_of.find_in_torch(torch, has_gpu=bool(devices))
    findings += findings_of.find_in_environment(environ)
    findings += findings_of.find_in_launch_order(environ, num_devices=len(devices))
    probe = _probe(findings, has_gpu=bool(devices))
    for entry in devices:
        findings += findings_of.find_beside(entry.device)
    findings += findings_of.find_in_host(host)
    findings += findings_of.find_in_packages(packages)
    return DoctorReport(
        mosaic_version=mosaic.__version__,
        host=host,
        torch=torch,
        packages=packages,
        extension_loads=extension_loads,
        driver=driver,
        devices=devices,
        nvml=nvml,
        probe=probe,
        cache=_cache(environ, findings),
        works=_works(host, torch, driver, devices),
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _host(environ: Mapping[str, str]) -> HostReport:
    installed = os.cpu_count() or 1
    has_affinity = hasattr(os, "sched_getaffinity")
    return HostReport(
        platform=platform.platform(),
        python=platform.python_version(),
        num_cores=len(os.sched_getaffinity(0)) if has_affinity else installed,
        num_cores_installed=installed,
        omp_wait_policy=environ.get("OMP_WAIT_POLICY"),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> TorchReport | None:
    version = _version("torch")
    spec = importlib.util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return None
    # torch's CUDA version is in this file; importing torch would take a second.
    written = Path(spec.origin).with_name("version.py")
    text = written.read_text(encoding="utf-8") if written.is_file() else ""
    built_with = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return TorchReport(version=version, cuda=built_with.group(1) if built_with else None)


def _extension_loads(findings: list[Diagnosis]) -> bool:
    try:
        cuda.require_extension()
    except BackendUnavailableError as problem:
        findings.append(findings_of.find_in_extension(problem))
        return False
    return True


def _driver(findings: list[Diagnosis]) -> cuda.DriverDescription | None:
    try:
        driver = cuda.describe_driver()
    except (BackendUnavailableError, CudaError) as problem:
        findings.append(findings_of.find_in_driver(problem))
        return None
    findings += findings_of.find_in_missing_functions(driver)
    return driver


def _devices(driver: cuda.DriverDescription, findings: list[Diagnosis]) -> tuple[DeviceReport, ...]:
    if "base" in cuda.lost_uses(driver):
        return ()
    try:
        devices = cuda.describe_devices()
    except (BackendUnavailableError, CudaError) as problem:
        findings.append(findings_of.find_in_driver(problem))
        return ()
    if "slots" in cuda.lost_uses(driver):
        return tuple(DeviceReport(device=device, slots=None, fine_slots=None) for device in devices)
    return tuple(_device(device, findings) for device in devices)


def _device(device: cuda.CudaDevice, findings: list[Diagnosis]) -> DeviceReport:
    slots = fine = None
    try:
        slots = cuda.describe_slots(device.ordinal)
        fine = cuda.describe_slots(device.ordinal, fine=True)
    except (BackendUnavailableError, CudaError) as problem:
        findings.append(findings_of.find_in_slots(device.ordinal, problem))
    return DeviceReport(device=device, slots=slots, fine_slots=fine)


def _nvml(findings: list[Diagnosis], *, has_driver: bool) -> cuda.NvmlDescription | None:
    try:
        return cuda.describe_nvml()
    except BackendUnavailableError as problem:
        findings.append(findings_of.find_in_nvml(problem, has_driver=has_driver))
        return None


def _probe(findings: list[Diagnosis], *, has_gpu: bool) -> str | None:
    """Returns the version of the compiler of the SM probe."""
    try:
        return cuda_probe.nvrtc_version()
    except BackendUnavailableError as problem:
        if has_gpu:
            findings.append(findings_of.find_in_probe(problem))
        return None


def _cache(environ: Mapping[str, str], findings: list[Diagnosis]) -> CacheReport | None:
    try:
        folder = default_cache_folder(environ)
    except RuntimeError as problem:
        findings.append(findings_of.find_in_cache(problem))
        return None
    use = folder_use(folder)
    return CacheReport(folder=str(folder), num_files=use.num_files, num_bytes=use.num_bytes)


def _works(
    host: HostReport,
    torch: TorchReport | None,
    driver: cuda.DriverDescription | None,
    devices: tuple[DeviceReport, ...],
) -> tuple[str, ...]:
    works = ["planning for any described device (`mosaic plan`); it needs no GPU"]
    if torch is not None:
        cores = "core" if host.num_cores == 1 else "cores"
        works.append(
            f"the host backend: modules side by side on {host.num_cores} {cores} "
            "(`mosaic demo`, `mosaic profile`, `mosaic run`)"
        )
    splits = any(device.slots is not None for device in devices)
    if splits and torch is not None and torch.cuda is not None and driver is not None and not cuda.lost_uses(driver):
        works.append(
            "the cuda backend: modules side by side on partitions of the GPU's SMs "
            "(`mosaic bench` measures what that gains here)"
        )
    elif splits:
        works.append("splitting the GPU's SMs into slots, to look at them")
    return tuple(works)


def render(report: DoctorReport, console: Console) -> None:
    """Prints the report."""
    console.print(_overview(report))
    if report.devices:
        console.print(_device_table(report))
    else:
        console.print("[bold]No NVIDIA GPU can be used here.[/bold]")
    console.print("\n[bold]What works on this machine[/bold]")
    for line in report.works:
        console.print(Padding(f"- {escape(line)}", (0, 0, 0, 2)))
    print_findings(report.findings, console)


def _overview(report: DoctorReport) -> Table:
    host, torch = report.host, report.torch
    table = Table(title=f"Mosaic {report.mosaic_version}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("machine", f"{host.platform}, Python {host.python}")
    table.add_row("CPU cores", f"{host.num_cores} available of {host.num_cores_installed}")
    table.add_row("OMP_WAIT_POLICY", host.omp_wait_policy or "not set")
    built = "without CUDA" if torch is None or torch.cuda is None else f"with CUDA {torch.cuda}"
    table.add_row("torch", "not installed" if torch is None else f"{torch.version}, built {built}")
    table.add_row("extension", "mosaic._C loads" if report.extension_loads else "mosaic._C does not load")
    table.add_row("driver", "none" if report.driver is None else f"CUDA {report.driver.version}")
    nvml = report.nvml
    table.add_row("NVML", "none" if nvml is None else f"driver {nvml.driver_version}, {nvml.num_devices} GPUs")
    table.add_row("SM probe", "cannot be compiled" if report.probe is None else f"compiled by NVRTC {report.probe}")
    table.add_row("profile cache", _cache_words(report))
    return table


def _cache_words(report: DoctorReport) -> str:
    cache = report.cache
    if cache is None:
        return "none"
    files = f"{cache.num_files} file{'' if cache.num_files == 1 else 's'}, {cache.num_bytes / 1e6:.1f} MB"
    return f"{cache.folder} ({files if cache.num_files else 'empty'})"


def _device_table(report: DoctorReport) -> Table:
    table = Table(title="GPUs", title_justify="left")
    for heading in ("", "name", "CC", "memory (GiB)", "SMs", "slots", "SMs a slot", "left over", "fine slots"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for entry in report.devices:
        device, slots, fine = entry.device, entry.slots, entry.fine_slots
        table.add_row(
            str(device.ordinal),
            device.name,
            device.compute_capability,
            f"{device.total_memory_bytes / 2**30:.0f}",
            str(device.num_sms),
            *(("-",) * 3 if slots is None else map(str, (slots.num_slots, slots.sms_per_slot, slots.remainder_sms))),
            "-" if fine is None else f"{fine.num_slots} of {fine.sms_per_slot}",
        )
    return table
