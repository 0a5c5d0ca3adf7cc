"""A day of ``mosaic retrain`` whose model is glued: trained, stopped half-way and gone on with, judged and promoted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.retrain.small_folder import bits_of

FAULTS = "    import sys\n    sys.modules['node_faults'].before_loss()\n"
ADDED = """

from transformers import Qwen3Config, Qwen3ForCausalLM

from mosaic.glue import Glue, Tower

SIDES = {"left": 8, "right": 9}


class Side(nn.Module):
    '''Two features of four numbers.'''

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2 * 12)

    def forward(self, x):
        return self.layer(x).unflatten(1, (2, 12)).relu()


def make_glued():
    text = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
    language_model = Qwen3ForCausalLM(Qwen3Config(**text, num_attention_heads=2, num_key_value_heads=1))
    towers = {name: Tower(Side(), token=token, width=12) for name, token in SIDES.items()}
    return Glue(language_model=language_model, **towers).freeze("left.model")


class Told(Rows):
    def __getitem__(self, place):
        row = super().__getitem__(place)
        ids = [token for token in SIDES.values() for _ in range(2)]
        found = {name: {"x": row[name]} for name in SIDES}
        labels = torch.tensor([-100] * len(ids) + [row["label"]])
        return {"input_ids": torch.tensor([*ids, 3]), "labels": labels, **found, "answer": row["label"]}


def glued_optimizer(model, num_steps):
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)


def glued_loss(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "answer"}).loss


def glued_score(model, batch):
    seen = {name: batch[name] for name in ("input_ids", *SIDES)}
    said = model(**seen).logits[:, -2, :2].argmax(-1)
    return {"value": (said == batch["answer"]).float(), "label": batch["answer"]}
"""
GLUED = {
    "model": "train.py:make_glued",
    "data": "train.py:Told",
    "loss": "train.py:glued_loss",
    "score": "train.py:glued_score",
    "optimizer": "train.py:glued_optimizer",
}


def glued_node(make_node: Callable[..., Any], name: str) -> Any:
    node = make_node(name=name, **GLUED)
    program: Path = node.folder.path / "train.py"
    program.write_text(program.read_text() + ADDED)
    node.change("def glued_loss(model, batch):\n", "def glued_loss(model, batch):\n" + FAULTS)
    return node


def test_a_day_of_a_glued_model_that_was_stopped_ends_with_the_bits_of_an_undisturbed_one(
    make_node: Callable[..., Any],
):
    undisturbed, stopped = (glued_node(make_node, name) for name in ("undisturbed", "stopped"))
    assert undisturbed.run() == 0, undisturbed.said
    assert stopped.run(at_step=20, fault=stopped.stop) == 75
    assert stopped.run() == 0
    assert undisturbed.report.outcome == "promoted"
    assert bits_of(stopped.folder.days()[0]) == bits_of(undisturbed.folder.days()[0])
