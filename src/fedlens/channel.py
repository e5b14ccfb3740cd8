"""The channel: the steps between clients and server, in two halves (`slots.ChannelStep`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedlens import keys
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout
from fedlens.own_code import place_of
from fedlens.slots import ChannelStep, Encoded

CHANNEL = keys.purpose("channel")


def encode(
    channel: Sequence[ChannelStep], update: Tree, client_keys: Tensor, layout: Layout
) -> Encoded:
    """The clients' halves, in order: what is sent of the updates [C, ...] of C clients."""
    scalars: dict[str, Tensor] = {}
    for place, step in enumerate(channel):
        encoded = _encoded(step, update, keys.fold(client_keys, CHANNEL, place), layout)
        update = encoded.update
        scalars |= encoded.scalars
    return Encoded(update, scalars)


def decode(
    channel: Sequence[ChannelStep], update: Tree, seed: int, round: int, cohort: Cohort
) -> Tree:
    """The server's halves, in reverse order, on the combined update."""
    for place, step in reversed(list(enumerate(channel))):
        update = step.decode(update, keys.root(seed, CHANNEL, round, place), cohort)
    return update


def _encoded(step: ChannelStep, update: Tree, client_keys: Tensor, layout: Layout) -> Encoded:
    """One step, refused if it breaks the rules of `encode`: it may be the user's own."""
    versions = [tensor._version for tensor in update.values()]
    encoded = step.encode(update, client_keys, layout)
    if not isinstance(encoded, Encoded):
        raise ValueError(
            f"encode of {place_of(step)} gave {type(encoded).__name__}: let it return "
            "fedlens.slots.Encoded(update, scalars)"
        )
    if versions != [tensor._version for tensor in update.values()]:
        raise ValueError(
            f"encode of {place_of(step)} writes into the update that it is given, which is still "
            "needed: make new tensors, as u * 0.5 does, and not u.mul_(0.5)"
        )
    return encoded
