"""The way down in few bits: clients are sent the model as a packed difference to what they have.

All clients hold the same model, `held`, which follows the server's: what the steps of the way down
leave out of one difference is in the next. So these steps need no memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm.channel import encode, first_memory, packed, unpacked
from fedlens.algorithm.slots import ChannelStep
from fedlens.core import Tree, keys
from fedlens.core.trees import HostCopy, moved, stack, tensors_in
from fedlens.network.layout import Layout

DOWN = keys.purpose("download")
HELD, DIFFERENCE, HAVE = "held", "difference", "have"
"""What clients hold; by tensor, what was sent to those who had the model before; who has it now."""


def held(state: Mapping[str, Any], params: Tree) -> Tree:
    """The parameters that clients have, if they are not the server's."""
    found: Tree = state.get(HELD, params)
    return found


def sent_next(
    steps: Sequence[ChannelStep],
    state: Mapping[str, Any],
    before: Tree,
    params: Tree,
    clients: Tensor,
    layout: Layout,
    seed: int,
    round: int,
) -> dict[str, Any]:
    """The state after a round in which `params` followed on `before`, and these clients trained."""
    if not steps:
        return {}
    start = held(state, before)
    difference = {name: (p.double() - start[name].double())[None] for name, p in params.items()}
    key = keys.root(seed, DOWN, round)[None].to(next(iter(params.values())).device)
    encoded = encode(steps, difference, stack([first_memory(steps, params)]), key, layout)
    # Bits are packed, and unpacked, on the host.
    update, of_steps, begun = HostCopy((encoded.update, encoded.notes, start)).read()
    found: dict[str, Tree] = {}
    for name, tensor in update.items():
        notes = {kind: tree[name][0] for kind, tree in of_steps.items() if name in tree}
        found[name] = packed(steps, tensor.flatten(), layout.entries[name].role, notes)
    now = moved(followed(steps, begun, found), key.device)
    return {HELD: now, DIFFERENCE: found, HAVE: {"clients": clients}}


def followed(steps: Sequence[ChannelStep], start: Tree, difference: Mapping[str, Tree]) -> Tree:
    """What a client that has `start` makes of a packed difference; a ValueError for what is none.

    Its order is that of `start`.
    """
    if start.keys() != difference.keys():
        raise ValueError("a difference is of other tensors than the model has")
    numbers = {n: unpacked(steps, difference[n], t.numel()).view(t.shape) for n, t in start.items()}
    return {name: (t.double() + numbers[name].double()).to(t.dtype) for name, t in start.items()}


def bytes_saved(state: Mapping[str, Any], params: Tree, clients: Tensor) -> int:
    """By how much what these clients are sent is smaller than the model for each."""
    if HAVE not in state:
        return 0
    each = sum(4 * p.numel() for p in params.values())
    short = sum(t.nbytes for t in tensors_in(state[DIFFERENCE]))
    had = state[HAVE]["clients"].to(clients.device)
    return int(torch.isin(clients, had).sum()) * (each - short)
