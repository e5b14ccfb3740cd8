"""A whole run as a researcher would write it by hand, in one process with all threads."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from whole_work import asked, device, evaluate, images_and_labels, members, model


def main() -> None:
    images, labels, test_images, test_labels = images_and_labels()
    parts, server = members(len(labels)), model(images)
    for number in range(asked.rounds):
        chosen = torch.randperm(asked.clients)[: asked.cohort].tolist()
        total = {name: torch.zeros_like(p) for name, p in server.named_parameters()}
        for client in chosen:
            local, mine = copy.deepcopy(server).train(), parts[client]
            optimiser = torch.optim.SGD(local.parameters(), lr=asked.lr)
            for _ in range(asked.epochs):
                shuffled = mine[torch.randperm(len(mine), device=device)]
                for batch in shuffled.split(asked.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(local(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            for name, p in local.named_parameters():
                total[name] += p.detach() / asked.cohort
        with torch.no_grad():
            for name, p in server.named_parameters():
                p.copy_(total[name])
        print(number + 1, *evaluate(server, test_images, test_labels), flush=True)
    torch.save(server.state_dict(), asked.out)


if __name__ == "__main__":
    main()
