"""Which quotas a measured model is profiled at: small ones only where a step is short."""

from __future__ import annotations

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Of the device's slots."""
LONG_STEP_MS = 50.0
"""A plain step that takes longer is long: at an eighth of the device all modules together take up to eight times as
long, about four times over."""


def quotas_for(num_slots: int, step_ms: float) -> tuple[tuple[int, ...], str | None]:
    """Returns quotas in slots, rising, and a note where a long plain step leaves out those under a quarter."""
    quotas = sorted({max(1, round(num_slots * share)) for share in SHARES})
    kept = [quota for quota in quotas if step_ms <= LONG_STEP_MS or 4 * quota >= num_slots]
    if len(kept) == len(quotas):
        return tuple(kept), None
    left_out = ", ".join(str(quota) for quota in quotas if quota not in kept)
    return tuple(kept), (
        f"not profiled at {left_out} of {num_slots} slots: a plain step takes {step_ms:.0f} ms, more than "
        f"{LONG_STEP_MS:.0f} ms, and quotas under a quarter of the device would take most of the time"
    )
