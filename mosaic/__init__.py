"""Mosaic runs the unequal modules of a multimodal model side by side on shares of one device.

The public names are loaded on first use, so that ``import mosaic`` costs nothing and planning never loads torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.colocate import colocate as colocate
    from mosaic.device import Device as Device

    # From where they are defined: mosaic.engine has modules of these names, too, and type checkers take those.
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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mosaic' has no attribute {name!r}")
    return getattr(import_module(home), name)


class _Package(ModuleType):
    """Keeps ``mosaic.colocate`` the function: an import of the file of that name would set the file's module."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, getattr(value, name) if name in _HOME and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
