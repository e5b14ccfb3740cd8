"""solve: a second model of each client, trained beside the one that it sends.

See `Personal.beside`. Both take steps by the same solver, each with a memory of its own.
"""

from collections.abc import Iterable

from fedlens.algorithm.slots import OWN, Solve
from fedlens.core import Local, Memory, Tree

_MINE = f"{OWN}."


def carries_of_both(inner: Solve) -> frozenset[str]:
    return inner.carries | {_MINE + name for name in inner.carries}


def init_both(inner: Solve, params: Tree) -> Memory:
    mine = {_MINE + name: tree for name, tree in inner.init(params).items()}
    return inner.init(params) | mine


def step_both(
    inner: Solve, grads: Tree, own_grads: Tree, memory: Memory, params: Tree, local: Local
) -> tuple[Tree, Memory]:
    """A step of each model, along gradients of its own; the second is in the memory, as OWN."""
    names = [name for name in memory if _MINE + name in memory]
    params, first = inner.update(grads, _some(memory, names), params, local)
    mine = {name: memory[OWN][name] for name in own_grads}
    moved, second = inner.update(
        own_grads, {name: memory[_MINE + name] for name in names}, mine, local
    )
    kept = {_MINE + name: tree for name, tree in second.items()}
    return params, memory | first | kept | {OWN: memory[OWN] | moved}


def _some(memory: Memory, names: Iterable[str]) -> Memory:
    return {name: memory[name] for name in names}
