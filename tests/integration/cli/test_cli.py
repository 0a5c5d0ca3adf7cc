import pytest
from user_models import FILE

from mosaic import artifact
from mosaic.cli.main import run
from mosaic.plan import Plan


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Measured once; tests only read it."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    arguments = ["profile", "--model", f"{FILE}:make", "--output", str(path)]
    assert run(arguments) == 0
    return path


def test_json_on_standard_output_is_json_alone(profile, tmp_path, capsys):
    capsys.readouterr()
    assert run(["plan", str(profile), "--output", str(tmp_path / "p.json"), "--json", "-"]) == 0
    assert artifact.parse(Plan, capsys.readouterr().out, source="stdout") == artifact.load(Plan, tmp_path / "p.json")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("{model}:absent", "has no function 'absent'"),
        ("{model}:fails", "RuntimeError: no data today"),
        ("{model}:wrong", "returned a int"),
        ("{model}:nothing_to_place", "found no module to place"),
    ],
)
def test_a_wrong_model_is_an_error_that_says_why(tmp_path, capsys, where, message):
    code = run(["profile", "--model", where.format(model=FILE), "--output", str(tmp_path / "p.json")])
    assert code == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "p.json").exists()


def test_a_model_is_planned_for_gpus_that_nobody_has(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    output, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    arguments = ["plan", "--model", f"{FILE}:make", "--device", "h100-80g", "--gpus", "8", "--output", str(output)]
    assert run([*arguments, "--compare", "--picture", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    plan = artifact.load(Plan, output)
    assert plan.num_devices == 8
    assert plan.device.num_slots == 16
    printed = capsys.readouterr().out
    assert "waits for" in printed  # the last column, in a pipe, too
    rows = [line for line in printed.splitlines() if line.lstrip().startswith("device")]
    assert len(rows) == len(set(rows)) < plan.num_devices
    output_text = " ".join(printed.split())
    assert "nothing was measured" in output_text
    assert "counted in float32: the model's own" in output_text
    assert "predicted by one cost model, in float32" in output_text
    assert all(name in output_text for name in ("megatron", "distmm", "spindle", "gahc", "exact"))
    assert "Planners compared, predicted" in output_text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h99"], "unknown device 'h99'"),
        (["--device", "h100-80g", "--gpus", "0"], "gpus=0"),
        (["--time-limit", "-1", "--device", "h100-80g"], "effort=-1"),
        (["--dtype", "bfloat16"], "give --model and --device, too"),
    ],
)
def test_a_device_or_number_that_cannot_be_is_refused(tmp_path, capsys, arguments, message):
    output = tmp_path / "plan.json"
    assert run(["plan", "--model", f"{FILE}:make", "--output", str(output), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def test_a_plan_needs_a_profile_or_a_model(capsys):
    assert run(["plan"]) == 2
    assert "give either FILE" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--rounds", "many"], []])
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["demo", "doctor", "profile", "plan", "run", "bench"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        run([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out
