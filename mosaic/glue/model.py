"""The multimodal model: forward pass, frozen modules, and folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.artifact import load, save
from mosaic.context.words import MaskWords
from mosaic.errors import unknown
from mosaic.glue import folder as files
from mosaic.glue.text import flat_features, mask_words, without_placeholders
from mosaic.glue.tower import CALLBACKS, Inputs, Tower

LANGUAGE_MODEL = "language_model"
NESTED = "mosaic.glue.model:MultimodalModel"
"""Class in a record of a tower whose model is a ``MultimodalModel``."""


class MultimodalModel(nn.Module):
    """A language model with towers whose features replace placeholders in its text (Cornstarch, section 3).

    ::

        model = MultimodalModel(
            language_model=AutoModelForCausalLM.from_config(qwen3),
            vision=Tower(SiglipVisionModel(siglip), projector="mlp", token=IMAGE),
            audio=Tower(WhisperEncoder(whisper), projector="linear", token=AUDIO),
        )
        model.freeze("vision.model", "audio.model")
        out = model(input_ids=ids, labels=labels, vision={"pixel_values": images}, audio={"input_features": mels})

    Towers are children with these names. Models keep their class and weight names. A batch may lack any tower's inputs:
    they are left out, None, or tensors without rows.

    Args:
        language_model: A module with ``inputs_embeds`` and ``get_input_embeddings``, as in transformers.
        towers: By name.

    Raises:
        ValueError: Two towers share a token, a name is in use, widths differ, or a model is unsuitable.
    """

    def __init__(self, *, language_model: nn.Module, **towers: Tower) -> None:
        super().__init__()
        kind = type(language_model).__name__
        if getattr(getattr(language_model, "config", None), "is_encoder_decoder", False):
            raise ValueError(f"{kind} has an encoder for its text; use a decoder-only model")
        if not callable(getattr(language_model, "get_input_embeddings", None)):
            raise ValueError(
                f"{kind} has no get_input_embeddings(); use a language model of transformers, or add the method to "
                "yours"
            )
        self.language_model = language_model
        self.tower_names = tuple(towers)
        for name, tower in towers.items():
            if not isinstance(tower, Tower):
                raise ValueError(f"{name}={type(tower).__name__} is not a Tower; pass {name}=Tower(model, token=...)")
            if hasattr(self, name) or not name.isidentifier():
                raise ValueError(f"a tower cannot have the name {name!r}, which the model already has; choose another")
            tower.fit(name, self._embedding.weight.shape[1])
            self.add_module(name, tower)
        if len(set(self._tokens.values())) < len(self._tokens):
            raise ValueError(f"towers share a token ({self._tokens}); use a token of its own for each")
        self.frozen: tuple[str, ...] = ()
        """Names of the frozen modules."""
        every = self.named_parameters(remove_duplicate=False)  # tied weights have several names
        self._still = tuple(name for name, parameter in every if not parameter.requires_grad)

    @property
    def towers(self) -> dict[str, Tower]:
        """The towers by name."""
        return {name: cast(Tower, self.get_submodule(name)) for name in self.tower_names}

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Returns the language model's output for the text with the towers' features.

        Args:
            input_ids: (batch, tokens), with one placeholder per feature.
            inputs: Keywords of each tower's model, or None, by tower; others are keywords of the language model, such
                as ``labels``, which are -100 where no token is predicted.

        Raises:
            ValueError: The numbers of placeholders and features differ, or a keyword is unknown.
        """
        if hasattr(getattr(self.language_model, "config", None), "use_cache"):
            inputs.setdefault("use_cache", False)
        return self.language_model(**self._merged(input_ids, inputs))

    def embed(self, input_ids: Tensor, **towers: Inputs | None) -> Tensor:
        """Returns the embeddings of a text with the towers' features, (batch, tokens, width).

        For direct calls of the language model, such as ``generate(inputs_embeds=...)`` or one rank's part of a long
        sequence (``mosaic.context.attention.ContextBatch``).
        """
        return cast(Tensor, self._merged(input_ids, dict(towers))["inputs_embeds"])

    def mask(
        self,
        input_ids: Tensor,
        kind: str = "causal",
        *,
        documents: Tensor | None = None,
    ) -> MaskWords:
        """Returns the attention mask of one sequence, for ``mosaic.context``; adjacent placeholders are one item.

        Args:
            input_ids: (tokens,) or (1, tokens).
            kind: Name in ``mosaic.glue.text.MASK_KINDS``.
            documents: Document numbers in the shape of ``input_ids``, -1 for padding; None: one document.

        Raises:
            ValueError: The kind is unknown, the input has several rows, or a document has over 55 items.
        """
        if input_ids.ndim > 1 and len(input_ids) != 1:
            raise ValueError(
                f"input_ids have {len(input_ids)} rows, but a mask is for one sequence; call mask() per row, or pack"
            )
        owners = None if documents is None else documents.flatten().cpu().numpy()
        return mask_words(input_ids.flatten().cpu().numpy(), self._tokens, kind, owners)

    def freeze(self, *names: str) -> Self:
        """Freezes modules, such as ``vision.model``: no gradients, and eval mode until ``unfreeze``.

        Raises:
            ValueError: No module has that name.
        """
        for name in names:
            self._named(name).requires_grad_(False).eval()
        self.frozen = tuple(dict.fromkeys((*self.frozen, *names)))
        return self

    def unfreeze(self, *names: str) -> Self:
        """Unfreezes modules.

        Submodules frozen by their own names stay frozen, as do parameters that did not train at construction, such as
        Whisper's positions.

        Raises:
            ValueError: No module of that name is frozen.
        """
        for name in names:
            if name not in self.frozen:
                raise ValueError(unknown("frozen module", name, self.frozen))
        self.frozen = tuple(name for name in self.frozen if name not in names)
        frozen = {id(parameter) for name in self.frozen for parameter in self._named(name).parameters()}
        for name in names:
            for key, parameter in self._named(name).named_parameters(prefix=name):
                if key not in self._still and id(parameter) not in frozen:
                    parameter.requires_grad_(True)
        return self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; frozen modules without adapters stay in eval mode."""
        super().train(mode)
        for module in map(self._named, self.frozen):
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()
        return self

    def _named(self, name: str) -> nn.Module:
        with suppress(AttributeError):
            if name:
                return self.get_submodule(name)
        names = [each for each, _ in self.named_modules() if each and each.count(".") < 2]
        raise ValueError(unknown("module", name, names))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder with a Hugging Face folder per model; see ``mosaic.glue.folder``.

        Raises:
            UnsupportedModelError: A model has adapters of peft.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files.RECORD).unlink(missing_ok=True)
        towers = []
        for name, tower in self.towers.items():
            if isinstance(tower.model, MultimodalModel):
                tower.model.save_pretrained(folder / name)
                kind = NESTED
            else:
                kind = files.save_part(f"{name}.model", tower.model, folder / name)
            files.save_projector(tower.projector, folder / name)
            callbacks = tuple(callback for callback in CALLBACKS if getattr(tower, callback) is not None)
            about: dict[str, Any] = {"projector": tower.kind, "token": tower.token, "width": tower.width}
            towers.append(files.TowerRecord(name=name, model=kind, callbacks=callbacks, **about))
        record = files.ModelRecord(
            language_model=files.save_part(LANGUAGE_MODEL, self.language_model, folder / LANGUAGE_MODEL),
            towers=tuple(towers),
            frozen=self.frozen,
            still=self._still,
        )
        save(record, folder / files.RECORD)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        modules: Mapping[str, nn.Module] = MappingProxyType({}),
        callbacks: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> Self:
        """Reads a folder of ``save_pretrained``, in eval mode with the saved frozen modules.

        Args:
            folder: The folder.
            modules: Your own models and projectors, into which weights are loaded, such as ``{"vision.projector":
                MyProjector()}``.
            callbacks: The callbacks of the saved model, such as ``{"vision.after": last_but_one}``.

        Raises:
            InvalidFileError: ``glue.json`` is missing or damaged.
            InvalidCheckpointError: Weights are missing or do not fit the class.
            UnsupportedModelError: A class is not from transformers.
            ValueError: Modules or callbacks are missing, or the saved model does not have them.
        """
        own = files.OwnObjects(dict(modules), dict(callbacks))
        model = cls._load(Path(folder), "", own)
        own.check_taken()
        return model

    @classmethod
    def _load(cls, folder: Path, prefix: str, own: files.OwnObjects) -> Self:
        """Reads a model; names of its objects start with ``prefix``."""
        record = load(files.ModelRecord, folder / files.RECORD)
        towers = {}
        for entry in record.towers:
            name, place = f"{prefix}{entry.name}", folder / entry.name
            around = {callback: own.take("callbacks", f"{name}.{callback}") for callback in entry.callbacks}
            if entry.model == NESTED:
                model: nn.Module = MultimodalModel._load(place, f"{name}.model.", own)
            else:
                model = files.load_part(f"{name}.model", entry.model, place, own)
            projector: Any = None if entry.projector == "none" else entry.projector
            if projector == "own":
                projector = own.take("modules", f"{name}.projector")
            towers[entry.name] = Tower(model, projector=projector, token=entry.token, width=entry.width, **around)
        language_model = files.load_part(
            f"{prefix}{LANGUAGE_MODEL}", record.language_model, folder / LANGUAGE_MODEL, own
        )
        whole = cls(language_model=language_model, **towers)
        for name, tower in towers.items():
            files.load_projector(f"{prefix}{name}", tower.projector, folder / name)
        whole._still = record.still
        for name in record.still:
            whole.get_parameter(name).requires_grad_(False)
        return whole.freeze(*record.frozen).eval()

    @property
    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, cast(Any, self.language_model).get_input_embeddings())

    @property
    def _tokens(self) -> dict[str, int]:
        return {name: tower.token for name, tower in self.towers.items()}

    def _merged(self, input_ids: Tensor, inputs: Inputs) -> Inputs:
        """Returns the language model's keywords with the towers' features in the text."""
        tower_inputs = self._take_towers(inputs)
        tokens = self._tokens
        ids, counts = without_placeholders(input_ids, tokens, self._embedding.weight.shape[0])
        features = {name: self.towers[name](**own) for name, own in tower_inputs.items()}
        embedded = self._embedding(ids)
        for name, own in counts.items():
            if name in features:
                flat = flat_features(name, features[name], embedded.shape[-1], own).to(embedded.device, embedded.dtype)
                embedded = embedded.masked_scatter((input_ids == tokens[name]).unsqueeze(-1), flat)
            elif any(own):
                raise ValueError(
                    f"input_ids have {sum(own)} placeholders of {name!r}, but the batch has no {name} inputs; pass "
                    f"{name}={{...}}, or remove them"
                )
        return {**inputs, "inputs_embeds": embedded}

    def _take_towers(self, inputs: Inputs) -> dict[str, Inputs]:
        """Removes the towers' inputs from the keywords and returns those with items."""
        tower_inputs = {name: inputs.pop(name, None) for name in self.tower_names}
        for name, own in tower_inputs.items():
            if own is not None and not (isinstance(own, Mapping) and own):
                raise ValueError(
                    f"{name}={own if own == {} else type(own).__name__} is not a dict of a model's keywords; pass "
                    f"{name}={{'pixel_values': images}}, or leave it out"
                )
        for name, value in inputs.items():
            if isinstance(value, Mapping) and name != "attention_mask":
                raise ValueError(unknown("tower", name, self.tower_names))
        return {name: own for name, own in tower_inputs.items() if own is not None and not _is_empty(own)}


def _is_empty(inputs: Inputs) -> bool:
    """Returns True if a tower's inputs have no items."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return bool(tensors) and not any(map(len, tensors))
