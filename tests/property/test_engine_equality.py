"""Random models, plans and loops: colocated and plain training are equal bit for bit, and lanes run side by side.

Two encoders that their plan puts on disjoint slots wait for each other, forward and backward, before the random loop
begins: they can only get past that at the same time. What has not run on its lane has to be what the recipe explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine_cases import Record, colocated, run_both
from hypothesis import event
from meetings import Meeting
from random_models import (
    PLACED,
    WAITED_FOR,
    Model,
    Recipe,
    batch,
    excluded,
    for_recipes,
    is_alone,
    loop,
    loss_of,
    pair_of,
    stages_of,
)
from torch import nn

from mosaic.engine import Handle

WARM_STEPS = 3


@dataclass
class Watch:
    """The observations of a recipe's run: the two encoders that meet, and the handle once there is one."""

    recipe: Recipe
    meeting: Meeting
    handle: Handle | None = None
    pair: tuple[str, str] | None = None

    @contextmanager
    def colocated(self, *args: Any, **choice: Any) -> Iterator[Handle]:
        with colocated(*args, **choice) as handle:
            self.handle, self.pair = handle, pair_of(handle.plan)
            for name in self.pair or ():
                handle._model.get_submodule(name).meeting = self.meeting
                if name == f"encoders.e{self.recipe.unseen}":  # it has no backward
                    self.meeting.phases = ("forward",)
            yield handle
            self.check_in_place(handle)

    def loop(self, model: nn.Module, record: Record) -> None:
        """Lets the encoders meet in a few calm steps, then runs the recipe's own loop."""
        if self.is_calm:
            self.meet(model, record)
        loop(self.recipe)(model, record)

    @property
    def is_calm(self) -> bool:
        """True if calm steps may go before.

        Of a parameter that is used several times in a call, a lane sums the gradient by itself; where the first step
        with more calls than before finds such a call on a lane, sums are rounded elsewhere.
        """
        return self.recipe.autocast or self.recipe.forwards == 1 or "repeat" not in self.recipe.kinds

    def meet(self, model: nn.Module, record: Record) -> None:
        self.meeting.on = True
        model.glue = tuple("none" if kind in WAITED_FOR else kind for kind in self.recipe.glue)
        for step in range(WARM_STEPS):  # what runs on lanes is learned in the first
            loss = loss_of(model(*batch(self.recipe, 9000 + step)))
            loss.backward()
            record.note(loss)
        record.note_model(model)
        model.zero_grad()
        self.meeting.on, model.glue = False, self.recipe.glue
        if self.handle is not None:
            self.check_launches(self.handle)

    def check_launches(self, handle: Handle) -> None:
        """Each module that has not the whole device went to its lane in each step but the first, and the two met."""
        on_lanes = [name for name in handle.graph.names if not is_alone(handle.plan, name)]
        assert handle.metrics()["calls_in_place"] == 0, handle.describe()
        assert handle._executor.num_launched == (WARM_STEPS - 1) * len(on_lanes), handle.describe()
        if self.pair is None:
            return
        assert Counter(self.meeting.meetings) == dict.fromkeys(self.meeting.phases, 2 * (WARM_STEPS - 1))
        assert handle.timeline().overlap > 0

    def check_in_place(self, handle: Handle) -> None:
        """Calls that ran in place did so for a reason that this recipe gives."""
        reasons = {reason.split(";")[0] for _, reason in handle._executor.in_place}
        assert sum(handle._executor.in_place.values()) == handle.metrics()["calls_in_place"]
        assert reasons <= set(explained(self.recipe)), handle.describe()


def explained(recipe: Recipe) -> Iterator[str]:
    """Yields the reasons for which calls of a recipe's loop may run in place."""
    if recipe.autocast:  # the sample runs without
        yield "its inputs have other dtypes than planned"
        yield "it uses a weight several times, in an autocast that may end before its lane does"
    if recipe.forwards == 1:
        return
    yield "an earlier call of the same backward ran in place"
    again = "it is called again before the backward of its last call, and "
    if recipe.autocast:
        yield again + "autocast keeps its cast weights from one call to the next"
    if "repeat" in recipe.kinds:
        yield again + "it uses a parameter several times"


def check(recipe: Recipe) -> bool:
    """Runs a recipe both ways; returns whether two encoders met."""
    if not stages_of(recipe):
        return False  # two towers that share a weight, and nothing else to place
    watch = Watch(recipe, Meeting())
    run_both(
        lambda: Model(recipe),
        batch(recipe, 0),
        stages_of(recipe),
        watch.loop,
        colocated=watch.colocated,
        num_slots=recipe.slots,
        one_thread=True,
        include=PLACED,
        exclude=excluded(recipe),
    )
    return len(watch.meeting.meetings) > 0


def test_colocated_training_is_equal_to_plain_training_and_half_of_the_recipes_overlap():
    met: list[bool] = []

    def checked(recipe: Recipe) -> None:
        met.append(check(recipe))
        event(f"two encoders met: {met[-1]}")

    for_recipes(checked, 38)
    print(f"two encoders ran at the same time in {sum(met)} of {len(met)} recipes")
    assert sum(met) >= len(met) / 2
