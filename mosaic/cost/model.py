"""The cost model of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mosaic.cost.degrees import degrees_between
from mosaic.cost.interference import Interference, MeasuredInterference, NoInterference
from mosaic.cost.protocol import Cost
from mosaic.cost.surfaces import ScalingSurface
from mosaic.errors import InvalidProfileError
from mosaic.profile import ModuleMemory, Phase, Profile, Sample

ADAMW_BYTES = 8.0
"""Optimizer state per trainable parameter: AdamW's two moments in 32 bits."""


class CostModel(Cost):
    """Measured time, memory and interference of the modules of one graph."""

    def __init__(
        self,
        surfaces: Mapping[tuple[str, Phase], ScalingSurface],
        *,
        memory: Mapping[str, ModuleMemory] | None = None,
        optimizer_bytes: Mapping[str, int] | None = None,
        peak_bytes: Mapping[tuple[str, Phase], Mapping[int, int]] | None = None,
        interference: Interference | None = None,
        profile_fingerprint: str | None = None,
    ) -> None:
        """Creates a cost model; ``from_profile`` is the usual way.

        Args:
            surfaces: One per module and phase; without a backward surface a module's backward takes no time.
            memory: Bytes that modules hold, by name.
            optimizer_bytes: Optimizer state on each of a module's devices, by name; by default none.
            peak_bytes: Peak bytes of a phase above those before it, by degree.
            interference: Defaults to none.
            profile_fingerprint: Fingerprint of the profile.
        """
        self._surfaces = dict(surfaces)
        self._memory = dict(memory or {})
        self._optimizer_bytes = dict(optimizer_bytes or {})
        self._peak_bytes = dict(peak_bytes or {})
        self.interference = interference or NoInterference()
        self.profile_fingerprint = profile_fingerprint

    @classmethod
    def from_profile(cls, profile: Profile, *, optimizer_bytes: float = ADAMW_BYTES) -> CostModel:
        """Builds surfaces, memory and measured interference from a profile.

        The backward of a frozen module without backward samples takes no time.

        Args:
            profile: Measurements of all modules.
            optimizer_bytes: Unsharded optimizer state per trainable parameter, which a profile does not measure: 8 for
                AdamW in 32 bits, 12 with master weights, 4 for momentum, 0 for SGD.

        Raises:
            InvalidProfileError: A module has no samples of a phase that it runs.
            ValueError: ``optimizer_bytes`` is negative or infinite.
        """
        if not 0 <= optimizer_bytes < math.inf:
            raise ValueError(f"optimizer_bytes={optimizer_bytes}; use a finite number, 0 or more")
        grouped = _by_phase(profile)
        peaks: dict[tuple[str, Phase], dict[int, int]] = {}
        for key, samples in grouped.items():
            at = peaks.setdefault(key, {})
            for sample in samples:
                at[sample.degree] = max(at.get(sample.degree, 0), sample.peak_bytes)
        return cls(
            {key: ScalingSurface(samples) for key, samples in grouped.items()},
            memory={entry.module: entry for entry in profile.memory},
            optimizer_bytes=_optimizer_state(profile, optimizer_bytes),
            peak_bytes=peaks,
            interference=MeasuredInterference(profile.pairs),
            profile_fingerprint=profile.fingerprint,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(module for module, phase in self._surfaces if phase is Phase.FORWARD)

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the data-parallel degrees sampled in every phase and those between them, increasing."""
        surfaces = self._surfaces_of(module)
        sampled = [d for d in surfaces[0].degrees if all(d in surface.degrees for surface in surfaces)]
        return tuple(degree for degree in degrees_between(sampled) if self._can_run(module, degree)) if sampled else ()

    def _can_run(self, module: str, degree: int) -> bool:
        try:
            return bool(self.quotas(module, degree))
        except ValueError:  # beside a degree at which the module cannot run
            return False

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas in slots within the samples of every phase, increasing.

        Raises:
            ValueError: The degree is outside the sampled range.
        """
        first, *others = (surface.quotas(degree) for surface in self._surfaces_of(module))
        return tuple(quota for quota in first if all(quota in other for other in others))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        self._surfaces_of(module)
        surface = self._surfaces.get((module, phase))
        return 0.0 if surface is None else surface.time_ms(degree, quota)

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the held bytes plus the larger peak of both phases; 0 without measurements."""
        memory = self._memory.get(module)
        activations = -(-memory.activation_bytes // degree) if memory else 0
        # a forward's peak includes the activations that it saves
        forward = self._peak(module, Phase.FORWARD, degree) - activations
        return self.kept_bytes(module, degree) + max(0, forward, self._peak(module, Phase.BACKWARD, degree))

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes of parameters, gradients, optimizer state, library workspaces and activations."""
        memory = self._memory.get(module)
        if memory is None:
            return 0
        resident = memory.resident_bytes + memory.lane_bytes + self._optimizer_bytes.get(module, 0)
        return resident + -(-memory.activation_bytes // degree)

    def _peak(self, module: str, phase: Phase, degree: int) -> int:
        by_degree = self._peak_bytes.get((module, phase), {})
        # a lower degree has more samples per device, so its peak is an upper bound
        below = [sampled for sampled in by_degree if sampled <= degree]
        return by_degree[max(below)] if below else max(by_degree.values(), default=0)

    def _surfaces_of(self, module: str) -> list[ScalingSurface]:
        surfaces = [self._surfaces[module, phase] for phase in Phase if (module, phase) in self._surfaces]
        if (module, Phase.FORWARD) not in self._surfaces:
            raise InvalidProfileError(
                f"the cost model has no module {module!r}, only {', '.join(self.names) or 'none'}: profile it"
            )
        return surfaces


def _optimizer_state(profile: Profile, bytes_each: float) -> dict[str, int]:
    """Returns the optimizer state by module; a graph does not have the frozen share of a module."""
    trained = {node.name: node.num_parameters if node.trainable else 0 for node in profile.graph.modules}
    trained |= {entry.module: entry.num_trained for entry in profile.memory if entry.num_trained is not None}
    return {name: math.ceil(count * bytes_each) for name, count in trained.items()}


def _by_phase(profile: Profile) -> dict[tuple[str, Phase], list[Sample]]:
    grouped: dict[tuple[str, Phase], list[Sample]] = {}
    for sample in profile.samples:
        grouped.setdefault((sample.module, sample.phase), []).append(sample)
    for node in profile.graph.modules:
        for phase in Phase:
            if (node.name, phase) not in grouped and (phase is Phase.FORWARD or node.trainable):
                raise InvalidProfileError(
                    f"the profile has no {phase} samples of {node.name!r}; profile the model again"
                )
    return grouped
