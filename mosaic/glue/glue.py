"""A language model that sees and hears: towers whose features take the places of placeholders in its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

from torch import Tensor, nn

from mosaic.glue.merge import Placeholders, put
from mosaic.glue.tower import Features, Inputs, Tower, check_no_decoder

Before = Callable[[dict[str, Features], Inputs], Inputs]
"""Makes the language model's keywords of the towers' features and of its keywords so far."""


class Glue(nn.Module):
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
    below that: it trains, freezes, saves and is placed like any module. A batch may lack any tower's inputs.

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
        self._frozen: dict[str, tuple[str, ...]] = {}
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
        given = self._take_towers(inputs)
        placeholders = Placeholders.find(input_ids, self._tokens, self._unspeakable, inputs.get("labels"))
        features = {name: self.towers[name](**own) for name, own in given.items()}
        embedded = self._embedding(placeholders.ids)
        if "use_cache" not in inputs and hasattr(getattr(self.language_model, "config", None), "use_cache"):
            inputs["use_cache"] = False
        if self.before is not None:
            return self.language_model(
                **self.before(features, {**inputs, "input_ids": input_ids, "inputs_embeds": embedded})
            )
        return self.language_model(inputs_embeds=put(embedded, features, placeholders), **inputs)

    def freeze(self, *names: str) -> Self:
        """Freezes modules, such as ``vision.model``: no gradients, and eval mode until they are unfrozen.

        Raises:
            ValueError: There is no module of that name.
        """
        for name in names:
            module = self._module(name)
            if name not in self._frozen:
                training = tuple(key for key, parameter in module.named_parameters() if parameter.requires_grad)
                self._frozen[name] = training
            module.requires_grad_(False).eval()
        return self

    def unfreeze(self, *names: str) -> Self:
        """Takes ``freeze`` back: what trained before it trains again.

        Raises:
            ValueError: No module of that name was frozen.
        """
        for name in names:
            if name not in self._frozen:
                raise ValueError(f"{name!r} was not frozen; frozen are {', '.join(self._frozen) or 'none'}")
            module = self._module(name)
            trained = self._frozen.pop(name)
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or key in trained)
            module.train(self.training)
        return self

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the modules that are frozen."""
        return tuple(self._frozen)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; what is frozen stays in eval mode, but where adapters were put into it."""
        super().train(mode)
        for name in self._frozen:
            module = self._module(name)
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()
        return self

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, cast(Any, self.language_model).get_input_embeddings())

    @property
    def _tokens(self) -> dict[str, int]:
        return {name: tower.token for name, tower in self.towers.items() if tower.token is not None}

    @property
    def _unspeakable(self) -> frozenset[str]:
        """Towers whose token the language model cannot predict."""
        vocabulary = self._embedding.weight.shape[0]
        return frozenset(name for name, token in self._tokens.items() if not 0 <= token < vocabulary)

    def _take_towers(self, inputs: Inputs) -> dict[str, Inputs]:
        """Takes the towers' inputs out of the keywords."""
        found = {name: inputs.pop(name, None) for name in self.tower_names}
        for name, own in found.items():
            if own is not None and not (isinstance(own, Mapping) and own):
                raise ValueError(
                    f"{name}={type(own).__name__} are no inputs; give the keywords of its model, such as "
                    f"{name}={{'pixel_values': images}}, or leave it out"
                )
        for name, value in inputs.items():
            if isinstance(value, Mapping) and name != "attention_mask":
                raise ValueError(f"there is no tower {name!r}; this model has {', '.join(self.tower_names) or 'none'}")
        return {name: own for name, own in found.items() if own is not None}

    def _module(self, name: str) -> nn.Module:
        try:
            return self.get_submodule(name) if name else self.get_submodule("?")
        except AttributeError:
            parts = [f"{tower}{part}" for tower in self.tower_names for part in ("", ".model", ".projector")]
            raise ValueError(
                f"there is no module {name!r}; there are {', '.join([*parts, 'language_model'])}"
            ) from None

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
