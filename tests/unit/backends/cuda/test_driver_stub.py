"""``mosaic/_C.pyi`` says of the extension what the extension says of itself."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import mosaic
from mosaic import _C

STUB = Path(mosaic.__file__).with_name("_C.pyi")

# pybind11 takes and prints wider types than a caller has to know.
SPELLINGS = [
    (r"mosaic\._C\.", ""),
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsInt", "int"),
    (r"collections\.abc\.", ""),
]


def _plain(text: str) -> str:
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text


def _stub_function(node: ast.FunctionDef) -> str:
    """``name(a: int, b: bool = False) -> None``, without self."""
    arguments = node.args.args[:]
    defaults = [""] * (len(arguments) - len(node.args.defaults))
    defaults += [f" = {ast.unparse(value)}" for value in node.args.defaults]
    shown = [
        f"{argument.arg}: {ast.unparse(argument.annotation)}{default}"
        for argument, default in zip(arguments, defaults, strict=True)
        if argument.arg != "self"
    ]
    if node.args.kwonlyargs:
        shown.append("*")
    shown += [
        f"{argument.arg}: {ast.unparse(argument.annotation)} = {ast.unparse(default)}"
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    return f"({', '.join(shown)}) -> {ast.unparse(node.returns)}"


def _stub() -> dict[str, str]:
    entries: dict[str, str] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            entries[node.name] = _stub_function(node)
        elif isinstance(node, ast.AnnAssign):
            entries[ast.unparse(node.target)] = ast.unparse(node.annotation)
        elif isinstance(node, ast.ClassDef):
            entries[node.name] = "class"
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    entries[f"{node.name}.{member.name}"] = _stub_function(member)
                elif isinstance(member, ast.AnnAssign):
                    entries[f"{node.name}.{ast.unparse(member.target)}"] = (
                        f"property -> {ast.unparse(member.annotation)}"
                    )
    return entries


def _built_function(documented: str) -> str:
    signature = _plain(documented.strip().splitlines()[0])
    arguments, result = re.fullmatch(r"\w*\((.*)\) -> (.*)", signature).groups()
    without_self = [part for part in re.split(r", (?=\w+:)", arguments) if part and not part.startswith("self:")]
    return f"({', '.join(without_self)}) -> {result}"


def _built_member(member: object) -> str:
    if isinstance(member, property):
        return "property -> " + _built_function(member.fget.__doc__).split(" -> ")[-1]
    return _built_function(inspect.getdoc(member))


def _built() -> dict[str, str]:
    entries: dict[str, str] = {}
    for name, value in vars(_C).items():
        if name.startswith("_"):
            continue
        if isinstance(value, str):
            entries[name] = "str"
            continue
        if not isinstance(value, type):
            entries[name] = _built_function(value.__doc__)
            continue
        entries[name] = "class"
        for member_name, member in vars(value).items():
            is_own_init = member_name == "__init__" and "->" in (member.__doc__ or "")
            if is_own_init or not member_name.startswith("_"):
                entries[f"{name}.{member_name}"] = _built_member(member)
    return entries


def test_the_stub_and_the_extension_have_the_same_names_arguments_and_results():
    assert _stub() == _built()
