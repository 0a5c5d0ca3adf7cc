"""Freezing modules of a model by name: no gradients, and eval mode whatever ``train`` says."""

from __future__ import annotations

from typing import Self

from torch import nn


class Freezing(nn.Module):
    """A module whose children can be frozen and taken back."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: dict[str, tuple[str, ...]] = {}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the modules that are frozen."""
        return tuple(self._frozen)

    @property
    def still(self) -> tuple[str, ...]:
        """Names of the parameters that would not train even if nothing were frozen, such as Whisper's positions."""
        thawing = {f"{name}.{key}" for name, trained in self._frozen.items() for key in trained}
        named = self.named_parameters()
        return tuple(name for name, parameter in named if not parameter.requires_grad and name not in thawing)

    def freeze(self, *names: str) -> Self:
        """Freezes modules, such as ``vision.model``: no gradients, and eval mode until they are unfrozen.

        Raises:
            ValueError: There is no module of that name.
        """
        for name in names:
            module = self._named(name)
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
            module = self._named(name)
            trained = self._frozen.pop(name)
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or key in trained)
            module.train(self.training)
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; what is frozen stays in eval mode, but where adapters were put into it."""
        super().train(mode)
        for name in self._frozen:
            module = self._named(name)
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.eval()
        return self

    def _named(self, name: str) -> nn.Module:
        try:
            if name:
                return self.get_submodule(name)
        except AttributeError:
            pass
        children = [f"{child}.{part}" for child, own in self.named_children() for part in dict(own.named_children())]
        known = [name for name, _ in self.named_children()] + children
        raise ValueError(f"there is no module {name!r}; there are {', '.join(known)}")
