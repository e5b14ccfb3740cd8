"""A training loop written by hand, in one process with all threads."""

from __future__ import annotations

import copy
import sys

import torch
from work import Watch, arguments, data, members, model, num_clients, train


def main() -> None:
    work, rounds = arguments()
    images, labels = data(sys.argv[1])
    server, watch = model(work), Watch(sys.argv[1])
    for _ in range(rounds + 1):
        total = {name: torch.zeros_like(p) for name, p in server.named_parameters()}
        for client in torch.randperm(num_clients(work))[: work.clients].tolist():
            local, mine = copy.deepcopy(server), members(work, client)
            train(local, images[mine], labels[mine], work.batch)
            for name, p in local.named_parameters():
                total[name] += p.detach() / work.clients
        with torch.no_grad():
            for name, p in server.named_parameters():
                p.copy_(total[name])
        watch.round_is_over(server)
    watch.report(settings=f"one process, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
