"""upload: what a client sends, and what it keeps."""

from dataclasses import dataclass, replace

import torch

from fedlens.algorithm.slots import Uploading
from fedlens.core import Local, Upload


@dataclass(frozen=True)
class Keeping:
    """`upload`, from clients that keep what their solver has by this name."""

    upload: Uploading
    name: str

    def __call__(self, local: Local) -> Upload:
        sent = self.upload(local)
        return replace(sent, keep={**sent.keep, self.name: local.solver[self.name]})


def difference(local: Local) -> Upload:
    """Local minus server, for parameters and float buffers.

    Computed in float64, like all that the server does with it: then server + (local - server) is
    local to the last bit, and a sum hardly depends on the order of the clients.
    """
    model = local.params | local.buffers
    plain = torch.contiguous_format  # an engine may choose another layout for parameters
    update = {
        name: model[name].to(torch.float64, copy=True, memory_format=plain).sub_(server)
        for name, server in local.exact.items()
    }
    return Upload(update)


def own_model(local: Local) -> Upload:
    """The client's model itself, where `difference` is computed by whoever receives it."""
    model = local.params | local.buffers
    return Upload({name: model[name] for name in local.exact})
