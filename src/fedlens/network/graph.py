"""The forward pass of a module, read symbolically: its layers, and who reads whose result."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def trace(module: nn.Module) -> fx.Graph | None:
    """The forward pass as a graph of layers, or None if it cannot be read."""
    try:
        return _Tracer().trace(module)
    except Exception:  # whatever a user's forward pass does when it is read symbolically
        return None


def only_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The node that alone reads this one's result, the one that alone reads that, and so on."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node
