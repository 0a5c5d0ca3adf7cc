"""Random lives of stream pools against a model of them: what is made is ended once, and each loan is counted.

All lives run in one child process against the fake driver, some of them through an injected failure.
"""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools

# A pool beside the model of it: which partitions there should be, and which of their streams are lent.
MODEL = """
import random
from mosaic.errors import CudaError

SLOTS = {0: 16, 1: 27}

class Model:
    def __init__(self, rng):
        self.device = rng.randrange(2)
        self.layouts, self.closed = [], False
        self.streams, self.lent = {}, []  # by partition; every loan
        first = [self.random_layout(rng) for _ in range(rng.randint(0, 2))]
        self.pool = pool_of(*first, device=self.device)
        self.layouts = [[tuple(sorted(slots)) for slots in layout] for layout in first]

    def random_layout(self, rng):
        slots = rng.sample(range(SLOTS[self.device]), rng.randint(1, 8))
        cuts = sorted(rng.sample(range(1, len(slots)), min(rng.randint(0, 2), len(slots) - 1)))
        return [slots[start:end] for start, end in zip([0, *cuts], [*cuts, len(slots)])]

    def partitions(self):
        return {slots for layout in self.layouts for slots in layout}

    def lend(self, rng):
        layout = rng.randint(0, len(self.layouts))
        if layout == len(self.layouts):
            return refused(ValueError, lambda: self.pool.lend(layout, 0))
        partition = rng.randrange(len(self.layouts[layout]))
        stream = self.pool.lend(layout, partition)
        assert self.streams.setdefault(self.layouts[layout][partition], stream) == stream
        assert len({*self.streams.values()}) == len(self.streams)  # no two partitions have one stream
        self.lent.append(stream)

    def give_back(self, rng):
        if not self.lent or rng.random() < 0.05:
            return refused(ValueError, lambda: self.pool.give_back(12345))
        stream = self.lent.pop(rng.randrange(len(self.lent)))
        self.pool.give_back(stream)
        if stream not in self.lent:
            refused(ValueError, lambda: self.pool.give_back(stream))

    def add_layout(self, rng):
        if rng.random() < 0.1:
            return refused(ValueError, lambda: self.pool.add_layout([[0, 1], [1]]))
        reuse = self.layouts and rng.random() < 0.3
        layout = [list(slots) for slots in rng.choice(self.layouts)] if reuse else self.random_layout(rng)
        fresh = {tuple(sorted(slots)) for slots in layout} - self.partitions()
        cost = self.pool.add_layout(layout)
        assert cost.num_contexts == len(fresh), (cost.num_contexts, fresh)
        assert (cost.driver_bytes > 0) == (cost.creation_ms > 0) == bool(fresh)
        self.layouts.append([tuple(sorted(slots)) for slots in layout])

    def verify(self, rng):
        self.pool.verify(IMAGE)
        size = self.pool.split.sms_per_slot
        for number, layout in enumerate(self.layouts):
            for slots, info in zip(layout, self.pool.partitions(number)):
                assert info.sm_ids == [size * slot + i for slot in slots for i in range(size)]

    def close(self, rng):
        self.closed = True  # even if it fails on the way
        self.pool.close()
        for call in (lambda: self.pool.lend(0, 0), lambda: self.pool.give_back(1), lambda: self.pool.verify(IMAGE)):
            refused(ValueError, call)

    def check(self):
        stats = self.pool.stats()
        contexts = 0 if self.closed else len(self.partitions())
        assert stats.num_contexts == contexts
        assert stats.num_lent == (0 if self.closed else len({*self.lent}))
        assert len(stats.layouts) == len(self.layouts)
        assert sum(cost.num_contexts for cost in stats.layouts) == len(self.partitions())
        for number, layout in enumerate(self.layouts):
            infos = self.pool.partitions(number)
            assert [tuple(info.slots) for info in infos] == layout
            assert all(info.requested_sms == info.granted_sms for info in infos)

def refused(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

ACTIONS = {"lend": 40, "give_back": 30, "add_layout": 8, "verify": 3, "close": 4, "drop": 3, "new": 12}
FAILING = ["cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate", "cuDevResourceGenerateDesc",
           "cuMemGetInfo", "cuCtxPushCurrent", "cuMemAlloc", "cuLibraryLoadData", "cuLaunchKernel"]

def act(pools, rng, name):
    if name == "new" or not pools:
        if len(pools) < 4:
            pools.append(Model(rng))
        return
    model = rng.choice(pools)
    if name == "drop" or model.closed:
        pools.remove(model)
    else:
        getattr(model, name)(rng)
        model.check()

def live(rng, num_actions, failures):
    pools = []
    for _ in range(num_actions):
        failing = rng.choice(FAILING) if rng.random() < failures else None
        if failing:
            fake.mosaic_fake_fail_nth(failing.encode(), 2, rng.randint(1, 3))
        try:
            act(pools, rng, rng.choices(list(ACTIONS), ACTIONS.values())[0])
        except CudaError as error:
            assert error.call == failing and error.status == "CUDA_ERROR_OUT_OF_MEMORY", error
        if failing:
            fake.mosaic_fake_fail(failing.encode(), 0)
        check_all(pools)
    rng.shuffle(pools)
    while pools:
        pools.pop()

def check_all(pools):
    for model in pools:
        model.check()
    contexts = sum(model.pool.stats().num_contexts for model in pools)
    assert count("created", "green") - count("destroyed", "green") == contexts
"""


@pytest.mark.parametrize(("failures", "seed"), [(0.0, 1), (0.25, 2)])
def test_ten_thousand_random_actions_on_pools_leave_nothing_behind(fake_driver: FakeDriver, failures: float, seed: int):
    body = f"""{MODEL}
rng, wrong = random.Random({seed}), []
for life in range(200):
    live(rng, 50, {failures})
    if leaked():
        wrong.append([life, leaked()])
made = min(count("created", kind) for kind in ["primary", "green", "stream", "library", "memory"])
result = [wrong, made > 100, misused()]
"""
    assert run_pools(fake_driver, body, devices="132:9.0,108:8.0") == [[], True, []]
