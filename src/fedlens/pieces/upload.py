"""upload: what a client sends, and what it keeps."""

from fedlens.core import Local, Upload


def difference(local: Local) -> Upload:
    """Local minus server, for parameters and float buffers.

    Taken in float64, as is all that the server does with it: then server + (local - server) is
    local to the last bit, and a sum does not depend on the order of the clients.
    """
    update = {name: p.double() - local.anchor[name] for name, p in local.params.items()}
    for name, b in local.buffers.items():
        if b.is_floating_point():
            update[name] = b.double() - local.anchor_buffers[name]
    return Upload(update, keep={})
