"""Random instances with the modules and the heterogeneity of the Mosaic paper's Table 1. All times are simulated.

Shapes::

    star      encoders -> backbone                        align     encoders, nothing in common but the loss
    chain     each waits for the one before               multi     encoders -> backbones -> decoders
    layered   each waits for one or two of the layer before it, two to five modules a layer
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mosaic.cost.communication import gradient_sum
from mosaic.cost.degrees import degrees_between, degrees_to_measure
from mosaic.hardware import find_cluster
from mosaic.solver.held_memory import find_devices
from mosaic.solver.instance import Disturbance, Instance, InstanceModule, InstanceOption
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine

Shape = Literal["star", "chain", "layered", "align", "multi"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
Waits = list[tuple[int, ...]]
"""For each module the modules that it waits for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of Table 1; the made-up H100 takes its operations for one sample's forward."""

    name: str
    layers: int
    width: int
    tera_flops: float
    """The column of that name, in 10^12."""
    intensity: float
    """Operations for each byte moved."""


BACKBONES = (
    Kind("qwen3vl_llm", 36, 4096, 22.27, 145.2),
    Kind("uio2_llm", 48, 3072, 16.70, 110.5),
    Kind("ofasys_llm", 36, 1280, 4.80, 41.6),
)
ENCODERS = (
    Kind("qwen3vl_vision", 27, 4096, 2.58, 82.4),
    Kind("qwen3vl_text", 1, 4096, 0.15, 2.1),
    Kind("uio2_vision", 11, 768, 1.48, 24.6),
    Kind("uio2_audio", 11, 768, 1.06, 21.8),
    Kind("uio2_text", 1, 3072, 0.10, 4.5),
    Kind("imagebind_vision", 24, 1024, 4.17, 35.2),
    Kind("imagebind_audio", 12, 768, 2.09, 22.8),
    Kind("imagebind_text", 12, 768, 1.04, 20.5),
    Kind("ofasys_vision", 8, 1280, 1.35, 18.2),
    Kind("ofasys_text", 4, 1280, 0.72, 12.5),
    Kind("ofasys_audio", 6, 1280, 0.95, 14.8),
)
"""Every row of the table; it has none of CLIP and CTVLM."""
BATCH = 32
PEAK_TERA_FLOPS = 500.0
"""Reached by dense bf16 layers on a whole H100."""
PEAK_TERA_BYTES = 3.0
BANDWIDTH_KNEE = 0.6
"""Share of the SMs that draws all of the memory bandwidth."""
CACHE = 4.0
"""Bytes in Table 1 count every operand; this many of them come out of caches for each one that does not."""
KEPT_SHARE = 0.75
"""Of a module's activations, the part that stays from forward to backward; the rest is workspace."""
LAUNCH_MS = 0.06
"""Least time of a layer."""
POD = find_cluster("h100-80g", 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A drawn instance; the same recipe gives the same instance everywhere."""

    shape: Shape
    num_modules: int
    """3 to 64."""
    num_devices: int = 8
    num_slots: int = 10
    """Slots a GPU: 10 for the paper's 10 %, 16 for Hopper's clusters of 8 SMs."""
    tight_memory: bool = False
    """A GPU holds little more than its largest module; otherwise 80 GB, or twice that module."""
    held_memory: bool = False
    """Tables say what modules keep across stages; GPUs hold a little more than the least with which a plan was found
    where memory is tight, and three times that otherwise."""
    disturbed: bool = False
    """Modules that draw much bandwidth slow each other down."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The instance's name."""
        memory = ("tight" if self.tight_memory else "loose") + ("-held" if self.held_memory else "")
        disturbed = "-disturbed" if self.disturbed else ""
        return f"{self.shape}-{self.num_modules}x{self.num_devices}x{self.num_slots}-{memory}{disturbed}-{self.seed}"


@dataclass(frozen=True, slots=True)
class DrawnModule:
    """A kind with its own amount of work, in one device's share of the batch and on a share of its SMs."""

    name: str
    kind: Kind
    scale: float
    """Work over that of its kind, log-normal."""
    backward: float
    """Backward over forward: 2, or 1 where the module's own weights are frozen, as one in six is."""
    blocks_per_sample: int
    """Thread blocks that one sample fills; few of them waste SMs."""

    @classmethod
    def draw(cls, kind: Kind, name: str, dice: random.Random) -> DrawnModule:
        """Draws a module around a row of the table."""
        scale = math.exp(dice.gauss(0.0, 0.4))
        backward = 1.0 if dice.random() < 1 / 6 else 2.0
        return cls(name, kind, scale, backward, max(4, round(kind.width / 32 * dice.uniform(0.5, 2.0))))

    @property
    def bandwidth(self) -> float:
        """Share of a device's bandwidth that it draws with all of its SMs."""
        moved_ms = self.kind.tera_flops / self.kind.intensity / CACHE / PEAK_TERA_BYTES
        return moved_ms / max(moved_ms, self.kind.tera_flops / PEAK_TERA_FLOPS)

    def options(self, degrees: Sequence[int], num_slots: int, *, held: bool) -> tuple[InstanceOption, ...]:
        """Returns an option for every degree and quota, in whole nanoseconds; ``held``: with the bytes that it keeps.

        Half of the sum of bf16 gradients hides behind backward. Weights, gradients and the ZeRO-sharded optimizer
        stay; activations are those of its share of the batch.
        """
        parameters = 12.0 * self.kind.layers * self.kind.width**2
        options = []
        for degree in degrees:
            state = parameters * (4.0 + 12.0 / degree)
            memory = round(state + 34.0 * 512 * self.kind.layers * self.kind.width * -(-BATCH // degree))
            reduce_ms = gradient_sum(round(2 * parameters), degree, POD).time_ms / 2
            for quota in range(1, num_slots + 1):
                forward_ms = self._compute_ms(-(-BATCH // degree), quota / num_slots)
                options.append(
                    InstanceOption(
                        degree=degree,
                        quota=quota,
                        forward_ms=round(forward_ms, 6),
                        backward_ms=round(forward_ms * self.backward + reduce_ms, 6),
                        memory_bytes=memory,
                        resident_bytes=round(state) if held else 0,
                        activation_bytes=round((memory - round(state)) * KEPT_SHARE) if held else 0,
                    )
                )
        return tuple(options)

    def _compute_ms(self, samples: int, share: float) -> float:
        """The roofline of one forward on a share of a device, in waves of whole blocks, never below its launches."""
        blocks = samples * self.blocks_per_sample
        sms = max(1, round(132 * share))
        waste = -(-blocks // sms) * sms / blocks
        work = samples * self.kind.tera_flops * self.scale
        math_ms = work / (PEAK_TERA_FLOPS * share) * waste * 1e3
        moved = work / self.kind.intensity / CACHE
        copy_ms = moved / (PEAK_TERA_BYTES * min(1.0, share / BANDWIDTH_KNEE)) * 1e3
        return max(math_ms, copy_ms) + LAUNCH_MS * self.kind.layers


def generate(recipe: Recipe) -> Instance:
    """Makes an instance: Table 1's modules, their work drawn anew around the table's, on H100s."""
    dice = random.Random(f"{recipe.shape} {recipe.num_modules} {recipe.seed}")
    waits = _draw_waits(recipe.shape, recipe.num_modules, dice)
    feeds = {other for others in waits for other in others}
    kinds = []
    for index, others in enumerate(waits):  # backbones where several branches meet
        is_backbone = others and (recipe.shape == "star" or (recipe.shape == "multi" and index in feeds))
        kinds.append(dice.choice(BACKBONES if is_backbone else ENCODERS))
    return _build(recipe, recipe.name, kinds, waits, dice)


def ofasys(num_modules: int, *, num_slots: int = 10, seed: int = 0) -> Instance:
    """Returns the paper's OFASys with as many modules on 8 GPUs: encoders of Table 1 in turn, then its backbone."""
    own = [kind for kind in ENCODERS if kind.name.startswith("ofasys")]
    kinds = [*(own[index % len(own)] for index in range(num_modules - 1)), BACKBONES[-1]]
    dice = random.Random(f"ofasys {num_modules} {seed}")
    recipe = Recipe(shape="star", num_modules=num_modules, num_slots=num_slots, seed=seed)
    waits = _draw_waits("star", num_modules, dice)
    return _build(recipe, f"ofasys-{num_modules}x{recipe.num_devices}-{seed}", kinds, waits, dice)


def _build(recipe: Recipe, name: str, kinds: Sequence[Kind], waits: Waits, dice: random.Random) -> Instance:
    drawn = [DrawnModule.draw(kind, f"{kind.name}_{index}", dice) for index, kind in enumerate(kinds)]
    degrees = degrees_between(degrees_to_measure(recipe.num_devices))  # those that planning offers
    modules = tuple(
        InstanceModule(
            name=module.name,
            options=module.options(degrees, recipe.num_slots, held=recipe.held_memory),
            after=tuple(drawn[other].name for other in others),
        )
        for module, others in zip(drawn, waits, strict=True)
    )
    least = max(min(option.memory_bytes for option in module.options) for module in modules)
    memory = round(least * dice.uniform(1.1, 1.6)) if recipe.tight_memory else max(80 * 10**9, 2 * least)
    if recipe.held_memory:
        factor = dice.uniform(1.05, 1.3) if recipe.tight_memory else 3
        memory = round(_least_memory(modules, recipe.num_devices) * factor)
    disturbances = tuple(
        Disturbance(module=own.name, beside=other.name, forward=round(cost, 4), backward=round(1.2 * cost, 4))
        for own in drawn
        for other in drawn
        if own is not other and (cost := 0.5 * own.bandwidth * other.bandwidth) >= 0.005
    )
    return Instance(
        name=name,
        source="simulated: a roofline of an H100 with launch floors, wave quantisation and communication",
        num_devices=recipe.num_devices,
        num_slots=recipe.num_slots,
        memory_bytes=memory,
        modules=modules,
        disturbances=disturbances if recipe.disturbed else (),
    )


def _least_memory(modules: Sequence[InstanceModule], num_devices: int) -> int:
    """About the least memory of a GPU with which modules, each in turn, have GPUs that hold what they keep."""
    options = {module.name: sorted({_kept(o).degree: _kept(o) for o in module.options}.values()) for module in modules}
    partition = [(name,) for name in options]
    low, high = 0, sum(module.options[0].memory_bytes for module in modules)
    while high - low > high // 100:
        middle = (low + high) // 2
        machine = Machine(num_devices=num_devices, num_slots=1, memory_bytes=middle)
        if find_devices(options, partition, machine).stages is None:
            low = middle
        else:
            high = middle
    return high


def _kept(option: InstanceOption) -> DeploymentOption:
    return DeploymentOption(
        degree=option.degree,
        quota=1,
        forward_ns=0,
        backward_ns=0,
        memory_bytes=option.memory_bytes,
        kept_bytes=option.resident_bytes + option.activation_bytes,
    )


def _draw_waits(shape: Shape, num_modules: int, dice: random.Random) -> Waits:
    waits: Waits = [()] * num_modules
    if shape == "star":
        waits[-1] = tuple(range(num_modules - 1))
    elif shape == "chain":
        waits[1:] = [(index - 1,) for index in range(1, num_modules)]
    elif shape == "layered":
        before: list[int] = []
        first = 0
        while first < num_modules:
            layer = range(first, first + min(dice.randint(2, 5), num_modules - first))
            for index in layer:
                waits[index] = tuple(sorted(dice.sample(before, min(len(before), dice.randint(1, 2)))))
            before, first = list(layer), layer.stop
    elif shape == "multi":
        backbones = max(1, min(4, num_modules // 5))
        encoders = max(1, (num_modules - backbones) * 3 // 5)
        for index in range(encoders, encoders + backbones):
            waits[index] = tuple(sorted(dice.sample(range(encoders), dice.randint(1, encoders))))
        for index in range(encoders + backbones, num_modules):
            waits[index] = (encoders + dice.randrange(backbones),)
    return waits
