"""``mosaic/_C.pyi`` and the extension have the same names, arguments and results."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mosaic
from mosaic import _C

STUB = Path(mosaic.__file__).with_name("_C.pyi")
# pybind11 accepts and prints wider types than a caller has to know.
WIDER = r"mosaic\._C\.|collections\.abc\.|typing\.Supports(?=Int)| \| typing\.SupportsIndex"


def arguments_of(node: ast.FunctionDef) -> str:
    """``(a: int, b: bool = False) -> None``, without self."""
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    text = re.sub(r"(?<=[\w\]])=", " = ", ast.unparse(node.args))
    return f"({text}) -> {ast.unparse(node.returns)}"


def stub() -> dict[str, str]:
    entries: dict[str, str] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            entries[node.name] = arguments_of(node)
        elif isinstance(node, ast.AnnAssign):
            entries[ast.unparse(node.target)] = ast.unparse(node.annotation)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    entries[f"{node.name}.{member.name}"] = arguments_of(member)
                elif isinstance(member, ast.AnnAssign):
                    entries[f"{node.name}.{ast.unparse(member.target)}"] = ast.unparse(member.annotation)
    return entries


def documented(text: str) -> str:
    signature = re.sub(WIDER, "", text.strip().splitlines()[0])
    signature = re.sub(r"\bInt\b", "int", signature)
    return "(" + re.sub(r"^self: \w+(, )?", "", signature.partition("(")[2])


def built() -> dict[str, str]:
    entries: dict[str, str] = {}
    for name, value in vars(_C).items():
        if name.startswith("_"):
            continue
        if not isinstance(value, type):
            entries[name] = "str" if isinstance(value, str) else documented(value.__doc__)
            continue
        for member_name, member in vars(value).items():
            own_init = member_name == "__init__" and "->" in (member.__doc__ or "")
            if isinstance(member, property):
                entries[f"{name}.{member_name}"] = documented(member.fget.__doc__).partition(" -> ")[2]
            elif own_init or not member_name.startswith("_"):
                entries[f"{name}.{member_name}"] = documented(member.__doc__)
    return entries


def test_the_stub_and_the_extension_have_the_same_names_arguments_and_results():
    assert stub() == built()
