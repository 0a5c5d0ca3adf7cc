"""What Spindle's text says of its figures; bars and curves that stand in pictures alone are not here.

Spindle: arXiv 2409.03365, sections 5.2 to 5.5 and appendices D to H. Its speed-ups are over DeepSpeed or Megatron-LM,
measured on up to 64 A800s. ``up to`` says that the text has the highest of several bars.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

HIGHEST: Mapping[tuple[str, str, int], str] = MappingProxyType(
    {
        ("spindle", "multitask-clip", 8): "1.37",
        ("spindle", "multitask-clip", 16): "1.33",
        ("spindle", "multitask-clip", 32): "1.71",
        ("spindle", "qwen-val", 32): "1.16",
        ("spindle", "qwen-val", 64): "1.63",
    }
)
"""Highest speed-up over the systems that ignore tasks, of all numbers of tasks (Fig. 8, section 5.2)."""
HIGHEST_OF_ALL: Mapping[str, str] = MappingProxyType(
    {
        "spindle": "up to 1.71 (any model)",
        "spindle-optimus": "up to 1.44 (any model)",
        "distmm-mt": "up to 1.20 (any model)",
    }
)
"""The same over all models and clusters (Fig. 8, section 5.2)."""
MOST_TASKS = "1.31 to 1.71"
"""Spindle with 10 tasks of Multitask-CLIP and 7 of OFASys (Fig. 8, section 5.2)."""
OVER_DISTMM = "up to 1.59 (any model)"
"""Spindle over DistMM-MT (Fig. 8, section 5.2)."""
SCALING: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("multitask-clip", "megatron"): "up to 1.21",
        ("multitask-clip", "spindle"): "1.45",
        ("qwen-val", "megatron"): "up to 1.27",
        ("qwen-val", "spindle"): "1.78",
    }
)
"""From 16 to 32 GPUs with four tasks of Multitask-CLIP, from 32 to 64 with QWen-VAL (Fig. 8, section 5.2)."""
SENDS = "at most 6"
SENDS_IN_A_ROW = "up to 27"
SENDS_RATIO = "3 to 6"
SUMS = "5 to 15"
"""Shares of a step in percent (Fig. 10, section 5.4)."""
ABOVE_OPTIMUM = "below 7"
"""Percent above C* (Fig. 11, section 5.5)."""
PLANNING = "below 3"
"""Seconds, on all workloads (Fig. 12, section 5.5)."""
ONE_TASK: Mapping[str, str] = MappingProxyType({"spindle": "up to 1.48", "distmm-mt": "similar to spindle's"})
"""Fig. 14, appendix F."""
DECOUPLED = "similar (1)"
"""Spindle-Seq beside Megatron-LM and DeepSpeed (Fig. 16, appendix H)."""
