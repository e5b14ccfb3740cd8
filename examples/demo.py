"""FedAvg, FedProx and FedAvgM on clients that have seen only two kinds of clothes each.

Run it with `make demo`: real images, no download, about a minute on two cores.
"""

from pathlib import Path
from typing import Any

import fedlens as fl
from fedlens.report import read_all, report, rows, table
from fedlens.runs import progress

FOLDER = Path("runs/demo")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.5}},
    "fedavgm": {"algorithm": {"name": "fedavgm", "momentum": 0.9}, "server": {"lr": 0.3}},
}


def experiment(**changes: Any) -> fl.Experiment:
    """50 clients of two classes each, five of them a round: strongly non-iid."""
    return fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("lenet5"),
        rounds=60,
        clients=fl.Clients(count=50, per_round=5, partition=fl.Named("classes", {"per_client": 2})),
        local=fl.LocalTraining(epochs=5, batch_size=20, lr=0.05),
        evaluate=fl.Evaluate(every=2),
        **changes,
    )


def main() -> None:
    folders = []
    for name, changes in ALGORITHMS.items():
        described = experiment(**changes)
        with progress.in_rounds(f"{name:<8}", described.rounds) as watch:
            fl.run(described, FOLDER / name, overwrite=True, watch=watch)
        folders.append(FOLDER / name)
    page = report(folders)
    print(table(*rows(read_all(folders))))
    print(f"\nOpen the report in a browser: {page.resolve()}")


if __name__ == "__main__":
    main()
