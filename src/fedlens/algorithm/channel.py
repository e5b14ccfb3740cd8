"""The channel: the steps between clients and server, in two halves (`slots.ChannelStep`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedlens.algorithm.slots import ChannelStep, Decoded, Encoded
from fedlens.config.own_code import place_of
from fedlens.core import Cohort, Memory, Tree, keys
from fedlens.network.layout import Layout

CHANNEL = keys.purpose("channel")


def first_memory(channel: Sequence[ChannelStep], params: Tree) -> Memory:
    """What a client that never took part remembers of all steps."""
    return {
        f"channel.{place}.{name}": tree
        for place, step in enumerate(channel)
        for name, tree in step.init(params).items()
    }


def encode(
    channel: Sequence[ChannelStep],
    update: Tree,
    memory: Memory,
    client_keys: Tensor,
    layout: Layout,
) -> Encoded:
    """The clients' halves, in order: what is sent of the updates [C, ...] of C clients."""
    scalars: dict[str, Tensor] = {}
    keep: Memory = {}
    for place, step in enumerate(channel):
        prefix = f"channel.{place}."
        own = {n.removeprefix(prefix): t for n, t in memory.items() if n.startswith(prefix)}
        encoded = _encoded(step, update, own, keys.fold(client_keys, CHANNEL, place), layout)
        update = encoded.update
        scalars |= encoded.scalars
        keep |= {f"{prefix}{name}": tree for name, tree in encoded.memory.items()}
    return Encoded(update, scalars, keep)


def decode(
    channel: Sequence[ChannelStep], update: Tree, seed: int, round: int, cohort: Cohort
) -> Decoded:
    """The server's halves, in reverse order, on the combined update."""
    scalars: dict[str, Tensor] = {}
    for place, step in reversed(list(enumerate(channel))):
        decoded = step.decode(update, keys.root(seed, CHANNEL, round, place), cohort)
        if not isinstance(decoded, Decoded):
            raise ValueError(
                f"decode of {place_of(step)} gave {type(decoded).__name__}: let it return "
                "fedlens.algorithm.slots.Decoded(update, scalars)"
            )
        update = decoded.update
        scalars |= decoded.scalars
    return Decoded(update, scalars)


def _encoded(
    step: ChannelStep, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout
) -> Encoded:
    """One step, refused if it breaks the rules of `encode`: it may be the user's own."""
    versions = [tensor._version for tensor in update.values()]
    encoded = step.encode(update, memory, client_keys, layout)
    if not isinstance(encoded, Encoded):
        raise ValueError(
            f"encode of {place_of(step)} gave {type(encoded).__name__}: let it return "
            "fedlens.algorithm.slots.Encoded(update, scalars)"
        )
    if versions != [tensor._version for tensor in update.values()]:
        raise ValueError(
            f"encode of {place_of(step)} writes into the update that it is given, which is still "
            "needed: make new tensors, as u * 0.5 does, and not u.mul_(0.5)"
        )
    return encoded
