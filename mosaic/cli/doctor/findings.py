"""The rules of ``mosaic doctor``, from descriptions to remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.backends.cuda.driver import CudaDevice, DriverDescription, NvmlDescription, lost_uses
from mosaic.backends.cuda.environment import EnvironmentFinding, Surroundings, ask_nvml, find_in, mps_control
from mosaic.cli.doctor.report import DeviceReport, Diagnosis, HostReport, PackageReport, TorchReport
from mosaic.errors import BackendUnavailableError, CudaError

_TODO_BY_STATUS = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated under a running kernel module: reboot",
    "CUDA_ERROR_NOT_INITIALIZED": "run outside a process forked after CUDA was used",
}
_TODO_BY_USE = {
    "base": "install a driver of CUDA 12.5 or newer: with this one devices cannot be described",
    "slots": "install a driver of CUDA 12.5 or newer: with this one SMs cannot be split into slots",
    "streams": "install a driver of CUDA 12.5 or newer: with this one slots cannot be given streams",
}


def find_in_extension(problem: BackendUnavailableError) -> Diagnosis:
    """The extension does not load."""
    return Diagnosis(
        severity="error",
        what=f"the extension mosaic._C does not load: {problem.found}",
        todo="run `pip install -e .` (or `pip install .`) in Mosaic's folder; it needs g++ and Python's headers",
    )


def find_in_driver(problem: BackendUnavailableError | CudaError) -> Diagnosis:
    """The driver is missing, or fails."""
    if isinstance(problem, BackendUnavailableError):
        return Diagnosis(
            severity="note",
            what=str(problem),
            todo="nothing, if this machine has no NVIDIA GPU; else install its driver (CUDA 12.5 or newer), "
            "start the container with its GPUs, and look at CUDA_VISIBLE_DEVICES",
        )
    return Diagnosis(
        severity="error",
        what=str(problem),
        todo=_TODO_BY_STATUS.get(problem.status, "see whether `nvidia-smi` works, then `dmesg`; reboot"),
    )


def find_in_slots(ordinal: int, problem: BackendUnavailableError | CudaError) -> Diagnosis:
    """A device could not be split."""
    return Diagnosis(
        severity="error",
        what=f"device {ordinal} cannot be split into slots: {problem}",
        todo="update the driver (CUDA 12.5 or newer); green contexts also need a 64-bit Linux",
    )


def find_in_missing_functions(driver: DriverDescription) -> list[Diagnosis]:
    """The driver is too old for some of Mosaic's functions."""
    return [
        Diagnosis(
            severity="error",
            what=f"the driver (CUDA {driver.version}) lacks "
            + ", ".join(f"{function.name} ({function.since})" for function in driver.missing if function.use == use),
            todo=_TODO_BY_USE[use],
        )
        for use in lost_uses(driver)
    ]


def find_in_nvml(problem: BackendUnavailableError, *, has_driver: bool) -> Diagnosis:
    """NVML does not respond, which matters only with a driver."""
    return Diagnosis(
        severity="warning" if has_driver else "note",
        what=f"NVML does not answer: {problem.found}",
        todo=f"without it utilisation cannot be measured; it needs {problem.needed}"
        if has_driver
        else "nothing, if this machine has no NVIDIA GPU",
    )


def find_in_device_counts(nvml: NvmlDescription | None, devices: Sequence[DeviceReport]) -> list[Diagnosis]:
    """Some GPUs are hidden from CUDA."""
    if nvml is None or nvml.num_devices == len(devices):
        return []
    return [
        Diagnosis(
            severity="note",
            what=f"NVML counts {nvml.num_devices} GPUs, the CUDA driver offers {len(devices)}",
            todo="look at CUDA_VISIBLE_DEVICES and at MIG, if that is not meant",
        )
    ]


def find_in_environment(environ: Mapping[str, str]) -> list[Diagnosis]:
    """Settings that defeat partitions of SMs; the number of streams is not known yet."""
    surroundings = Surroundings(environ=environ, num_streams=None, mps_control=mps_control(environ))
    return [_finding(finding) for finding in find_in(surroundings)]


