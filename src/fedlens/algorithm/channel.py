"""The channel: the steps between clients and server, in two halves (`slots.ChannelStep`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedlens.algorithm.slots import ChannelStep, Decoded, Encoded
from fedlens.config.consent import place_of
from fedlens.core import Cohort, Memory, Tree, keys
from fedlens.network.layout import Layout, Role

T = TypeVar("T")
CHANNEL = keys.purpose("channel")
PIECE = 2**16  # numbers
NUMBERS, OWN_MODEL = "numbers", "model"
"""Parts of a packed tensor: what is left of its numbers, or the client's own tensor."""


def first_memory(channel: Sequence[ChannelStep], params: Tree) -> Memory:
    """What a client that never took part remembers of all steps."""
    return {
        f"channel.{place}.{name}": tree
        for place, step in enumerate(channel)
        for name, tree in step.init(params).items()
    }


def begin(channel: Sequence[ChannelStep], params: Tree) -> Memory:
    """What the server remembers of all steps before the first round."""
    return {
        f"channel.{place}.{name}": tree
        for place, step in enumerate(channel)
        for name, tree in step.begin(params).items()
    }


def told_of(channel: Sequence[ChannelStep], memory: Mapping[str, Tree]) -> Memory:
    """The part of the server's memory that clients are told."""
    told = {f"channel.{place}.{name}" for place, step in enumerate(channel) for name in step.tells}
    return {name: tree for name, tree in memory.items() if name in told}


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
    notes: Memory = {}
    for place, step in enumerate(channel):
        prefix, own = f"channel.{place}.", _own(memory, place)
        drawn_by = client_keys if step.scales else keys.fold(client_keys, CHANNEL, place)
        encoded = _encoded(step, update, own, drawn_by, layout)
        update = encoded.update
        scalars |= encoded.scalars
        keep |= {f"{prefix}{name}": tree for name, tree in encoded.memory.items()}
        notes |= {f"{prefix}{name}": tree for name, tree in encoded.notes.items()}
    return Encoded(update, scalars, keep, notes)


def _own(memory: Mapping[str, T], place: int) -> dict[str, T]:
    prefix = f"channel.{place}."
    return {n.removeprefix(prefix): t for n, t in memory.items() if n.startswith(prefix)}


def decode(
    channel: Sequence[ChannelStep],
    update: Tree,
    memory: Memory,
    seed: int,
    round: int,
    cohort: Cohort,
) -> Decoded:
    """The server's halves, in reverse order, on the combined update."""
    scalars: dict[str, Tensor] = {}
    keep: Memory = {}
    for place, step in reversed(list(enumerate(channel))):
        key = keys.root(seed, CHANNEL, round, place)
        decoded = step.decode(update, key, cohort, _own(memory, place), round)
        if not isinstance(decoded, Decoded):
            raise ValueError(
                f"decode of {place_of(step)} gave {type(decoded).__name__}: let it return "
                "fedlens.algorithm.slots.Decoded(update, scalars)"
            )
        update = decoded.update
        scalars |= decoded.scalars
        keep |= {f"channel.{place}.{name}": tree for name, tree in decoded.memory.items()}
    return Decoded(update, scalars, keep)


def packed(
    channel: Sequence[ChannelStep],
    numbers: Tensor,
    role: Role,
    notes: Tree,
    start: Tensor | None = None,
) -> Tree:
    """What is sent of the numbers [n] of a client's tensor that went through the channel.

    `notes` are those of the steps on this tensor, as `encode` names them. `start` is the server's
    tensor: a plain difference from it is sent as the client's own float32, because a difference of
    float32 numbers may need float64.
    """
    if channel:
        *before, step = channel
        parts = step.pack(numbers, role, _own(notes, len(before)))
        if parts is None:
            return packed(before, numbers, role, notes, start)
        own = {f"{len(before)}.{name}": t for name, t in parts.items() if name != NUMBERS}
        return own | (packed(before, parts[NUMBERS], role, notes) if NUMBERS in parts else {})
    if (short := _short(numbers)) is not None:
        return {NUMBERS: short}
    if start is not None and (own_model := _short(numbers, start)) is not None:
        return {OWN_MODEL: own_model}
    return {NUMBERS: numbers}


def _short(numbers: Tensor, start: Tensor | None = None) -> Tensor | None:
    """What is exactly these numbers [n] more than `start`, in float32; None if nothing is.

    In pieces, for a tensor may be as large as the model.
    """
    found = torch.empty(numbers.shape, dtype=torch.float32)
    for place in range(0, len(numbers), PIECE):
        here = slice(place, place + PIECE)
        some, begin = numbers[here].double(), None if start is None else start[here].double()
        short = (some if begin is None else begin + some).float()
        if not torch.equal(short.double() if begin is None else short.double() - begin, some):
            return None
        found[here] = short
    return found


def unpacked(
    channel: Sequence[ChannelStep], parts: Tree, count: int, start: Tensor | None = None
) -> Tensor:
    """The `count` numbers that `packed` was given; a ValueError for what it cannot have made."""
    left = dict(parts)

    def of(steps: Sequence[ChannelStep], start: Tensor | None, count: int) -> Tensor:
        if steps:
            *before, step = steps
            prefix = f"{len(before)}."
            own = {n.removeprefix(prefix): left.pop(n) for n in parts if n.startswith(prefix)}
            if not own:
                return of(before, start, count)
            return step.unpack(own, count, partial(of, before, None))
        part = OWN_MODEL if start is not None and OWN_MODEL in left else NUMBERS
        sent = left.pop(part, None)
        if sent is None or sent.shape != (count,) or not sent.is_floating_point():
            raise ValueError(f"it lacks {count} numbers of a tensor")
        return sent.double() if part == NUMBERS or start is None else sent.double() - start.double()

    numbers = of(channel, start, count)
    if left:
        raise ValueError(f"a tensor has a part too many: {min(left)}")
    return numbers


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
