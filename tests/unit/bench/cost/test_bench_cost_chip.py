"""The simulated chip keeps its limits: nothing is lost, nothing outruns its parts, neighbours cost time in the mean."""

import itertools
import statistics

import pytest

from bench.cost.chip.machine import run
from bench.cost.chip.memory import L2, Channel, Events, Load, Traffic
from bench.cost.chip.spec import REQUEST_BYTES, Chip, Kernel, Work, draw_work

CHIP = Chip(num_sms=4, num_channels=2, dram_bytes_per_ns=83.75, l2_bytes_per_ns=140.0, l2_bytes=Chip().l2_bytes // 5)
"""A fifth of the chip, to be quick."""


def work_of(**given: float) -> Work:
    """Returns a module of one kernel."""
    return Work(name="one", kernels=(Kernel(**given),))  # type: ignore[arg-type]


STREAM = work_of(tiles=24, steps=4, compute_ns=20, streamed=16, depth=4)
ARITHMETIC = work_of(tiles=16, steps=4, compute_ns=400)
HELD = work_of(tiles=32, steps=4, compute_ns=100, scattered=12, table=1200)
CHAIN = work_of(tiles=1, steps=32, compute_ns=0.001, streamed=1, depth=1)


def test_every_request_that_a_channel_is_given_is_served_once_and_no_two_at_a_time() -> None:
    events, ends = Events(), []
    channel = Channel(CHIP, events)
    for index in range(200):
        channel.read(index % 16, index // 40, ends.append)
    events.run()
    assert len(ends) == 200
    assert all(after - before >= channel.transfer_ns - 1e-9 for before, after in itertools.pairwise(ends))


def test_requests_of_an_open_row_go_before_an_older_one_that_needs_another_row() -> None:
    events, order = Events(), []
    channel = Channel(CHIP, events)
    for row in (1, 2, 1, 1):
        channel.read(0, row, lambda _, row=row: order.append(row))
    events.run()
    assert order == [1, 1, 1, 2]


def test_requests_of_one_row_are_served_faster_than_of_as_many_rows_of_one_bank() -> None:
    def time_of(rows: list[int]) -> float:
        events, ends = Events(), []
        channel = Channel(CHIP, events)
        for row in rows:
            channel.read(0, row, ends.append)
        events.run()
        return max(ends)

    assert time_of([1] * 16) < 0.5 * time_of(list(range(16)))


def test_dram_reads_what_l2_lacks_once_however_many_wait_for_it_and_writes_back_what_falls_out() -> None:
    events, traffic = Events(), Traffic()
    l2 = L2(Chip(l2_bytes=8 * REQUEST_BYTES), events)
    came: list[int] = []
    for number in range(3):
        load = Load(events, lambda number=number: came.append(number))
        l2.load(7, 0.0, traffic, load)
        load.come(0.0)
    events.run()
    assert sorted(came) == [0, 1, 2]
    assert traffic.read == 1
    for address in range(100, 120):
        l2.store(address, events.now, traffic)
    assert traffic.written == 12


def test_a_kernel_that_streams_is_bound_by_the_channels_and_one_that_computes_by_its_sms() -> None:
    (streams,) = run(CHIP, [(STREAM, 4)], seed=0)
    assert 0.6 * CHIP.dram_bytes_per_ns < streams.bytes_per_ns < CHIP.dram_bytes_per_ns
    (whole,), (quarter,) = run(CHIP, [(ARITHMETIC, 4)], seed=0), run(CHIP, [(ARITHMETIC, 1)], seed=0)
    assert whole.time_ns == pytest.approx(16 * 4 * 400 / 4 + CHIP.launch_ns, rel=0.1)
    assert quarter.time_ns == pytest.approx(16 * 4 * 400 + CHIP.launch_ns, rel=0.1)


def test_a_chain_of_loads_takes_the_latency_of_dram_each() -> None:
    (found,) = run(CHIP, [(CHAIN, 1)], seed=0)
    latency = CHIP.l2_ns + CHIP.dram_ns
    assert 32 * latency < found.time_ns - CHIP.launch_ns < 32 * (latency + CHIP.row_cycle_ns)


def test_what_one_tile_more_than_a_wave_takes_is_a_wave() -> None:
    def time_of(tiles: int) -> float:
        return run(CHIP, [(work_of(tiles=tiles, steps=4, compute_ns=400), 4)], seed=0)[0].time_ns - CHIP.launch_ns

    assert time_of(8) == pytest.approx(time_of(7), rel=0.1)
    assert time_of(9) > 1.2 * time_of(8)


def test_neighbours_cost_time_in_the_mean_and_two_that_stream_share_what_the_channels_give() -> None:
    works = [Work(name="mixed", kernels=(*STREAM.kernels, *ARITHMETIC.kernels)), STREAM, HELD]
    alone = [run(CHIP, [(work, 1)], seed=0)[0].time_ns for work in works]
    beside = [ran.time_ns for ran in run(CHIP, [(work, 1) for work in works], seed=0)]
    assert statistics.fmean(after / before for before, after in zip(alone, beside, strict=True)) > 1.1
    both = run(CHIP, [(STREAM, 2), (STREAM, 2)], seed=0)
    assert sum(ran.bytes_per_ns for ran in both) < CHIP.dram_bytes_per_ns
    assert both[0].time_ns == pytest.approx(both[1].time_ns, rel=0.15)


def test_a_neighbour_that_fills_l2_pushes_out_what_a_module_would_find_there() -> None:
    (alone,) = run(CHIP, [(HELD, 2)], seed=0)
    beside, _ = run(CHIP, [(HELD, 2), (STREAM, 2)], seed=0)
    assert beside.from_dram > 2 * alone.from_dram


def test_the_same_seed_gives_the_same_times_and_too_many_sms_are_refused() -> None:
    placed = [(HELD, 1), (STREAM, 3)]
    assert run(CHIP, placed, seed=3) == run(CHIP, placed, seed=3)
    with pytest.raises(ValueError, match="5 SMs are asked for"):
        run(CHIP, [(STREAM, 3), (ARITHMETIC, 2)], seed=0)


def test_modules_are_drawn_by_their_seed_and_a_replica_has_its_part_of_the_tiles() -> None:
    assert draw_work(4) == draw_work(4) != draw_work(5)
    assert [kernel.tiles for kernel in STREAM.on_share(8).kernels] == [3]
