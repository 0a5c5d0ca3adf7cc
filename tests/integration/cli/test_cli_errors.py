"""Wrong commands: each ends with its exit code and a message with the value, the rule and the way out, and no file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from user_models import FILE

from mosaic.backends.cuda import driver as cuda
from mosaic.cli.main import run
from mosaic.errors import BackendUnavailableError

WRONG = [
    (1, "profile --model nowhere.py:make", "nowhere.py does not exist"),
    (1, "profile --model {FILE}:absent", "has no function 'absent'"),
    (1, "profile --model {FILE}:fails", "RuntimeError: no data today"),
    (1, "profile --model {FILE}:wrong", "returned int"),
    (1, "profile --model {FILE}:nothing_to_place", "found no module to place"),
    (2, "profile --model {FILE}:narrow", "pass one batch that the model accepts"),
    (2, "profile --model zoo:blip-tiny", "unknown model 'blip'; choose one of: clip, qwen3-vl"),
    (2, "profile --model zoo:clip", "names no size; use zoo:clip-SIZE with one of: tiny, gpu, paper, public"),
    (2, "profile --model zoo:clip-huge", "unknown size of clip 'huge'; choose one of: tiny, gpu, paper"),
    (2, "profile --model zoo:clip-tiny:0", "batch='0' in 'zoo:clip-tiny:0'"),
    (2, "profile --model zoo:clip-tiny:99999999999999999", "Storage size calculation overflowed"),
    # profile
    (2, "profile --model {FILE}:make_small --degrees 0", "degrees=(0, 1); use 1 or more"),
    (2, "profile --model {FILE}:make_small --degrees 2 --cluster abacus", "unknown device 'abacus'"),
    (4, "profile --model {FILE}:make --backend cuda", "needed: an NVIDIA driver"),
    # plan
    (2, "plan", "give either FILE"),
    (2, "plan --model {FILE}:make --device h99", "unknown device 'h99'"),
    (2, "plan --model {FILE}:make --device h100-80g --gpus 0", "gpus=0"),
    (2, "plan --model {FILE}:make --gpus 100000000000", "gpus=100000000000; use 1 to 4096"),
    (2, "plan --model {FILE}:make --device h100-80g --time-limit -1", "effort=-1"),
    (2, "plan profile.json --dtype bfloat16", "pass --model instead of the file, or leave out --dtype"),
    (2, "plan --model {FILE}:make --picture plan.jpg", "ends in '.jpg'; use .png or .svg"),
    (1, "plan absent.json", "cannot read absent.json"),
    (1, "plan /dev/zero", "cannot read /dev/zero: it is not a regular file"),
    (2, "plan --context 8 --tokens 16000000", "tokens=16000000 exceed 8192 blocks of 128; use --block 2048"),
    (2, "plan --context 8 --tokens 512", "4 blocks for 8 ranks; each rank needs one: use fewer ranks, smaller blocks"),
    (2, "plan --context 0", "context=0, tokens=16384; use 1 or more for each"),
    (2, "plan --context 8 --seed -1", "seed=-1; use 0 to 4294967295"),
    (1, "plan --context 2 --mask {FILE}:fails", "fails raised RuntimeError: no data today"),
    (2, "plan --context 2 --mask sparse", "'sparse' is not FILE:FUNCTION; write it as train.py:make, or causal"),
    (2, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --partition diagonal", "unknown partition 'diagonal'"),
    (2, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --microbatches 0", "microbatches=0; use 1 to 4096"),
    (2, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --memory-gb 0", "memory_gb=0.0; use a number above 0"),
    (2, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --memory-gb nan", "memory_gb=nan; use a number above 0"),
    (2, "plan --pipeline 100 --model zoo:qwen3-vl-tiny", "layers for 100 ranks"),
    (2, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --share luck", "unknown load balancer 'luck'; choose one of: lpt"),
    (1, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --baselines no.csv", "cannot read no.csv: No such file"),
    (3, "plan --pipeline 4 --model zoo:qwen3-vl-tiny --seconds 0.2 --memory-gb 0.00001", "what would help"),
    # run and bench
    (2, "run --model zoo:clip-tiny --steps 0", "steps=0; use 1 or more"),
    (1, "run --model {FILE}:loss_of_rows", "the loss is of shape (4, 8); let the factory return a function"),
    (1, "run --model {FILE}:loss_of_no_kind", "returned a loss of type float; use a function of the output"),
    (4, "bench pool", "needed: an NVIDIA driver"),
    (2, "bench pool --backend host:1", "device 1 does not exist"),
    (2, "bench pool --backend host --seconds -1", "seconds=-1.0; use 0 or more"),
    (2, "bench pool --backend tpu", "choose one of: cuda, host, or cuda:1"),
]


@pytest.mark.parametrize(("code", "command", "message"), WRONG, ids=[command for _, command, _ in WRONG])
def test_a_wrong_command_ends_with_its_code_a_message_and_no_file(
    code: int,
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def missing() -> None:
        raise BackendUnavailableError("no NVIDIA driver", found="nothing", needed="an NVIDIA driver")

    monkeypatch.setattr(cuda, "describe_driver", missing)
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command.format(FILE=FILE))
    output = [] if "--context" in arguments else ["--output", str(tmp_path / "new" / "result")]
    assert run([*arguments, *output]) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["demo", "bench pool --backend host", "run --model zoo:clip-tiny"])
def test_a_file_in_place_of_the_folder_of_results_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "out").write_text("mine")
    assert run([*shlex.split(command), "--output", str(tmp_path / "out")]) == 2
    assert "it is a file; name a folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
