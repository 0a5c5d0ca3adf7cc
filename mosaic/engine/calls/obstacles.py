"""Why a module is not placed, or why its calls run where they are made; each with what to do about it."""

from __future__ import annotations

_NOTHING = "none; it runs in place"


class Obstacle(str):
    """A reason, as the end of a sentence that starts with the module's name."""

    remedy: str
    apart: bool

    def __new__(cls, reason: str, *, remedy: str = _NOTHING, apart: bool = False) -> Obstacle:
        obstacle = super().__new__(cls, reason)
        obstacle.remedy, obstacle.apart = remedy, apart
        return obstacle

    @property
    def sentence(self) -> str:
        """The reason, and what to do about it where there is anything to do."""
        return str(self) if self.remedy == _NOTHING else f"{self}; {self.remedy}"


def hides_tensors(verb: str, leaf: object) -> Obstacle:
    name = type(leaf).__name__
    return Obstacle(
        f"it {verb} a {name}, which may hide tensors",
        remedy="switch it off while training: model(..., use_cache=False), or use_cache = False in all of its configs"
        if name.endswith("Cache")
        else f"return and take tensors, lists, tuples or dicts, or call torch.export.register_dataclass({name})",
    )


SHARED_IS_WRITTEN = Obstacle(
    "one of its results is written to in place, and another tensor has the same memory", remedy="write to a copy"
)
IS_COMPILED = Obstacle("one of its results comes to code that torch compiles", remedy="compile it before colocate")
