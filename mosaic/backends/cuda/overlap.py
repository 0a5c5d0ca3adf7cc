"""Whether partitions keep apart, by what the probe saw: the one rule on SMs that two of them share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from mosaic.backends.cuda.records import PartitionRecord
from mosaic.errors import CudaError

CDP_SMS = 2
"""SMs that partitions may share on compute capability 9.x: "When a module with dynamic parallelism (CDP) is loaded, all
future kernels running under green contexts may use and share an additional set of 2 SMs" (cuda.h, green contexts)."""


def find_shared_sms(
    groups: Iterable[Sequence[PartitionRecord]], *, compute_capability: str, call: str
) -> tuple[int, ...]:
    """Returns the SMs that partitions share although they were given as disjoint.

    Args:
        groups: Partitions that have to be apart where they have no slot in common; those that nobody probed are passed
            over.
        compute_capability: The device's, such as ``9.0``.
        call: The driver call that gave them as disjoint.

    Raises:
        CudaError: They share more than a module with dynamic parallelism accounts for.
    """
    shared: set[int] = set()
    first = ""
    for group in groups:
        for one, other in combinations(group, 2):
            both = set(one.sm_ids or ()) & set(other.sm_ids or ())
            if both and set(one.slots).isdisjoint(other.slots):
                shared |= both
                first = first or f"{_name(one)} and {_name(other)} were seen to share SM {_listed(both)}"
    if len(shared) > (CDP_SMS if _is_9(compute_capability) else 0):
        raise CudaError(
            f"{first} ({len(shared)} shared in all), although {call} gave them as disjoint; MPS or a driver's error "
            "may cause it, and on compute capability 9.x a module with dynamic parallelism (CDP) "
            f"{CDP_SMS} of them: run `mosaic doctor`, and start the process anew without the cause",
            call=call,
            status="CUDA_SUCCESS",
        )
    return tuple(sorted(shared))


def describe_excess(
    records: Sequence[PartitionRecord], shared: Sequence[int], *, compute_capability: str
) -> tuple[str, ...]:
    """Says in one sentence that partitions were seen on SMs beyond their own; says nothing if none was."""
    excess = [len(record.sm_ids) - record.granted_sms for record in records if record.sm_ids is not None]
    most = max(excess, default=0)
    seen = [f"partitions share SM {_listed(shared)}"] if shared else []
    if most > 0:
        wide = sum(count > 0 for count in excess)
        seen.append(f"{wide} of {len(records)} partitions run on up to {most} more SMs than they were granted")
    if not seen:
        return ()
    cause = (
        "on compute capability 9.x a loaded module with dynamic parallelism (CDP) may do that"
        if _is_9(compute_capability) and most <= CDP_SMS
        else "MPS may do that; `mosaic doctor` looks for it"
    )
    return (f"{' and '.join(seen)}: {cause}",)


def _is_9(compute_capability: str) -> bool:
    return compute_capability.startswith("9.")


def _name(record: PartitionRecord) -> str:
    return f"the partition of slots {list(record.slots)}"


def _listed(sms: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sms)))
