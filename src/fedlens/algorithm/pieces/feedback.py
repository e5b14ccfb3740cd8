"""channel: error feedback. What a step does not send, the client adds to its next update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree
from fedlens.network.layout import Layout

ERROR = "error"


class Short(NamedTuple):
    """A tensor [C, ...] of C clients in its short form."""

    sent: Tensor  # [C, ...] as the server will read it, in float32 numbers
    notes: Mapping[str, Tensor] = {}  # [C, ...] each, for `pack`
    memory: Mapping[str, Tensor] = {}  # [C, ...] each, for the next round


class Feedback(ChannelStep, Protocol):
    """A step that sends a short form of u + e, and remembers e' = u + e - what it sent.

    What a client sent in all rounds, plus e, is the sum of its updates u. Buffers are left alone.
    """

    @property
    def feedback(self) -> bool:
        """Whether e is remembered; otherwise it is 0."""
        return True

    @abstractmethod
    def shortened(self, whole: Tensor, memory: Mapping[str, Tensor]) -> Short:
        """The short form of a tensor; `memory` is that of this tensor."""

    @property
    def remembers(self) -> bool:
        return self.feedback

    def init(self, params: Tree) -> Memory:
        if not self.feedback:
            return {}
        return {ERROR: {name: torch.zeros_like(p).double() for name, p in params.items()}}

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        sent, notes = dict(update), dict[str, Tree]()
        kept = {part: dict(tree) for part, tree in memory.items()}
        for name, u in update.items():
            if layout.entries[name].role == "buffer":
                continue
            own = {part: tree[name] for part, tree in memory.items() if name in tree}
            whole = u + own[ERROR] if ERROR in own else u
            short = self.shortened(whole, own)
            sent[name] = short.sent
            for part, tensor in short.notes.items():
                notes.setdefault(part, {})[name] = tensor
            left = {ERROR: whole - short.sent} if ERROR in own else {}
            for part, tensor in {**short.memory, **left}.items():
                kept[part][name] = tensor
        return Encoded(sent, memory=kept, notes=notes)
