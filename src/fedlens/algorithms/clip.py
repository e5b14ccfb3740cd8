"""Norm clipping (McMahan et al., ICLR 2018, arXiv:1710.06963): a bound on what one client can do.

A client sends d / max(1, ||d|| / norm) in place of its update d, the norm being that of all
parameters together; buffers are left as they are. With a norm that no update reaches it is FedAvg,
byte for byte. The record has `clipped_share`, the share of the clients whose update was longer.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Number, Tree, squared_norm
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class Clip(ChannelStep):
    norm: Number

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        params = {n: u for n, u in update.items() if layout.entries[n].role != "buffer"}
        ratio = squared_norm(params).sqrt() / self.norm  # [C]
        clipped = {}
        for name, u in params.items():
            by = ratio.clamp(min=1).view(-1, *[1] * (u.ndim - 1))
            clipped[name] = torch.where(by > 1, (u / by).float().to(u), u)  # as it is sent
        return Encoded(update | clipped, {"clipped_share": (ratio > 1).double()})


@paper
def clip(base: Algorithm, norm: Number = 1.0) -> Algorithm:
    """Shorten each client's update to a norm, if it is longer.

    Args:
        norm: the longest an update may be.
    """
    at_least(norm, 1e-12, "clip: norm")
    return replace(base, channel=(*base.channel, Clip(norm)))
