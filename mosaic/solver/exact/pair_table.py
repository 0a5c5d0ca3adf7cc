"""Costs of neighbours on each other, as the table that the exact search reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.cost import Cost, Interference
from mosaic.cost.interference import PairShares
from mosaic.profile import Phase
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.stage import Machine


def pair_table(
    names: Sequence[str], options: Mapping[str, Sequence[DeploymentOption]], cost: Cost, machine: Machine, phase: Phase
) -> list[list[list[int]]]:
    """Returns, for each module and option, the nanoseconds that each neighbour costs at each quota."""
    width, form = machine.num_slots + 1, cost.interference
    quotas = {name: sorted({option.quota for option in options[name]}) for name in names}
    tables = []
    for name in names:
        rows = []
        for option in options[name]:
            alone_ms = cost.time_ms(name, phase, option.degree, option.quota)
            row = [0] * (len(names) * width)
            for index, other in enumerate(names):
                if other == name:
                    continue
                for quota in quotas[other]:
                    beside = [(other, quota)]
                    extra_ms = form.extra_ms(name, phase, quota=option.quota, alone_ms=alone_ms, beside=beside)
                    row[index * width + quota] = round(extra_ms * NS_PER_MS)
            rows.append(row)
        tables.append(rows)
    return tables


Shares = list[tuple[int, int, Sequence[Sequence[float]]]]
"""Of a module (by its index) beside a neighbour: a row for each of its quotas, an entry for each of the other's."""


def pair_shares(
    names: Sequence[str], options: Mapping[str, Sequence[DeploymentOption]], form: Interference
) -> tuple[Shares, Shares] | None:
    """Returns extra shares of the time alone, forward and backward; None where the form does not know them.

    Says the same as ``pair_table`` in a fraction of the time and the space: one question for two modules.
    """
    if not isinstance(form, PairShares):
        return None
    quotas = [sorted({option.quota for option in options[name]}) for name in names]
    forward, backward = (
        [
            (own, other, rows)
            for own, name in enumerate(names)
            for other, beside in enumerate(names)
            if own != other
            and (rows := form.pair_shares(name, beside, phase, quotas=quotas[own], beside_quotas=quotas[other]))
        ]
        for phase in Phase
    )
    return forward, backward
