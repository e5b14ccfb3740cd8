"""The process of a site that answers orders: each in a fork, so that nothing stays in memory.

It knows nothing of Flower. The node (`node.py`) gives it orders through a socket, and reads the
answers there. If a fork dies, this process ends, and the node starts another.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from fedlens.fleet import payload
from fedlens.fleet.flower import end_with
from fedlens.fleet.site import Site


def answer(link: Connection, site: Site) -> None:
    """Answer one order: with facts and tensors, or with what was raised."""
    (what, facts), content = link.recv(), link.recv_bytes()
    order = payload.read(facts, content)
    del content  # the memory of a site is for training
    try:
        reply = site.answer(what, order.facts, order.tensors)
    except Exception as error:
        traceback.print_exc()
        link.send(f"{type(error)}:<'{error}'>")
        return
    del order
    said, sent = payload.written(reply.facts, reply.tensors)
    del reply
    link.send((said,))
    link.send_bytes(sent)


def _in_fork(link: Connection, site: Site) -> NoReturn:
    end_with(os.getppid())
    status = 1
    try:
        answer(link, site)
        status = 0
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def site_of(home: str, data: str, device: str, cache: str) -> Site:
    return Site(Path(home), Path(data), torch.device(device), keeps_decoded=cache == "true")


def main(handle: str, *words: str) -> None:
    end_with(os.getppid())
    site = site_of(*words)
    with Connection(int(handle)) as link:
        while link.poll(None):  # it is read by the fork, so that this process does not grow
            if os.fork() == 0:
                _in_fork(link, site)
            if os.wait()[1]:
                sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
