"""``mosaic/_C.pyi`` has the names, arguments and defaults that the extension has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mosaic
from mosaic import _C


def arguments_of(signature: str) -> list[str]:
    """``["a", "b=False"]`` of ``f(self: C, a: int, *, b: bool = False) -> None``."""
    found = re.findall(r"[(,] ?(\w+): [^=]*?(?= = |, \w+:|, \*|\) ->)( = [^,)]+(?:\(\))?)?", signature)
    return [name + default.replace(" ", "") for name, default in found if name != "self"]


def stub() -> dict[str, list[str] | None]:
    entries: dict[str, list[str] | None] = {}
    for node in ast.parse(Path(mosaic.__file__).with_name("_C.pyi").read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.AnnAssign):
                entries[prefix + ast.unparse(member.target)] = None
            elif isinstance(member, ast.FunctionDef):
                is_property = any(ast.unparse(mark) == "property" for mark in member.decorator_list)
                signature = f"({ast.unparse(member.args)}) ->".replace("(self,", "(").replace("=", " = ")
                entries[prefix + member.name] = None if is_property else arguments_of(signature)
    return entries


def built() -> dict[str, list[str] | None]:
    entries: dict[str, list[str] | None] = {}
    for name, value in vars(_C).items():
        members = {f"{name}.{key}": member for key, member in vars(value).items()} if isinstance(value, type) else {}
        for path, member in (members or {name: value}).items():
            documented = (getattr(member, "__doc__", None) or "").strip().splitlines() or [""]
            is_function = "->" in documented[0] and not isinstance(member, property | str)
            if is_function or not path.split(".")[-1].startswith("_"):
                entries[path] = arguments_of(documented[0]) if is_function else None
    return entries


def test_the_stub_and_the_extension_have_the_same_names_arguments_and_defaults():
    assert stub() == built()
