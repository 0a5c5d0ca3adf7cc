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
"""Of the optimizer's state for each parameter that trains: AdamW's two moments in 32 bits."""


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
        """Puts a cost model together; ``from_profile`` is the usual way.

        Args:
            surfaces: One for each module and phase; a module without a backward surface takes no time there.
            memory: Bytes that modules keep, by name.
            optimizer_bytes: State of the optimizer on each of a module's devices, by name; none where left out.
            peak_bytes: Most bytes in use during a phase above those before it, by degree.
            interference: Defaults to none.
            profile_fingerprint: Names the profile behind it.
        """
        self._surfaces = dict(surfaces)
        self._memory = dict(memory or {})
        self._optimizer_bytes = dict(optimizer_bytes or {})
        self._peak_bytes = dict(peak_bytes or {})
        self.interference = interference or NoInterference()
        self.profile_fingerprint = profile_fingerprint

    @classmethod
    def from_profile(cls, profile: Profile, *, optimizer_bytes: float = ADAMW_BYTES) -> CostModel:
        """Builds surfaces, memory and the interference of measured pairs from a profile.

        A frozen module without backward samples takes no time in the backward pass.

        Args:
            profile: Measurements of all modules.
            optimizer_bytes: State of the optimizer for each parameter that trains, which a profile does not measure: 8
                is AdamW in 32 bits, 12 the same with master weights, 4 plain momentum, 0 SGD. It is not sharded.

        Raises:
            InvalidProfileError: A module has no samples of a phase that it runs.
            ValueError: ``optimizer_bytes`` is negative or infinite.
        """
        if not 0 <= optimizer_bytes < math.inf:
            raise ValueError(f"optimizer_bytes={optimizer_bytes}; bytes for each parameter are finite, 0 or more")
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
        """Returns the data-parallel degrees sampled in every phase of a module and those between them, rising."""
        surfaces = self._surfaces_of(module)
        sampled = [d for d in surfaces[0].degrees if all(d in surface.degrees for surface in surfaces)]
        return tuple(degree for degree in degrees_between(sampled) if self._can_run(module, degree)) if sampled else ()

    def _can_run(self, module: str, degree: int) -> bool:
        try:
            return bool(self.quotas(module, degree))
        except ValueError:  # next to a degree at which the module cannot run
            return False

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas in slots that the samples of every phase enclose, rising.

        Raises:
            ValueError: The degree lies outside what was sampled.
        """
        first, *others = (surface.quotas(degree) for surface in self._surfaces_of(module))
        return tuple(quota for quota in first if all(quota in other for other in others))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        self._surfaces_of(module)
        surface = self._surfaces.get((module, phase))
        return 0.0 if surface is None else surface.time_ms(degree, quota)

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the kept bytes and the larger of both phases' peaks above them; 0 where nothing was measured."""
        memory = self._memory.get(module)
        activations = -(-memory.activation_bytes // degree) if memory else 0
        # A forward's peak already holds the activations that it leaves behind.
        forward = self._peak(module, Phase.FORWARD, degree) - activations
        return self.kept_bytes(module, degree) + max(0, forward, self._peak(module, Phase.BACKWARD, degree))

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes of parameters, gradients, the optimizer's state, the lane's libraries and activations."""
        memory = self._memory.get(module)
        if memory is None:
            return 0
        resident = memory.resident_bytes + memory.lane_bytes + self._optimizer_bytes.get(module, 0)
        return resident + -(-memory.activation_bytes // degree)

    def _peak(self, module: str, phase: Phase, degree: int) -> int:
        by_degree = self._peak_bytes.get((module, phase), {})
        # A lower degree has more samples a device, so its peak is the safe one to stand in.
        below = [sampled for sampled in by_degree if sampled <= degree]
        return by_degree[max(below)] if below else max(by_degree.values(), default=0)

    def _surfaces_of(self, module: str) -> list[ScalingSurface]:
        surfaces = [self._surfaces[module, phase] for phase in Phase if (module, phase) in self._surfaces]
        if (module, Phase.FORWARD) not in self._surfaces:
            raise InvalidProfileError(
                f"no module {module!r} in this cost model; it knows {', '.join(self.names) or 'none'}: profile it"
            )
        return surfaces


def _optimizer_state(profile: Profile, bytes_each: float) -> dict[str, int]:
    """The optimizer's bytes by module; a graph says of partly frozen modules only that something trains."""
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
                    f"the profile has no {phase} samples of {node.name!r}; profile this model again"
                )
    return grouped
