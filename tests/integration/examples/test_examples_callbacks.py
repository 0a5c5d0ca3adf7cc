"""The callbacks of trainers: equal to the same file without the line that Mosaic adds, also over a restart."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from example_cases import assert_equal, run_colocated, run_plain
from torch import nn

import mosaic
from mosaic.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="the extra [examples] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(4, 4)
        self.sound = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.image(x).sum() + self.sound(x).sum()


LOGGED = {"mosaic/steps", "mosaic/overlap", "mosaic/calls_in_place"}


@pytest.mark.parametrize(
    ("name", "placed"),
    [("trainer_callback.py", {"vision_model", "text_model"}), ("lightning_callback.py", {"image", "sound"})],
)
def test_a_trainer_with_the_callback_is_equal_and_logs_also_over_a_restart(name: str, placed: set[str], tmp_path: Path):
    plain, ours = (["--folder", str(tmp_path / side), "--steps"] for side in ("plain", "ours"))
    for steps in ("5", "10"):
        ran = run_colocated(name, [*ours, steps])
        assert_equal(run_plain(name, [*plain, steps]), ran)
        assert set(ran.handles[0].graph.names) == placed
        assert ran.metrics[0]["calls_in_place"] == 0, ran.described
    [*_, logged] = sorted((tmp_path / "ours").rglob("metrics.csv" if "lightning" in name else "trainer_state.json"))
    text = logged.read_text()
    assert all(key in text for key in LOGGED | {f"mosaic/forward_ms/{module}" for module in placed})


def test_a_module_that_the_lightning_module_lacks_is_named():
    import lightning

    from mosaic.integrations.lightning import MosaicCallback

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(2, 2)

    with pytest.raises(UnsupportedModelError, match=r"no module 'model'.*MosaicCallback\(module=.*children: tower"):
        MosaicCallback().on_train_start(lightning.Trainer(logger=False, enable_progress_bar=False), Task())


def test_several_ranks_are_told_to_colocate_before(monkeypatch: pytest.MonkeyPatch):
    from mosaic.integrations.first_call import FirstCall

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedModelError, match=r"there are 2.*call mosaic.colocate"):
        FirstCall(nn.Linear(2, 2), {})


def test_a_batch_of_an_evaluation_is_no_sample():
    from mosaic.integrations.first_call import FirstCall

    model = Towers()
    first_call = FirstCall(model, {})
    model.eval()(torch.ones(2, 4))
    assert first_call.colocate() is None
    model.train()(torch.ones(2, 4))
    handle = first_call.colocate()
    assert handle is not None
    handle.remove()


PAGE = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("logger", ["wandb", "torch.utils.tensorboard", "mlflow"])
def test_the_lines_for_a_logger_run_and_log_the_names_of_the_page(logger: str, monkeypatch: pytest.MonkeyPatch):
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if logger in block.split("\n")[0]]
    library = MagicMock()
    monkeypatch.setitem(sys.modules, logger, library)
    handle = mosaic.colocate(Towers(), sample=torch.ones(2, 4))
    exec(lines, {"handle": handle, "steps": 2, "train_step": lambda: None})
    handle.remove()
    calls = [call for call in library.mock_calls if str(call).startswith(("call.init().log(", "call.log_metrics("))]
    calls += [call for call in library.mock_calls if ".add_scalar(" in str(call)]
    assert len(calls) >= 2
    names = {call.args[0] for call in calls if isinstance(call.args[0], str)}
    names |= {name for call in calls if isinstance(call.args[0], dict) for name in call.args[0]}
    assert names >= {"steps", "overlap", "calls_in_place"}
    documented = re.findall(r"`([a-z_]+)", PAGE.split("flat dict of floats")[1].split("Weights and Biases")[0])
    assert {name.split("/")[0] for name in names} <= set(documented)
