"""A language model that sees and hears: towers whose features take the places of placeholders in its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.context.words import MaskWords
from mosaic.glue.folder import load_folder, load_projector, save_folder
from mosaic.glue.frozen import Freezing
from mosaic.glue.masks import mask_words
from mosaic.glue.merge import Placeholders, put
from mosaic.glue.positions import axes_positions, line_positions
from mosaic.glue.record import HandedOver
from mosaic.glue.tower import Features, Inputs, Tower, check_no_decoder

Before = Callable[[dict[str, Features], Inputs], Inputs]
"""Makes the language model's keywords of the towers' features and of its keywords so far."""


class Glue(Freezing):
    """Unimodal models as one (Cornstarch, section 3).

    ::

        model = Glue(
            language_model=AutoModelForCausalLM.from_config(qwen3),
            vision=Tower(SiglipVisionModel(siglip), projector="mlp", token=IMAGE),
            audio=Tower(WhisperEncoder(whisper), projector="linear", token=AUDIO),
        )
        model.freeze("vision.model", "audio.model")
        out = model(input_ids=ids, labels=labels, vision={"pixel_values": images}, audio={"input_features": mels})

    Towers are children under the names that they are given, and what is glued keeps its class and its weights' names
    below that: it trains, freezes, saves and is placed like any module. A batch may lack any tower's inputs: they are
    left out, None, or tensors without rows.

    Args:
        language_model: Takes ``inputs_embeds`` and has ``get_input_embeddings``, as transformers' have.
        before: Puts features into the text in the place of placeholders: gets the features by tower, and the language
            model's keywords with ``input_ids`` and ``inputs_embeds``; returns its keywords.
        towers: By name.

    Raises:
        ValueError: Two towers have one token, a name is taken, widths do not fit, or a model is of no use here.
    """

    def __init__(self, *, language_model: nn.Module, before: Before | None = None, **towers: Tower) -> None:
        super().__init__()
        check_no_decoder(language_model, "language model")
        if not callable(getattr(language_model, "get_input_embeddings", None)):
            raise ValueError(
                f"{type(language_model).__name__} has no get_input_embeddings(); take a language model of "
                "transformers, or give yours one"
            )
        self.language_model = language_model
        self.before = before
        self.tower_names = tuple(towers)
        self._check(towers)
        for name, tower in towers.items():
            tower.fit(name, self._embedding.weight.shape[1])
            self.add_module(name, tower)

    @property
    def towers(self) -> dict[str, Tower]:
        """The towers by name."""
        return {name: cast(Tower, self.get_submodule(name)) for name in self.tower_names}

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Runs the towers whose inputs are given, and the language model over the merged text.

        Args:
            input_ids: (batch, tokens), with one placeholder for each feature.
            inputs: For each tower the keywords of its model, or None; the rest are keywords of the language model,
                such as ``labels``, which are -100 where there is nothing to predict.

        Returns:
            What the language model returns.

        Raises:
            ValueError: Placeholders and features differ in number, or keywords are nobody's.
        """
        if hasattr(getattr(self.language_model, "config", None), "use_cache"):
            inputs.setdefault("use_cache", False)
        return self.language_model(**self._merged(input_ids, inputs))

    def embed(self, input_ids: Tensor, **towers: Inputs | None) -> Tensor:
        """Returns the embeddings of a text with the towers' features in it, (batch, tokens, width).

        Where the language model is called otherwise than by ``forward``: for its ``generate(inputs_embeds=...)``, or
        with one rank's part of a long sequence (``mosaic.context.attention.ContextBatch``).
        """
        if strange := sorted(set(towers) - set(self.tower_names)):
            raise ValueError(
                f"there is no tower {strange[0]!r}; this model has {', '.join(self.tower_names) or 'none'}"
            )
        return cast(Tensor, self._merged(input_ids, dict(towers))["inputs_embeds"])

    def positions(self, input_ids: Tensor, documents: Tensor | None = None, **towers: Inputs | None) -> Tensor:
        """Returns the tokens' positions: (batch, tokens); or (axes, batch, tokens) where towers give items shapes.

        Args:
            input_ids: (batch, tokens).
            documents: (batch, tokens), -1 for padding; positions begin anew in each. None: a row is one.
            towers: Their inputs, as in ``forward``; those of towers without ``positions`` are not needed.
        """
        found = torch.zeros_like(input_ids) if documents is None else documents
        shaped = {name: tower.positions for name, tower in self.towers.items() if tower.positions is not None}
        if not shaped:
            return line_positions(found)
        given = {name: towers.get(name) for name in shaped}
        items = {name: shaped[name](own) for name, own in given.items() if own is not None}
        return axes_positions(input_ids, found, self._tokens, items)

    def mask(
        self,
        input_ids: Tensor,
        kind: str = "causal",
        *,
        documents: Tensor | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
    ) -> MaskWords:
        """Returns who sees whom in one sequence, for ``mosaic.context``.

        Args:
            input_ids: (tokens,) or (1, tokens).
            kind: ``causal``; ``gemma``: and an item sees all of itself; ``cornstarch``: and a modality sees all of
                itself and nothing else.
            documents: As ``input_ids``, -1 for padding; None: one document.
            lengths: By tower how many placeholders each item has; by default those beside each other are one.

        Raises:
            ValueError: There is no such kind, there are several rows, or a document has over 55 items.
        """
        if input_ids.ndim > 1 and len(input_ids) != 1:
            raise ValueError(
                f"input_ids have {len(input_ids)} rows, and a mask is of one sequence; ask for each row's, or pack them"
            )
        owners = None if documents is None else documents.flatten().cpu().numpy()
        return mask_words(input_ids.flatten().cpu().numpy(), self._tokens, kind, documents=owners, lengths=lengths)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder with one of Hugging Face's for each model; see ``mosaic.glue.folder``.

        Raises:
            UnsupportedModelError: A class's code came with its weights, or adapters of peft are in a model.
        """
        about = {"has_before": self.before is not None, "frozen": self.frozen, "still": self.still}
        save_folder(Path(folder), self.language_model, self.towers, **about)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        modules: Mapping[str, nn.Module] = MappingProxyType({}),
        callbacks: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> Self:
        """Reads what ``save_pretrained`` wrote, in eval mode, frozen where it was.

        Args:
            folder: The folder.
            modules: For models and projectors of your own, such as ``{"vision.projector": MyProjector()}``, what their
                weights are read into.
            callbacks: Those that the model was saved with, such as ``{"vision.after": last_but_one}``.

        Raises:
            InvalidFileError: There is no ``glue.json``, or it is damaged.
            InvalidCheckpointError: Weights are missing, or not those of the class.
            UnsupportedModelError: A class is none of transformers'.
            ValueError: Modules or callbacks are missing, or there are some that it was saved without.
        """
        record, language_model, towers = load_folder(Path(folder), HandedOver(modules=modules, callbacks=callbacks))
        made = cls(language_model=language_model, before=callbacks.get("before"), **towers)
        for name, tower in towers.items():
            load_projector(Path(folder), name, tower)
        for name in record.still:
            made.get_parameter(name).requires_grad_(False)
        return made.freeze(*record.frozen).eval()

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, cast(Any, self.language_model).get_input_embeddings())

    @property
    def _tokens(self) -> dict[str, int]:
        return {name: tower.token for name, tower in self.towers.items() if tower.token is not None}

    def _merged(self, input_ids: Tensor, inputs: Inputs) -> Inputs:
        """Returns the language model's keywords, with the towers' features in the text."""
        given = self._take_towers(inputs)
        vocabulary = self._embedding.weight.shape[0]
        placeholders = Placeholders.find(input_ids, self._tokens, vocabulary, inputs.get("labels"))
        features = {name: self.towers[name](**own) for name, own in given.items()}
        embedded = self._embedding(placeholders.ids)
        if "position_ids" not in inputs and any(tower.positions is not None for tower in self.towers.values()):
            mask = inputs.get("attention_mask")
            documents = mask.long() - 1 if isinstance(mask, Tensor) and mask.ndim == 2 else None
            inputs["position_ids"] = self.positions(input_ids, documents, **given)
        if self.before is not None:
            return self.before(features, {**inputs, "input_ids": input_ids, "inputs_embeds": embedded})
        return {**inputs, "inputs_embeds": put(embedded, features, placeholders)}

    def _take_towers(self, inputs: Inputs) -> dict[str, Inputs]:
        """Takes the towers' inputs out of the keywords."""
        found = {name: inputs.pop(name, None) for name in self.tower_names}
        for name, own in found.items():
            if own is not None and not (isinstance(own, Mapping) and own):
                raise ValueError(
                    f"{name}={own if own == {} else type(own).__name__} is not the keywords of a model; give "
                    f"{name}={{'pixel_values': images}}, or leave it out"
                )
        for name, value in inputs.items():
            if isinstance(value, Mapping) and name != "attention_mask":
                raise ValueError(f"there is no tower {name!r}; this model has {', '.join(self.tower_names) or 'none'}")
        return {name: own for name, own in found.items() if own is not None and not _is_empty(own)}

    def _check(self, towers: Mapping[str, Tower]) -> None:
        users: dict[int, str] = {}
        for name, tower in towers.items():
            if not isinstance(tower, Tower):
                raise ValueError(f"{name}={type(tower).__name__} is no tower; give {name}=Tower(model, token=...)")
            if hasattr(self, name) or not name.isidentifier():
                raise ValueError(f"a tower cannot have the name {name!r}, which a model has already; take another")
            if tower.token is None:
                if self.before is None:
                    raise ValueError(
                        f"{name!r} has no token, so that nobody knows where its features go; give Tower(token=...), or "
                        "Glue(before=...), which puts them into the text"
                    )
            elif (other := users.setdefault(tower.token, name)) != name:
                raise ValueError(
                    f"{other!r} and {name!r} have one token, {tower.token}; give each tower a token of its own"
                )


def _is_empty(inputs: Inputs) -> bool:
    """Whether a tower's inputs are of no item."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return bool(tensors) and not any(map(len, tensors))
