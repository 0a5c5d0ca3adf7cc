"""The examples that need nothing but torch: each equals the same file without the lines that Mosaic adds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from example_cases import FOLDER, added_lines, assert_equal, check, run_colocated, run_plain

import mosaic
from mosaic.engine.parallel import ParallelBlock

CALLS = ("mosaic.colocate(", "mosaic.pipeline(", "MosaicCallback(")

NOT_A_LINE = ("context.py",)
"""Examples that also share out each batch, so that their loops differ by more."""


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py") if path.name not in NOT_A_LINE))
def test_an_example_differs_from_the_plain_loop_by_one_line_or_two_in_the_explicit_form(name: str):
    lines = added_lines(name)
    explicit = any("mosaic.parallel(" in line for line in lines)
    assert len(lines) == (2 if explicit else 1)
    assert explicit or any(call in lines[0] for call in CALLS)
    source = (FOLDER / name).read_text(encoding="utf-8")
    assert source.count("mosaic.") == sum(line.count("mosaic.") for line in lines) + source.count("from mosaic.")


def test_an_openclip_loop_is_equal():
    check(
        "openclip.py", ["--precision", "amp", "--accum-freq", "2"], placed={"visual", "transformer", "token_embedding"}
    )


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_an_openclip_loop_that_gathers_features_over_a_process_group_is_equal():
    check("openclip.py", ["--steps", "5"])


TRUNKS = {f"trunks.{name}" for name in ("vision", "text", "audio", "depth", "thermal", "imu")}


def test_six_encoders_some_without_a_batch_now_and_then_are_equal():
    check("imagebind.py", placed=TRUNKS | {"preprocessors.vision"})


def test_two_models_in_one_step_are_equal():
    ran = check("joint.py", placed={"small", "large"})
    assert ran.metrics[0]["overlap"] > 0


def test_raters_without_gradients_are_equal_and_run_on_lanes(monkeypatch: pytest.MonkeyPatch):
    regions: list[ParallelBlock] = []
    parallel = mosaic.parallel

    def noting(*args: object, **kwargs: object) -> ParallelBlock:
        regions.append(parallel(*args, **kwargs))
        return regions[-1]

    monkeypatch.setattr(mosaic, "parallel", noting)
    assert_equal(run_plain("raters.py"), run_colocated("raters.py"))
    executor = regions[0].executor
    assert len(regions) == 20
    assert {span.module for span in executor.log.spans()} >= {"looks", "motion", "fit"}
    assert not {"looks", "motion", "fit"} & {name for name, _ in executor.in_place}
