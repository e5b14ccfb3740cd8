"""Signatures and docstrings of Fedlens's own code, read from its source.

To import that code would import PyTorch, which takes seconds.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from inspect import Parameter, cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1]


class Foreign:
    """Stands for every class of another package: no experiment file can contain its values."""


class Read(NamedTuple):
    """A function as its source describes it."""

    doc: str  # of the function, or else of its module
    options: dict[str, Parameter]  # by the name that an experiment file uses


@cache
def read(module: str, name: str) -> Read:
    """The docstring and the options of a function.

    Options are the keyword-only parameters; of a paper, all parameters after the first.
    """
    tree = _tree(module)
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    listed, names = function.args, _Names(module)
    options = {}
    if any(isinstance(one, ast.Name) and one.id == "paper" for one in function.decorator_list):
        plain = listed.args[1:]
        without = [None] * (len(plain) - len(listed.defaults))
        pairs = [*zip(plain, [*without, *listed.defaults], strict=True)]
    else:
        pairs = [*zip(listed.kwonlyargs, listed.kw_defaults, strict=True)]
    for one, default in pairs:
        options[one.arg.rstrip("_")] = Parameter(
            one.arg,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is None else names.value(default),
            annotation=Parameter.empty if one.annotation is None else names.value(one.annotation),
        )
    return Read(ast.get_docstring(function) or ast.get_docstring(tree) or "", options)


@cache
def words_of(kind: type) -> Mapping[str, str]:
    """What the docstring below each field of a dataclass says, in one line."""
    tree = _tree(kind.__module__)
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    )
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            said = ast.literal_eval(text.value)
            found[ast.unparse(field.target)] = " ".join(cleandoc(said).split())
    return found


@cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


class _Names(dict[str, Any]):
    """The names of a module, each found when it is asked for."""

    def __init__(self, module: str) -> None:
        self.module = module

    def value(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)

    def __missing__(self, name: str) -> Any:
        self[name] = found = self._found(name)
        return found

    def _found(self, name: str) -> Any:
        for node in _statements(_tree(self.module)):
            match node:
                case ast.Assign(targets=[ast.Name(id=one)], value=value) if one == name:
                    return self.value(value)
                case ast.ClassDef(name=one) if one == name:
                    return Foreign
                case ast.ImportFrom(module=str(home), names=aliases):
                    for alias in aliases:
                        if name == (alias.asname or alias.name):
                            return _imported(home, alias.name)
                case ast.Import(names=aliases) if name in [one.name for one in aliases]:
                    return import_module(name)
        return getattr(builtins, name)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]  # `if TYPE_CHECKING`


def _imported(module: str, name: str) -> Any:
    """A name of our own or of Python's library, else `Foreign`."""
    root = module.partition(".")[0]
    if root == "fedlens" and not module.startswith("fedlens.config."):  # which needs no PyTorch
        return _Names(module)[name]
    if root == "fedlens" or root in sys.stdlib_module_names:
        return getattr(import_module(module), name)
    return Foreign
