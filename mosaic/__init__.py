"""Mosaic runs the unequal modules of a multimodal model side by side on shares of one device.

Public names are loaded on first use, so ``import mosaic`` is fast and planning does not load torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.colocate import colocate as colocate
    from mosaic.device import Device as Device
    from mosaic.engine.handle import Handle as Handle
    from mosaic.engine.options import Options as Options
    from mosaic.engine.options import RankSettings as RankSettings
    from mosaic.engine.parallel import parallel as parallel
    from mosaic.errors import MosaicError as MosaicError
    from mosaic.graph import Edge as Edge
    from mosaic.graph import ModuleGraph as ModuleGraph
    from mosaic.graph import ModuleNode as ModuleNode
    from mosaic.pipeline import pipeline as pipeline
    from mosaic.pipelining.planner import PlannerOptions as PlannerOptions
    from mosaic.plan import Plan as Plan
    from mosaic.plan import load as load
    from mosaic.plan import plan_from_quotas as plan_from_quotas
    from mosaic.profile import Profile as Profile
    from mosaic.take_turns import TrialSettings as TrialSettings

__version__ = "0.2.0"

_NAMES = {
    "mosaic.colocate": ("colocate",),
    "mosaic.device": ("Device",),
    "mosaic.engine": ("Handle", "Options", "RankSettings", "parallel"),
    "mosaic.errors": ("MosaicError",),
    "mosaic.graph": ("Edge", "ModuleGraph", "ModuleNode"),
    "mosaic.pipeline": ("pipeline",),
    "mosaic.pipelining.planner": ("PlannerOptions",),
    "mosaic.plan": ("Plan", "load", "plan_from_quotas"),
    "mosaic.profile": ("Profile",),
    "mosaic.take_turns": ("TrialSettings",),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(["__version__", *_HOME])


class _Package(ModuleType):
    """The module's type; keeps ``mosaic.colocate`` the function after an import of the file of that name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'mosaic' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, getattr(value, name) if name in _HOME and isinstance(value, ModuleType) else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


sys.modules[__name__].__class__ = _Package
