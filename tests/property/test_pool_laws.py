"""Random lives of stream pools against a model of them: what is made is ended once, and nobody shares a stream.

All lives run in one child process against the fake driver, some of them through an injected failure.
"""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools

# A pool beside the model of it: which partitions there should be, and which of their streams are lent.
MODEL = """
import random
from mosaic.errors import BackendUnavailableError, CudaError

SLOTS = {0: 16, 1: 27}

class Model:
    def __init__(self, rng):
        self.device, self.per = rng.randrange(2), rng.randint(1, 2)
        self.priorities = rng.choice([[0], [0, -1], [-5, 0, -2]])
        self.remainder = self.device == 0 and rng.random() < 0.5
        self.layouts, self.closed = [], False
        self.lent, self.shared = {}, set()  # by stream its partition and how many borrow it; which of them are shared
        first = [self.random_layout(rng) for _ in range(rng.randint(0, 2))]
        self.pool = pool_of(*first, device=self.device, streams_per_partition=self.per,
                            priorities=self.priorities, remainder=self.remainder)
        self.layouts = [[tuple(sorted(slots)) for slots in layout] for layout in first]

    def random_layout(self, rng):
        slots = rng.sample(range(SLOTS[self.device]), rng.randint(1, 8))
        cuts = sorted(rng.sample(range(1, len(slots)), min(rng.randint(0, 2), len(slots) - 1)))
        return [slots[start:end] for start, end in zip([0, *cuts], [*cuts, len(slots)])]

    def partitions(self):
        return {slots for layout in self.layouts for slots in layout} | ({()} if self.remainder else set())

    def lend(self, rng):
        priority = rng.choice([*self.priorities, 7] if rng.random() < 0.05 else self.priorities)
        if self.remainder and rng.random() < 0.2:
            key, call = ((), priority), lambda shared: self.pool.lend_remainder(priority, shared=shared)
        else:
            layout = rng.randint(0, len(self.layouts))
            known = layout < len(self.layouts)
            partition = rng.randrange(len(self.layouts[layout])) if known else 0
            key = (self.layouts[layout][partition], priority) if known else None
            call = lambda shared: self.pool.lend(layout, partition, priority, shared=shared)
        if key is None or priority == 7:
            return refused(ValueError, lambda: call(rng.random() < 0.3))
        shared = rng.random() < 0.3
        sharing = [stream for stream in self.shared if self.lent[stream][0] == key]
        is_full = [held for held, _ in self.lent.values()].count(key) == self.per
        if is_full and not (shared and sharing):
            return refused(BackendUnavailableError, lambda: call(shared))
        stream = call(shared)
        assert (stream in self.lent) == (shared and sharing == [stream])
        borrowers = self.lent.get(stream, (key, 0))[1]
        self.lent[stream] = (key, borrowers + 1)
        if shared:
            self.shared.add(stream)

    def give_back(self, rng):
        if not self.lent or rng.random() < 0.05:
            return refused(ValueError, lambda: self.pool.give_back(12345))
        stream = rng.choice(sorted(self.lent))
        self.pool.give_back(stream)
        key, borrowers = self.lent.pop(stream)
        if borrowers > 1:
            self.lent[stream] = (key, borrowers - 1)
        else:
            self.shared.discard(stream)
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
        assert stats.num_streams == contexts * self.per * len(self.priorities)
        assert stats.num_lent == (0 if self.closed else len(self.lent))
        assert len(stats.layouts) == len(self.layouts)
        assert sum(cost.num_contexts for cost in stats.layouts) == len(self.partitions()) - self.remainder
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


def test_ten_thousand_lend_return_close_sequences_leave_nothing_behind(fake_driver: FakeDriver):
    body = """
import random
rng = random.Random(3)
device = _C.Device(0)
for _ in range(10_000):
    pool = _C.StreamPool(device, [[[0], [1]]], remainder=rng.random() < 0.3)
    lent = []
    for _ in range(rng.randrange(6)):
        if lent and rng.random() < 0.5:
            pool.give_back(lent.pop())
        elif len(lent) < 2:
            lent.append(pool.lend(0, len(lent)))
    if rng.random() < 0.7:
        pool.close()
del pool
result = [count("created", "green") > 20_000, leaked(), misused()]
"""
    assert run_pools(fake_driver, body) == [True, {}, []]
