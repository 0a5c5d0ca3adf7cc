"""The best distribution of a few blocks over ranks with equal counts (Eq. 1), by CP-SAT."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mosaic.errors import UndecidedError


def share_exactly(work: npt.NDArray[np.int64], ranks: int, *, seconds: float = 60.0) -> npt.NDArray[np.int32]:
    """Returns the rank of each piece, such that the rank with most has least (Eq. 1), with equal counts.

    Args:
        work: Of each piece; shape (pieces,).
        ranks: Ranks; each gets as many pieces as another, or one fewer.
        seconds: Wall clock.

    Raises:
        UndecidedError: It was not proven in time.
    """
    from ortools.sat.python import cp_model  # 0.3 s to import; only tests and small cases need it

    cap = -(-len(work) // ranks)
    model = cp_model.CpModel()
    given = [[model.new_bool_var("") for _ in range(ranks)] for _ in work]
    most = model.new_int_var(0, int(work.sum()), "most")
    for row in given:
        model.add_exactly_one(row)
    for rank in range(ranks):
        own = [row[rank] for row in given]
        model.add(sum(own) <= cap)
        model.add(cp_model.LinearExpr.weighted_sum(own, work.tolist()) <= most)
    model.minimize(most)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status != cp_model.OPTIMAL:
        raise UndecidedError(
            f"the best distribution of {len(work)} blocks over {ranks} ranks was not proven in {seconds} s; "
            "use method='lpt', or fewer blocks"
        )
    return np.array([[solver.value(one) for one in row].index(1) for row in given], np.int32)
