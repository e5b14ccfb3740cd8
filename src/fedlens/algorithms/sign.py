"""Signs with error feedback, EF-signSGD (Karimireddy et al., ICML 2019, arXiv:1901.09847).

Of each tensor u of an update, with the error e that the client remembers, it sends

    p = u + e,   sent = (||p||_1 / n) sign(p),   e' = p - sent       (algorithm 1; n entries)

a bit an entry and 32 bits for the scale, and ||e'||^2 = (1 - ||p||_1^2 / (n ||p||^2)) ||p||^2. A
tensor whose entries have one magnitude is sent exactly. Without feedback e is 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces.feedback import Feedback, Short
from fedlens.core import Tree, per_row
from fedlens.core.bits import SCALE_BITS, from_bits, scale_and_codes, to_bits
from fedlens.network.layout import Role


@dataclass(frozen=True)
class Sign(Feedback):
    feedback: bool = True

    def shortened(self, whole: Tensor, memory: Mapping[str, Tensor]) -> Short:
        scale = whole.flatten(1).abs().mean(1).float()  # [C]
        sent = per_row(scale.to(whole), whole)
        return Short(torch.where(whole >= 0, sent, -sent), {"scale": scale})

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        return bits if role == "buffer" else shape.numel() + SCALE_BITS

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        if role == "buffer" or not bool((numbers.abs() == notes["scale"]).all()):
            return None  # another step has changed them
        return {"scale": notes["scale"], "codes": to_bits(numbers >= 0, 1)}

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        scale, codes = scale_and_codes(parts)
        return torch.where(from_bits(codes, count, 1) > 0, scale, -scale).double()


@paper
def sign(base: Algorithm, feedback: bool = True) -> Algorithm:
    """Send the signs of each client's update, and what they leave out later.

    Args:
        feedback: whether a client remembers what it did not send.
    """
    return replace(base, channel=(*base.channel, Sign(feedback)))
