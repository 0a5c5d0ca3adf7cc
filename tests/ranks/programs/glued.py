"""A glued model on four ranks with its sequences shared out, beside the plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import glued_models as cases
import torch

import mosaic
from mosaic.context import ContextSettings
from mosaic.glue import MultimodalModel, Parallel, Tower, parallelize
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.planner import PlannerOptions
from ranks.begun import join
from ranks.programs.pipeline.trained import check_equal

OPTIONS = PlannerOptions(limits=OrderLimits(rollouts=50))


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, given
    )


def steps() -> list[list[dict[str, Any]]]:
    """Steps of microbatches, some without images."""
    return [[doubled(cases.batch(images, 0, rows=1)) for images in step] for step in ((3, 0, 2, 1), (1, 0, 4))]


LAYERS = "vision.model.encoder.layers.*."
TOWER_PLAN = {
    **{f"{LAYERS}self_attn.{name}_proj": "colwise" for name in "qkv"},
    f"{LAYERS}self_attn.out_proj": "rowwise",
    f"{LAYERS}mlp.fc1": "colwise",
    f"{LAYERS}mlp.fc2": "rowwise",
}


def of_their_own(rank: int, size: int, place: Path) -> None:
    """Modules with tensor ranks of their own: more for the language model, then more for the tower; a checkpoint."""
    join(rank, size, place)
    for own, tp_plan in (((1, 2), None), ((2, 1), TOWER_PLAN)):
        torch.manual_seed(1)
        tower = Tower(cases.vision(), token=cases.IMAGE)
        model = MultimodalModel(language_model=cases.language_model(num_key_value_heads=2), vision=tower).double()
        plain = copy.deepcopy(model)
        specs = {name: Parallel(pipeline=1, tensor=own[at]) for at, name in enumerate(("vision", "language_model"))}
        pipe = mosaic.pipeline(
            model, steps()[0], options=OPTIONS, trial=False, tp_plan=tp_plan, **parallelize(model, specs)
        )
        assert pipe.degrees.widths == own
        assert model.language_model.lm_head.weight.is_meta == (rank < own[0])
        wide = (model.vision.model.encoder if own[0] == 2 else model.language_model.model).layers[0].self_attn.k_proj
        assert wide.weight.is_meta or wide.out_features == 2 * wide.weight.shape[0]
        check_equal(pipe, model, plain, steps(), ahead=True)
        pipe.export(place / f"{own[0]}.safetensors")
        pipe.remove()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    print("equal")


def nested(rank: int, size: int, place: Path) -> None:
    """A tower that is a multimodal model itself, with an encoder on a rank of its own."""
    join(rank, size, place)
    torch.manual_seed(1)
    model = cases.nested().double()
    plain = copy.deepcopy(model)
    trained = [[doubled(cases.nested_batch()) for _ in range(2)]]
    specs = {name: Parallel(pipeline=1) for name in ("speech.model.audio", "speech.model.language_model")}
    specs["language_model"] = Parallel(pipeline=1)
    pipe = mosaic.pipeline(model, trained[0], options=OPTIONS, trial=False, **parallelize(model, specs))
    assert model.speech.model.audio.model.conv1.weight.is_meta == (rank != 0)
    check_equal(pipe, model, plain, trained)
    pipe.remove()
    print("equal")


def over_sequences(rank: int, size: int, place: Path) -> None:
    """A frozen tower on two ranks that share its images, the language model on two that share its sequences."""
    join(rank, size, place)
    torch.manual_seed(1)
    tower = Tower(cases.vision(), token=cases.IMAGE)
    model = MultimodalModel(language_model=cases.language_model(), vision=tower).double().freeze("vision.model")
    plain = copy.deepcopy(model)
    trained = steps()
    context = ContextSettings(ranks=2, mask=lambda microbatch: model.mask(microbatch["input_ids"]), block=4)
    arguments = parallelize(model, context=context)
    pipe = mosaic.pipeline(model, trained[0], options=OPTIONS, trial=False, **arguments)
    assert "2 ranks a sequence" in pipe.describe()
    assert model.language_model.lm_head.weight.is_meta == (rank < 2)
    check_equal(pipe, model, plain, trained, ahead=True)
    pipe.remove()
    print("equal")
