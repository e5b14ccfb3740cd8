"""The forward pass of a module, traced symbolically as a graph of layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def trace(module: nn.Module) -> fx.Graph | None:
    """The forward pass as a graph of layers, or None if it cannot be traced."""
    try:
        return _Tracer().trace(module)
    except Exception:  # a user's forward pass may raise anything when it is traced
        return None


def only_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The chain of nodes behind this one, as long as each result has exactly one reader."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node
