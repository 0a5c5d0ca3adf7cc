"""Made-up instances with the modules and the heterogeneity of the paper's Table 1. All times are simulated.

Shapes::

    star      encoders -> backbone                        align     encoders, nothing in common but the loss
    chain     each waits for the one before               multi     encoders -> backbones -> decoders
    layered   each waits for one or two of the layer before it, two to five modules a layer
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bench.solver.table_1 import BACKBONES, ENCODERS, POD, Kind, disturb, draw_module, tabulate
from mosaic.cost.degrees import degrees_between, degrees_to_look_at
from mosaic.solver.instance import Instance, InstanceModule, InstanceOption

Shape = Literal["star", "chain", "layered", "align", "multi"]
SHAPES: tuple[Shape, ...] = ("star", "chain", "layered", "align", "multi")
"""In the order of the module's docstring."""

MAX_DEVICES = POD.num_devices
Waits = list[tuple[int, ...]]
_Drawer = Callable[[int, random.Random], Waits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to generate; the same recipe gives the same instance everywhere."""

    shape: Shape
    """Which module waits for which."""
    num_modules: int
    """3 to 64."""
    num_devices: int = 8
    """GPUs."""
    num_slots: int = 10
    """Slots a GPU: 10 for the paper's 10 %, 16 for Hopper's clusters of 8 SMs."""
    tight_memory: bool = False
    """Whether a GPU holds little more than its largest module; otherwise 80 GB, or twice that module."""
    held_memory: bool = False
    """Whether the tables say what modules keep across stages; GPUs then hold a little more than the least with which a
    plan was found where memory is tight, and three times that otherwise."""
    disturbed: bool = False
    """Whether modules that draw much bandwidth slow each other down."""
    seed: int = 0
    """Seed."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}; use one of {', '.join(SHAPES)}")
        if not (3 <= self.num_modules <= 64 and 1 <= self.num_devices <= MAX_DEVICES and self.num_slots >= 1):
            raise ValueError(
                f"num_modules={self.num_modules}, num_devices={self.num_devices}, num_slots={self.num_slots}; "
                f"use 3 to 64 modules, 1 to {MAX_DEVICES} devices and at least one slot"
            )

    @property
    def name(self) -> str:
        """What the instance is called."""
        memory = ("tight" if self.tight_memory else "loose") + ("-held" if self.held_memory else "")
        disturbed = "-disturbed" if self.disturbed else ""
        return f"{self.shape}-{self.num_modules}x{self.num_devices}x{self.num_slots}-{memory}{disturbed}-{self.seed}"


def generate(recipe: Recipe) -> Instance:
    """Makes an instance: Table 1's modules, their work drawn anew around the table's, on H100s."""
    draw = random.Random(f"{recipe.shape} {recipe.num_modules} {recipe.seed}")
    waits = _WAITS[recipe.shape](recipe.num_modules, draw)
    kinds = _kinds(recipe.shape, waits, draw)
    return build(recipe, kinds, waits, draw)


def ofasys(
    num_modules: int, *, num_devices: int, num_slots: int = 10, disturbed: bool = True, seed: int = 0
) -> Instance:
    """Returns the paper's OFASys with as many modules: encoders of Table 1 in turn, then its backbone."""
    recipe = Recipe(
        shape="star",
        num_modules=num_modules,
        num_devices=num_devices,
        num_slots=num_slots,
        disturbed=disturbed,
        seed=seed,
    )
    own = [kind for kind in ENCODERS if kind.name.startswith("ofasys")]
    kinds = [own[index % len(own)] for index in range(num_modules - 1)]
    backbone = next(kind for kind in BACKBONES if kind.name.startswith("ofasys"))
    draw = random.Random(f"ofasys {num_modules} {seed}")
    name = f"ofasys-{num_modules}x{num_devices}-{seed}"
    return build(recipe, [*kinds, backbone], _star(num_modules, draw), draw, name=name)


