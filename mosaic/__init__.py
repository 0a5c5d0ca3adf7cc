"""Mosaic runs the unequal modules of a multimodal model side by side on shares of one device.

The public names are loaded on first use, so that ``import mosaic`` costs nothing and planning never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.device import Device

    # From where they are defined: mosaic.engine has modules of these names, too, and type checkers take those.
    from mosaic.engine.colocate import colocate
    from mosaic.engine.handle import Handle
    from mosaic.engine.stage import stage
    from mosaic.engine.trial.settings import TrialSettings
    from mosaic.errors import MosaicError
    from mosaic.graph import Edge, ModuleGraph, ModuleNode
    from mosaic.plan import Plan, plan_from_quotas
    from mosaic.profile import Profile

__version__ = "0.1.0"

_HOME = {
    "Device": "mosaic.device",
    "Edge": "mosaic.graph",
    "Handle": "mosaic.engine",
    "ModuleGraph": "mosaic.graph",
    "ModuleNode": "mosaic.graph",
    "MosaicError": "mosaic.errors",
    "Plan": "mosaic.plan",
    "Profile": "mosaic.profile",
    "TrialSettings": "mosaic.engine",
    "colocate": "mosaic.ranks",
    "plan_from_quotas": "mosaic.plan",
    "stage": "mosaic.engine",
}

__all__ = [
    "Device",
    "Edge",
    "Handle",
    "ModuleGraph",
    "ModuleNode",
    "MosaicError",
    "Plan",
    "Profile",
    "TrialSettings",
    "__version__",
    "colocate",
    "plan_from_quotas",
    "stage",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mosaic' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
