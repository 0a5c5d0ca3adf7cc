"""Coefficients of interference on the command line: fitted to one model's groups, used for another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mosaic.artifact import load, save
from mosaic.cost import Bandwidths, HasBandwidth, Interference, InterferenceFit, fit_interference
from mosaic.cost.choice import InterferenceKind, check_fit
from mosaic.cost.fit import Form
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase, Profile


def form_of(name: str) -> InterferenceKind:
    """Returns the form that a word on the command line stands for."""
    found: InterferenceKind = "mosaic" if name == "ours" else name  # type: ignore[assignment]
    return found


def fit_groups(profile: Profile, name: str, path: Path) -> Iterator[str]:
    """Fits a form to the groups of a profile, writes the fit, and yields lines about it.

    Raises:
        MosaicError: There are no groups or too few, or their modules' bandwidth is not known.
    """
    if not profile.groups and not profile.pairs:
        raise MosaicError("--fit takes modules that ran side by side: give --groups 24 or so")
    form: Form = form_of(name)  # type: ignore[assignment]
    fit = fit_interference(
        profile.groups, Bandwidths(profile.samples), form, device=profile.device, pairs=profile.pairs
    )
    save(fit, path)
    for of in fit.phases:
        values = ", ".join(f"{c.name} {c.value:.3g}{_interval(c.low, c.high)}" for c in of.coefficients)
        error = "" if of.held_out_mean is None else f"; groups left out are predicted within {of.held_out_mean:.1%}"
        yield f"interference, {of.phase}, {of.num_groups} groups: {values or 'no coefficients'}{error}"
    yield f"wrote {path}"


def load_fit(path: Path | None, name: str, device: Device, *, described: str | None = None) -> InterferenceFit | None:
    """Reads a fit for planning; None where none was given.

    Args:
        path: The file.
        name: Form, as on the command line.
        device: What is planned for.
        described: Name of its description, which is not what a driver calls it.

    Raises:
        MosaicError: The file is no fit or an old one, or the fit is of another form or another device.
    """
    if path is None:
        return None
    form = form_of(name)
    if form == "measured":
        raise MosaicError("--fit FILE holds coefficients of a form; say of which one: --interference ours")
    fit = load(InterferenceFit, path)
    if fit.form != form:
        raise MosaicError(f"{path} is a fit of the form {fit.form!r}, not of {form!r}; give --interference {fit.form}")
    if fit.device.num_slots != device.num_slots or not _is_named(fit.device, device, described):
        raise MosaicError(
            f"{path} was fitted on {fit.device.name} with {fit.device.num_slots} slots, and this is {device.name} with "
            f"{device.num_slots}; fit it there: mosaic profile --groups 24 --fit FILE"
        )
    return fit


def apply_fit(
    fit: InterferenceFit, graph: ModuleGraph, bandwidths: HasBandwidth
) -> tuple[Interference, tuple[str, ...]]:
    """Returns the interference of counted modules, and where they lie outside of what was fitted."""
    quotas = range(1, fit.device.num_slots + 1)
    shares = {
        (name, phase): [bandwidths.bandwidth(name, phase, 1, quota) for quota in quotas]
        for name in graph.names
        for phase in Phase
    }
    return fit.interference(bandwidths), check_fit(fit, shares, device=fit.device, num_modules=len(graph.names))


def _is_named(fitted: Device, planned: Device, described: str | None) -> bool:
    if described is None or fitted.name == planned.name:
        return fitted.name == planned.name
    from mosaic.profiler.counting import hardware_of

    hardware = hardware_of(fitted)
    return hardware is not None and hardware.name == described


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