def find_in_launch_order(environ: Mapping[str, str], *, num_devices: int) -> list[Diagnosis]:
    """NCCL's order of launches, which matters for several ranks on GPUs; NCCL reads it once in a process."""
    value = environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")
    if num_devices < 2 or value == "1":
        return []
    return [
        Diagnosis(
            severity="note" if value is None else "warning",
            what=f"NCCL_LAUNCH_ORDER_IMPLICIT is {'not set' if value is None else value}: several ranks need 1; NCCL "
            "reads it once in a process, at the first collective",
            todo="`export NCCL_LAUNCH_ORDER_IMPLICIT=1` before the ranks start, if your loop makes the process group",
        )
    ]


def find_beside(device: CudaDevice) -> list[Diagnosis]:
    """Other users and modes of a device that defeat partitions, from NVML."""
    surroundings = Surroundings(environ={}, num_streams=None, nvml=ask_nvml(device.uuid))
    if surroundings.nvml.problem:  # there is a finding about NVML already
        return []
    return [_finding(finding, of=f"device {device.ordinal}: ") for finding in find_in(surroundings)]


def find_in_probe(problem: BackendUnavailableError) -> Diagnosis:
    """The probe of SM ids cannot be compiled."""
    return Diagnosis(
        severity="warning",
        what=f"partitions cannot be probed, so their SM ids stay unknown: {problem.found}",
        todo=f"bring {problem.needed}",
    )


def _finding(finding: EnvironmentFinding, *, of: str = "") -> Diagnosis:
    return Diagnosis(severity="warning", what=f"{of}{finding.found}: {finding.rule}", todo=finding.way_out)


def find_in_host(host: HostReport) -> list[Diagnosis]:
    """Settings that slow the host backend."""
    findings = []
    if host.num_cores == 1:
        findings.append(
            Diagnosis(
                severity="note",
                what="one CPU core: on the host backend modules take turns, and colocation gains nothing",
                todo="give the process more cores (taskset, the container's cpuset)",
            )
        )
    if (host.omp_wait_policy or "").upper() != "PASSIVE":
        setting = "not set" if host.omp_wait_policy is None else host.omp_wait_policy
        findings.append(
            Diagnosis(
                severity="note",
                what=f"OMP_WAIT_POLICY is {setting}: idle threads of one lane spin on the cores of another",
                todo="in your own scripts `export OMP_WAIT_POLICY=PASSIVE` before Python starts",
            )
        )
    return findings


def find_in_packages(packages: Sequence[PackageReport]) -> list[Diagnosis]:
    """Packages that are not installed."""
    findings = []
    for package in packages:
        if package.version is None and package.extra is None:
            findings.append(
                Diagnosis(
                    severity="error",
                    what=f"the package {package.name} is not installed, though Mosaic needs it",
                    todo=f"pip install {package.name}",
                )
            )
        elif package.version is None:
            findings.append(
                Diagnosis(
                    severity="note",
                    what=f"the package {package.name} is not installed (extra `{package.extra}`)",
                    todo=f"pip install 'mosaic-colocate[{package.extra}]', if you want what it is for",
                )
            )
    return findings


def find_in_torch(torch: TorchReport | None, *, has_gpu: bool) -> list[Diagnosis]:
    """A torch that cannot use the machine's GPU."""
    if torch is None or torch.cuda is not None or not has_gpu:
        return []
    return [
        Diagnosis(
            severity="warning",
            what=f"torch {torch.version} is built without CUDA, but this machine has a GPU",
            todo="install a CUDA build of torch: https://pytorch.org/get-started/locally/",
        )
    ]


def find_in_cache(problem: RuntimeError) -> Diagnosis:
    """No folder for measurements."""
    return Diagnosis(
        severity="note",
        what=f"measurements are not kept from run to run: {problem}",
        todo="set HOME or XDG_CACHE_HOME, or give mosaic.colocate a cache folder",
    )
