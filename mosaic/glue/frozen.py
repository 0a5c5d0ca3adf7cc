"""Freezing modules of a model by name: no gradients, and eval mode whatever ``train`` says."""

from __future__ import annotations

from typing import Self

from torch import nn


class Freezing(nn.Module):
    """A module whose children can be frozen and taken back."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: list[str] = []
        self._thawing: set[str] = set()  # parameters that train once nothing that holds them is frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the modules that are frozen."""
        return tuple(self._frozen)

    @property
    def still(self) -> tuple[str, ...]:
        """Names of the parameters that would not train even if nothing were frozen, such as Whisper's positions."""
        every = self.named_parameters(remove_duplicate=False)  # tied weights have several names
        thawing = {id(parameter) for name, parameter in every if name in self._thawing}
        named = self.named_parameters()
        return tuple(name for name, one in named if not one.requires_grad and id(one) not in thawing)

    def freeze(self, *names: str) -> Self:
        """Freezes modules, such as ``vision.model``: no gradients, and eval mode until they are unfrozen.

        Raises:
            ValueError: There is no module of that name.
        """
        for name in names:
            module = self._named(name)
            every = module.named_parameters(prefix=name, remove_duplicate=False)
            self._thawing.update(key for key, parameter in every if parameter.requires_grad)
            self._frozen += [] if name in self._frozen else [name]
            module.requires_grad_(False).eval()
        return self

    def unfreeze(self, *names: str) -> Self:
        """Takes ``freeze`` back: what trained before it trains again, but for modules inside that are frozen too.

        Raises:
            ValueError: No module of that name was frozen.
        """
        for name in names:
            if name not in self._frozen:
                raise ValueError(f"{name!r} was not frozen; frozen are {', '.join(self._frozen) or 'none'}")
            module = self._named(name)
            self._frozen.remove(name)
            held = {id(one) for other in self._frozen for one in self._named(other).parameters()}
            for key, parameter in module.named_parameters(prefix=name, remove_duplicate=False):
                if key in self._thawing and id(parameter) not in held:
                    self._thawing.remove(key)
                    parameter.requires_grad_(True)
            module.train(self.training)
            self._rest()
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; what is frozen stays in eval mode, but where adapters were put into it."""
        super().train(mode)
        self._rest()
        return self

    def _rest(self) -> None:
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
        known = [name for name, _ in self.named_children()] + children
        raise ValueError(f"there is no module {name!r}; there are {', '.join(known)}")
