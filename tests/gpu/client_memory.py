"""On a GPU: wherever the memory of clients is, a run ends with the same bytes.

    PYTHONPATH=src:. python tests/gpu/client_memory.py [DEVICE]

Plain Python with torch and numpy. Each algorithm trains with all that clients remember on the
GPU, with none of it there, and with that of some clients; the last run has some of it in files, and
is interrupted and resumed, too. If the models are not equal to the last bit, it ends with status 1.
DEVICE is `cuda` unless another is named (`cpu`).
"""

import contextlib
import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import fedlens as fl
from fedlens.core import Tree
from fedlens.rounds.client_memory import Room
from fedlens.runs.records import Record

ALGORITHMS = ("scaffold", "feddyn", "fedadmm")
RESUMED = "on both and in files, interrupted and resumed"  # needs safetensors
EACH = 2 * 4 * 1_663_370  # bytes that a client of FedADMM remembers, and two of the others
ROOM = {"on the GPU": 20 * EACH, "on the host": 0, "on both": 5 * EACH, RESUMED: 5 * EACH}


def experiment(name: str, device: str) -> fl.Experiment:
    return fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("mcmahan-cnn"),
        algorithm=(fl.Named(name),),
        rounds=8,
        device=device,
        engine="stacked",
        deterministic=True,
        clients=fl.Clients(count=20, per_round=5),
        local=fl.LocalTraining(epochs=1, batch_size=50, lr=0.05),
        evaluate=fl.Evaluate(every=8),
    )


def interrupt(record: Record) -> None:
    if record["round"] == 5:
        raise KeyboardInterrupt


def trained(one: fl.Experiment, folder: Path | None) -> Tree:
    """The model at the end; of a run that is interrupted and resumed, if it is given a folder."""
    if folder is None:
        return fl.run(one, progress=False).model
    with contextlib.suppress(KeyboardInterrupt):
        fl.run(one, folder, watch=interrupt, progress=False)
    return fl.resume(folder, progress=False).model


def main(device: str = "cuda") -> None:
    differ = []
    for name in ALGORITHMS:
        one, found = experiment(name, device), {}
        for place, room in ROOM.items():
            if place == RESUMED and not importlib.util.find_spec("safetensors"):
                continue
            on_gpu = room if device == "cuda" else None

            def there(own: Room, _: torch.device, on_gpu: int | None = on_gpu) -> Room:
                return replace(own, gpu=on_gpu)

            patched = mock.patch.object(Room, "on", there)
            on_host = mock.patch("fedlens.runs.loop.room_of_clients", return_value=5 * EACH)
            with tempfile.TemporaryDirectory() as out, patched, on_host:
                found[place] = trained(one, Path(out) / "run" if place == RESUMED else None)
        plain = found["on the GPU"]
        for place, model in found.items():
            if not all(torch.equal(t, model[key]) for key, t in plain.items()):
                differ.append(f"{name} {place}")
    print("differ: " + ", ".join(differ) if differ else "all equal")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main(*sys.argv[1:])
