"""Multimodal models: the model of several unimodal ones, its forward pass, frozen modules, and its folder."""

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
from mosaic.glue.text import Placeholders, mask_words, text_positions
from mosaic.glue.tower import Features, Inputs, Tower, check_no_decoder

Before = Callable[[dict[str, Features], Inputs], Inputs]
"""Maps the towers' features and the language model's keywords to its final keywords."""


class MultimodalModel(nn.Module):
    """A language model with towers, whose features replace placeholders in its text (Cornstarch, section 3).

    ::

        model = MultimodalModel(
            language_model=AutoModelForCausalLM.from_config(qwen3),
            vision=Tower(SiglipVisionModel(siglip), projector="mlp", token=IMAGE),
            audio=Tower(WhisperEncoder(whisper), projector="linear", token=AUDIO),
        )
        model.freeze("vision.model", "audio.model")
        out = model(input_ids=ids, labels=labels, vision={"pixel_values": images}, audio={"input_features": mels})

    Towers are children under their names, and models keep their class and the names of their weights below that: they
    train, freeze, save and are placed like any module. A batch may lack any tower's inputs: they are left out, None, or
    tensors without rows.

    Args:
        language_model: A module with ``inputs_embeds`` and ``get_input_embeddings``, as in transformers.
        before: Replaces placeholders by features: receives the features by tower, and the language model's keywords
            with ``input_ids`` and ``inputs_embeds``; returns its keywords.
        towers: By name.

    Raises:
        ValueError: Two towers share a token, a name is taken, widths differ, or a model is unsuitable.
    """

    def __init__(self, *, language_model: nn.Module, before: Before | None = None, **towers: Tower) -> None:
        super().__init__()
        self._frozen: list[str] = []
        self._thawing: set[str] = set()  # parameters that train again after unfreezing
        check_no_decoder(language_model, "language model")
        if not callable(getattr(language_model, "get_input_embeddings", None)):
            raise ValueError(
                f"{type(language_model).__name__} has no get_input_embeddings(); use a language model of "
                "transformers, or add the method to yours"
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
        """Runs the towers that have inputs, and the language model over the merged text.

        Args:
            input_ids: (batch, tokens), with one placeholder for each feature.
            inputs: For each tower the keywords of its model, or None; the rest are keywords of the language model,
                such as ``labels``, which are -100 where no token is predicted.

        Returns:
            The language model's output.

        Raises:
            ValueError: The numbers of placeholders and features differ, or a keyword is unknown.
        """
        if hasattr(getattr(self.language_model, "config", None), "use_cache"):
            inputs.setdefault("use_cache", False)
        return self.language_model(**self._merged(input_ids, inputs))

    def embed(self, input_ids: Tensor, **towers: Inputs | None) -> Tensor:
        """Returns the embeddings of a text with the towers' features in it, (batch, tokens, width).

        For direct calls of the language model: its ``generate(inputs_embeds=...)``, or one rank's part of a long
        sequence (``mosaic.context.attention.ContextBatch``).
        """
        if strange := sorted(set(towers) - set(self.tower_names)):
            raise ValueError(
                f"there is no tower {strange[0]!r}; this model has {', '.join(self.tower_names) or 'none'}"
            )
        return cast(Tensor, self._merged(input_ids, dict(towers))["inputs_embeds"])

    def positions(self, input_ids: Tensor, documents: Tensor | None = None, **towers: Inputs | None) -> Tensor:
        """Returns the tokens' positions: (batch, tokens), or (axes, batch, tokens) if towers have ``positions``.

        Args:
            input_ids: (batch, tokens).
            documents: (batch, tokens), -1 for padding; positions begin at 0 in each. None: each row is one.
            towers: Inputs of the towers with ``positions``, as in ``forward``.
        """
        owners = torch.zeros_like(input_ids) if documents is None else documents
        shaped = {name: tower.positions for name, tower in self.towers.items() if tower.positions is not None}
        items = {name: positions(own) for name, positions in shaped.items() if (own := towers.get(name)) is not None}
        positions = text_positions(input_ids, owners, self._tokens, items)
        return positions if shaped else positions[0]

    def mask(
        self,
        input_ids: Tensor,
        kind: str = "causal",
        *,
        documents: Tensor | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
    ) -> MaskWords:
        """Returns the attention mask of one sequence, for ``mosaic.context``.

        Args:
            input_ids: (tokens,) or (1, tokens).
            kind: ``causal``; ``gemma``: causal, and an item sees all of itself; ``cornstarch``: text causal, and a
                modality sees all of itself and nothing else.
            documents: As ``input_ids``, -1 for padding; None: one document.
            lengths: Placeholders of each item, by tower; by default adjacent ones are one item.

        Raises:
            ValueError: The kind is unknown, the input has several rows, or a document has over 55 items.
        """
        if input_ids.ndim > 1 and len(input_ids) != 1:
            raise ValueError(
                f"input_ids have {len(input_ids)} rows, and a mask is of one sequence; call mask() by row, or pack them"
            )
        owners = None if documents is None else documents.flatten().cpu().numpy()
        return mask_words(input_ids.flatten().cpu().numpy(), self._tokens, kind, documents=owners, lengths=lengths)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen modules."""
        return tuple(self._frozen)

    @property
    def still(self) -> tuple[str, ...]:
        """Names of parameters that never train, frozen or not, such as Whisper's positions."""
        every = self.named_parameters(remove_duplicate=False)  # tied weights have several names
        thawing = {id(parameter) for name, parameter in every if name in self._thawing}
        named = self.named_parameters()
        return tuple(name for name, each in named if not each.requires_grad and id(each) not in thawing)

    def freeze(self, *names: str) -> Self:
        """Freezes modules, such as ``vision.model``: no gradients, and eval mode until ``unfreeze``.

        Raises:
            ValueError: No module has that name.
        """
        for name in names:
            module = self._named(name)
            every = module.named_parameters(prefix=name, remove_duplicate=False)
            self._thawing.update(key for key, parameter in every if parameter.requires_grad)
            self._frozen += [] if name in self._frozen else [name]
            module.requires_grad_(False).eval()
        return self

    def unfreeze(self, *names: str) -> Self:
        """Reverses ``freeze``, except for modules inside that are frozen by name.

        Raises:
            ValueError: No module of that name was frozen.
        """
        for name in names:
            if name not in self._frozen:
                raise ValueError(f"{name!r} was not frozen; frozen are {', '.join(self._frozen) or 'none'}")
            module = self._named(name)
            self._frozen.remove(name)
            still_frozen = {id(each) for other in self._frozen for each in self._named(other).parameters()}
            for key, parameter in module.named_parameters(prefix=name, remove_duplicate=False):
                if key in self._thawing and id(parameter) not in still_frozen:
                    self._thawing.remove(key)
                    parameter.requires_grad_(True)
            module.train(self.training)
            self._keep_eval()
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; frozen modules without adapters stay in eval mode."""
        super().train(mode)
        self._keep_eval()
        return self

    def _keep_eval(self) -> None:
        for name in self._frozen:
            module = self._named(name)
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()

    def _named(self, name: str) -> nn.Module:
        try:
            if name:
                return self.get_submodule(name)
        except AttributeError:
            pass
        children = [f"{child}.{part}" for child, own in self.named_children() for part in dict(own.named_children())]
        names = [name for name, _ in self.named_children()] + children
        raise ValueError(f"there is no module {name!r}; there are {', '.join(names)}")

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder with a Hugging Face folder for each model; see ``mosaic.glue.folder``.

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
        """Reads a folder of ``save_pretrained``, in eval mode and frozen as saved.

        Args:
            folder: The folder.
            modules: Your own models and projectors, which receive their weights, such as
                ``{"vision.projector": MyProjector()}``.
            callbacks: The callbacks of the saved model, such as ``{"vision.after": last_but_one}``.

        Raises:
            InvalidFileError: ``glue.json`` is missing or damaged.
            InvalidCheckpointError: Weights are missing, or do not fit the class.
            UnsupportedModelError: A class is not from transformers.
            ValueError: Modules or callbacks are missing, or the saved model has no such ones.
        """
        record, language_model, towers = load_folder(Path(folder), modules, callbacks, MultimodalModel.from_pretrained)
        model = cls(language_model=language_model, before=callbacks.get("before"), **towers)
        for name, tower in towers.items():
            load_projector(Path(folder), name, tower)
        for name in record.still:
            model.get_parameter(name).requires_grad_(False)
        return model.freeze(*record.frozen).eval()

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, cast(Any, self.language_model).get_input_embeddings())

    @property
    def _tokens(self) -> dict[str, int]:
        return {name: tower.token for name, tower in self.towers.items() if tower.token is not None}

    def _merged(self, input_ids: Tensor, inputs: Inputs) -> Inputs:
        """Returns the language model's keywords, with the towers' features in the text."""
        tower_inputs = self._take_towers(inputs)
        vocabulary = self._embedding.weight.shape[0]
        placeholders = Placeholders.find(input_ids, self._tokens, vocabulary, inputs.get("labels"))
        features = {name: self.towers[name](**own) for name, own in tower_inputs.items()}
        embedded = self._embedding(placeholders.ids)
        if "position_ids" not in inputs and any(tower.positions is not None for tower in self.towers.values()):
            mask = inputs.get("attention_mask")
            documents = mask.long() - 1 if isinstance(mask, Tensor) and mask.ndim == 2 else None
            inputs["position_ids"] = self.positions(input_ids, documents, **tower_inputs)
        if self.before is not None:
            return self.before(features, {**inputs, "input_ids": input_ids, "inputs_embeds": embedded})
        return {**inputs, "inputs_embeds": placeholders.fill(embedded, features)}

    def _take_towers(self, inputs: Inputs) -> dict[str, Inputs]:
        """Removes the towers' inputs from the keywords and returns them."""
        tower_inputs = {name: inputs.pop(name, None) for name in self.tower_names}
        for name, own in tower_inputs.items():
            if own is not None and not (isinstance(own, Mapping) and own):
                raise ValueError(
                    f"{name}={own if own == {} else type(own).__name__} is not the keywords of a model; give "
                    f"{name}={{'pixel_values': images}}, or leave it out"
                )
        for name, value in inputs.items():
            if isinstance(value, Mapping) and name != "attention_mask":
                raise ValueError(f"there is no tower {name!r}; this model has {', '.join(self.tower_names) or 'none'}")
        return {name: own for name, own in tower_inputs.items() if own is not None and not _is_empty(own)}

    def _check(self, towers: Mapping[str, Tower]) -> None:
        users: dict[int, str] = {}
        for name, tower in towers.items():
            if not isinstance(tower, Tower):
                raise ValueError(f"{name}={type(tower).__name__} is not a Tower; use {name}=Tower(model, token=...)")
            if hasattr(self, name) or not name.isidentifier():
                raise ValueError(f"a tower cannot have the name {name!r}, which the model has already; choose another")
            if tower.token is None:
                if self.before is None:
                    raise ValueError(
                        f"{name!r} has no token to mark where its features go; use Tower(token=...), or "
                        "MultimodalModel(before=...), which puts them into the text"
                    )
            elif (other := users.setdefault(tower.token, name)) != name:
                raise ValueError(f"{other!r} and {name!r} share the token {tower.token}; give each tower its own")


def _is_empty(inputs: Inputs) -> bool:
    """Returns True if a tower's inputs have no items."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return bool(tensors) and not any(map(len, tensors))
