"""Freezing modules of a model by name: no gradients, and eval mode whatever ``train`` says."""

from __future__ import annotations

from typing import Self

from torch import nn


class Freezing(nn.Module):
    """A module that can freeze and unfreeze its children."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: list[str] = []
        self._thawing: set[str] = set()  # parameters that train again after unfreezing

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
        known = [name for name, _ in self.named_children()] + children
        raise ValueError(f"there is no module {name!r}; there are {', '.join(known)}")
