"""Flower's simulation: Ray with two workers of one thread, FedAvg."""

from __future__ import annotations

import logging
import os
import sys

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Watch, arguments, data, members, model, num_clients, train

from fedlens.runs.bench import WORKLOADS

client_app, server_app = ClientApp(), ServerApp()
NAME = sys.argv[1]
WORKERS = 2


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    import torch

    torch.set_num_threads(1)
    work = WORKLOADS[NAME]
    images, labels = data(NAME)
    mine = members(work, int(context.node_config["partition-id"]))
    module = model(work)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(module, images[mine], labels[mine], work.batch)
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": mine.stop - mine.start}),
    }
    return Message(RecordDict(content), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    work, rounds = arguments()
    module, watch = model(work), Watch(NAME)

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        module.load_state_dict(arrays.to_torch_state_dict())
        if number:  # before the first round there is nothing to time
            watch.round_is_over(module)

    strategy = FedAvg(
        fraction_train=work.clients / num_clients(work),
        fraction_evaluate=0.0,
        min_train_nodes=work.clients,
        min_available_nodes=num_clients(work),
    )
    start = ArrayRecord(module.state_dict())
    strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds + 1, evaluate_fn=evaluate)
    watch.report("flwr", "ray", settings=f"{WORKERS} workers of one thread")


def main() -> None:
    work, _ = arguments()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = "1"
    run_simulation(
        server_app,
        client_app,
        num_supernodes=num_clients(work),
        backend_config={
            "init_args": {"num_cpus": WORKERS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
