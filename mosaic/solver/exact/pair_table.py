"""Costs of neighbours on each other, as the table that the exact search reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.cost import Cost, Interference
from mosaic.cost.interference.measured import PairShares
from mosaic.profile import Phase
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.stage import Machine


def pair_table(
    names: Sequence[str], options: Mapping[str, Sequence[DeploymentOption]], cost: Cost, machine: Machine, phase: Phase
) -> list[list[list[int]]]:
    """Returns, for each module and option, the nanoseconds that each neighbour costs at each quota."""
    width = machine.num_slots + 1
    quotas = {name: sorted({option.quota for option in options[name]}) for name in names}
    tables = []
    for name in names:
        rows = []
        for option in options[name]:
            row = [0] * (len(names) * width)
            for index, other in enumerate(names):
                if other == name:
                    continue
                for quota in quotas[other]:
                    extra = cost.interference_ms(name, phase, option.degree, option.quota, beside=[(other, quota)])
                    row[index * width + quota] = round(extra * NS_PER_MS)
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