def build(
    recipe: Recipe, kinds: Sequence[Kind], waits: Waits, draw: random.Random, *, name: str | None = None
) -> Instance:
    """Gives every module its option table, and the machine its memory."""
    drawn = [draw_module(kind, f"{kind.name}_{index}", draw) for index, kind in enumerate(kinds)]
    degrees = degrees_between(degrees_to_look_at(recipe.num_devices))  # those that planning offers
    modules = [
        InstanceModule(
            name=one.name,
            options=tabulate(one, degrees, recipe.num_slots, held=recipe.held_memory),
            after=tuple(drawn[other].name for other in others),
        )
        for one, others in zip(drawn, waits, strict=True)
    ]
    least = max(min(option.memory_bytes for option in module.options) for module in modules)
    memory = round(least * draw.uniform(1.1, 1.6)) if recipe.tight_memory else max(80 * 10**9, 2 * least)
    if recipe.held_memory:
        memory = round(
            _least_memory(modules, recipe.num_devices) * (draw.uniform(1.05, 1.3) if recipe.tight_memory else 3)
        )
    return Instance(
        name=name or recipe.name,
        source="simulated: a roofline of an H100 with launch floors, wave quantisation and communication",
        num_devices=recipe.num_devices,
        num_slots=recipe.num_slots,
        memory_bytes=memory,
        modules=tuple(modules),
        disturbances=disturb(drawn) if recipe.disturbed else (),
    )


def _least_memory(modules: Sequence[InstanceModule], num_devices: int) -> int:
    """About the least memory of a GPU with which modules have GPUs that hold what they keep; not proven least."""
    lightest = [min(module.options, key=lambda o: (o.degree * _kept(o), o.memory_bytes)) for module in modules]
    memory = max(min(option.memory_bytes for option in module.options) for module in modules)
    while True:
        kept = [0] * num_devices
        works = [0] * num_devices
        for option in sorted(lightest, key=lambda o: -o.memory_bytes):
            for gpu in sorted(range(num_devices), key=lambda g: kept[g])[: option.degree]:
                kept[gpu] += _kept(option)
                works[gpu] = max(works[gpu], option.memory_bytes - _kept(option))
        if max(map(sum, zip(kept, works, strict=True))) <= memory:
            return memory
        memory = round(memory * 1.05) + 1


def _kept(option: InstanceOption) -> int:
    return option.resident_bytes + option.activation_bytes


def _kinds(shape: Shape, waits: Waits, draw: random.Random) -> list[Kind]:
    """Backbones where several branches meet; encoders elsewhere."""
    feeds = {other for others in waits for other in others}
    kinds = []
    for index, others in enumerate(waits):
        meets = shape in ("star", "multi") and others and (shape == "star" or index in feeds)
        kinds.append(draw.choice(BACKBONES if meets else ENCODERS))
    return kinds


def _star(num_modules: int, draw: random.Random) -> Waits:
    return [()] * (num_modules - 1) + [tuple(range(num_modules - 1))]


def _chain(num_modules: int, draw: random.Random) -> Waits:
    return [(index - 1,) if index else () for index in range(num_modules)]


def _align(num_modules: int, draw: random.Random) -> Waits:
    return [()] * num_modules


def _layered(num_modules: int, draw: random.Random) -> Waits:
    waits: Waits = []
    before: list[int] = []
    while len(waits) < num_modules:
        size = min(draw.randint(2, 5), num_modules - len(waits))
        layer = range(len(waits), len(waits) + size)
        for _ in layer:
            waits.append(tuple(sorted(draw.sample(before, min(len(before), draw.randint(1, 2))))))
        before = list(layer)
    return waits


def _multi(num_modules: int, draw: random.Random) -> Waits:
    backbones = max(1, min(4, num_modules // 5))
    encoders = max(1, (num_modules - backbones) * 3 // 5)
    waits: Waits = [()] * encoders
    for _ in range(backbones):
        waits.append(tuple(sorted(draw.sample(range(encoders), draw.randint(1, encoders)))))
    while len(waits) < num_modules:
        waits.append((encoders + draw.randrange(backbones),))
    return waits


_WAITS: Mapping[Shape, _Drawer] = MappingProxyType(
    {"star": _star, "chain": _chain, "layered": _layered, "align": _align, "multi": _multi}
)
