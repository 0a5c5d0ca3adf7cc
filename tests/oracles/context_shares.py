"""The best distribution of a few blocks over ranks with equal counts (Eq. 1), by CP-SAT."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model


def share_exactly(work: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int32]:
    """Returns the rank of each piece; the largest sum of a rank is least, and counts differ by one at most."""
    model = cp_model.CpModel()
    given = [[model.new_bool_var("") for _ in range(ranks)] for _ in work]
    most = model.new_int_var(0, int(work.sum()), "most")
    for row in given:
        model.add_exactly_one(row)
    for rank in range(ranks):
        own = [row[rank] for row in given]
        model.add(sum(own) <= -(-len(work) // ranks))
        model.add(cp_model.LinearExpr.weighted_sum(own, work.tolist()) <= most)
    model.minimize(most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return np.array([[solver.value(one) for one in row].index(1) for row in given], np.int32)
