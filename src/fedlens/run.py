"""A run: rounds, evaluation, record, checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fedlens
from fedlens.budgets import rounds_to
from fedlens.build import Setup, build
from fedlens.core import Tree
from fedlens.data import statistics
from fedlens.evaluate import evaluate, evaluate_clients
from fedlens.experiment import Experiment, Named
from fedlens.folder import RunFolder, check_free, readable_json, to_json
from fedlens.metrics import metrics, spread
from fedlens.options import importable
from fedlens.rounds import State, begin, run_round

if TYPE_CHECKING:
    from fedlens.twin import Twin

Record = dict[str, Any]
"""One line of rounds.jsonl: what a round did and, if it was evaluated, how good the model is."""

Watch = Callable[[Record], None]

CHECKPOINT_SECONDS = 10.0  # at the most this much work is done twice after a sudden death
OF_TRAINING = {"round", "seconds", "train_loss", "batches", "examples", "bytes_up", "bytes_down"}
SHARES = (80, 90, 95, 99)  # percent of the twin's accuracy, for which rounds are counted


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    status: str  # finished or diverged
    records: list[Record]
    summary: dict[str, Any]
    model: Tree  # parameters and buffers, as module.load_state_dict takes them
    folder: Path | None

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation, by name: test_accuracy, test_loss, ..."""
        final: dict[str, float] = self.summary["final"]
        return final


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment, and write its folder if `out` names one.

    `data` is where named data sets are looked for first; `watch` is called with each record and,
    before, with each pass of the centralised twin, if one is trained (see `fedlens.twin.trained`).
    """
    if out is not None:
        check_free(Path(out), overwrite)
    setup = build(experiment, Path(data) if data is not None else None)
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    folder = None
    if out is not None:
        files = {
            "experiment.toml": experiment.toml(),
            "manifest.json": readable_json(_manifest(setup)),
            "partition.json": readable_json(_partition(setup)),
        }
        folder = RunFolder.create(Path(out), overwrite, files)
    return _go_on(setup, folder, state, [], watch, twin)


def resume(
    path: str | Path,
    *,
    data: str | Path | None = None,
    watch: Watch | None = None,
    experiment: Experiment | None = None,
) -> Result:
    """Go on where a run stopped, to the result it would have had.

    `experiment` is needed only if the run's data or model were given from Python.
    """
    folder = RunFolder(Path(path))
    manifest = folder.read_json("manifest.json")
    with importable(*map(Path, manifest["code"])):
        experiment = experiment or Experiment.read(folder.path / "experiment.toml")
    experiment = replace(experiment, engine=manifest["engine"])
    setup = build(experiment, Path(data) if data is not None else None)
    if _partition_hash(setup) != manifest["partition"]:
        raise ValueError(f"{path}: the data are not those it started with: find the old ones")
    if setup.weights and setup.weights.sha256 != manifest["weights"]["sha256"]:
        raise ValueError(f"{path}: {setup.weights.source} has changed: find the old file")
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    if folder.last_saved is not None:
        saved = folder.load_state(setup.device)
        if _shapes(saved) != _shapes(state):
            raise ValueError(f"{path} was run with another model: put the old one back")
        state = saved
    return _go_on(setup, folder, state, folder.cut_records(state.round), watch, twin)


def train(setup: Setup, watch: Watch | None = None) -> Result:
    """Run what is set up, without a folder and without a twin."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    return _go_on(setup, None, state, [], watch, None)


def judged(experiment: Experiment) -> str:
    """The part by which a run is compared with others: test, else validation, else train."""
    return next(part for part in ("test", "validation", "train") if part in experiment.evaluate.on)


def _twin(setup: Setup, watch: Watch | None) -> Twin | None:
    if not setup.experiment.evaluate.twin:
        return None
    from fedlens.twin import trained  # which is itself a run

    return trained(setup, watch)


def _go_on(
    setup: Setup,
    folder: RunFolder | None,
    state: State,
    records: list[Record],
    watch: Watch | None,
    twin: Twin | None,
) -> Result:
    started = saved = time.perf_counter()
    experiment = setup.experiment
    status = "running" if _is_finite(state) and not _is_lost(records) else "diverged"
    evaluating, earlier = 0.0, sum(record["seconds"] for record in records)

    def settle(status: str) -> dict[str, Any]:
        elapsed = earlier + time.perf_counter() - started
        summary = _summary(setup, status, records, elapsed, evaluating, twin)
        if folder is not None:
            folder.write_json("summary.json", summary)
        return summary

    try:
        settle(status)
        with torch_settings(experiment, setup.device):
            while state.round < experiment.rounds and status == "running":
                start = time.perf_counter()
                after, outcome = run_round(
                    setup.program, setup.federation, setup.engine, state, experiment.seed
                )
                record: Record = {
                    "round": after.round,
                    "train_loss": float(outcome.train_loss),
                    "batches": outcome.batches,
                    "examples": outcome.examples,
                    "bytes_up": outcome.bytes_up,
                    "bytes_down": outcome.bytes_down,
                    **{name: float(value) for name, value in outcome.scalars.items()},
                }
                trained = time.perf_counter()
                record["seconds"] = trained - start
                if not _is_finite(after) or _is_lost([record]):
                    status = "diverged"
                elif (
                    after.round % experiment.evaluate.every == 0 or after.round == experiment.rounds
                ):
                    record |= _evaluate(setup, after, twin, folder)
                    evaluating += time.perf_counter() - trained
                if folder is not None:
                    folder.append(record)
                records.append(record)
                state = after
                if watch is not None:
                    watch(record)
                if folder is not None and time.perf_counter() - saved > CHECKPOINT_SECONDS:
                    folder.save_state(state)
                    saved = time.perf_counter()
        status = "finished" if status == "running" else status
        model = state.params | state.buffers | setup.network.frozen
        if folder is not None:
            folder.save_state(state)
            folder.save_model(model)
        summary = settle(status)
    except BaseException as error:
        # A state is a value: whatever was under way, the last whole round is there to be kept.
        if folder is not None:
            folder.save_state(state)
            del records[state.round :]
        settle("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    finally:
        setup.engine.close()
    return Result(status, records, summary, model, folder.path if folder else None)


def _evaluate(
    setup: Setup, state: State, twin: Twin | None, folder: RunFolder | None
) -> dict[str, float]:
    """How good the model is; the details of its last round go to the folder."""
    found: dict[str, float] = {}
    details: dict[str, Any] = {"part": judged(setup.experiment)} if setup.parts else {}
    last = folder is not None and state.round == setup.experiment.rounds
    loss = setup.program.algorithm.objective.loss
    for name, part in setup.parts.items():
        tally = evaluate(setup.network, state, part, setup.dataset.num_classes, loss)
        measured = metrics(tally)
        if name == "train":  # `train_loss` is the loss of local training
            measured["set_loss"] = measured.pop("loss")
        found |= {f"{name}_{key}": value for key, value in measured.items()}
        if last and name == details["part"]:
            details["confusion"] = tally.confusion.tolist()
    if twin is not None:
        own = found[f"{judged(setup.experiment)}_accuracy"]
        found["relative_accuracy"] = own / twin.accuracy if twin.accuracy else math.nan
    if setup.held_out is not None:
        examples = setup.federation.examples
        by_client = evaluate_clients(setup.network, state, examples, setup.held_out)
        found |= {f"client_accuracy_{key}": value for key, value in spread(by_client).items()}
        details["client_accuracy"] = by_client.tolist()
    if last and folder is not None and details:
        folder.write("evaluation.json", to_json(details) + "\n")
    return found


def _is_lost(records: list[Record]) -> bool:
    """Whether the last training loss is no number any more (None, once it was written)."""
    return bool(records) and not _is_number(records[-1]["train_loss"])


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _is_finite(state: State) -> bool:
    sums = [p.sum() for p in (*state.params.values(), *state.buffers.values())]
    return bool(torch.stack([s.double() for s in sums]).isfinite().all())


def _summary(
    setup: Setup,
    status: str,
    records: list[Record],
    elapsed: float,
    evaluating: float,
    twin: Twin | None,
) -> dict[str, Any]:
    evaluated = [record for record in records if any("_accuracy" in key for key in record)]
    measures = [key for key in (evaluated[-1] if evaluated else {}) if key not in OF_TRAINING]
    best: dict[str, Any] = {}
    for key in measures:
        better = min if key.endswith(("loss", "std")) else max
        sound = [record for record in evaluated if _is_number(record.get(key))]
        if sound:
            record = better(sound, key=lambda r: r[key])
            best[key] = {"value": record[key], "round": record["round"]}
    training = sum(record["seconds"] for record in records)
    against: dict[str, Any] = {}
    if twin is not None:
        reached = {str(s): rounds_to(records, s / 100, "relative_accuracy") for s in SHARES}
        against = {"twin": twin._asdict(), "rounds_to": reached}
    return {
        "status": status,
        "rounds": len(records),
        "collapsed": bool(evaluated) and _is_constant(evaluated[-1]),
        "final": {key: evaluated[-1][key] for key in measures}
        | ({"train_loss": records[-1]["train_loss"]} if records else {}),
        "best": best,
        **against,
        "emd": statistics.emd(_label_counts(setup)),
        "seconds": {"training": training, "evaluation": evaluating, "total": elapsed},
        "batches": sum(record["batches"] for record in records),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "peak_memory_bytes": peak_memory(setup.device),
    }


def _is_constant(record: Record) -> bool:
    """Whether the model gave one and the same class to everything it was evaluated on."""
    return any(record.get(f"{part}_classes_predicted") == 1 for part in ("test", "validation"))


def _label_counts(setup: Setup) -> torch.Tensor:
    return setup.federation.label_counts(setup.federation.everyone(0))


def _partition(setup: Setup) -> dict[str, Any]:
    held = setup.federation.everyone(0)
    return statistics.summary(held, setup.federation.labels, setup.dataset.num_classes)


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (state.params | state.buffers).items()}


def _partition_hash(setup: Setup) -> str:
    return setup.federation.everyone(0).digest()


def _manifest(setup: Setup) -> dict[str, Any]:
    on_gpu = setup.device.type == "cuda"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "fedlens": fedlens.__version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(setup.device) if on_gpu else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "engine": type(setup.engine).__name__.lower(),
        "at_once": getattr(setup.engine, "at_once", 1),
        "seed": setup.experiment.seed,
        "partition": _partition_hash(setup),
        "parameters": setup.network.num_parameters,
        "weights": setup.weights._asdict() if setup.weights else None,
        "classes": list(setup.dataset.classes),
        "code": _own_code(setup.experiment),
    }


def _own_code(experiment: Experiment) -> list[str]:
    """The folders of the functions named by import path: a resumed run finds them there again."""
    clients = experiment.clients
    chosen = [experiment.dataset, experiment.model, clients.partition, *experiment.algorithm]
    names = [one.name for one in chosen if isinstance(one, Named)]
    names += [experiment.loss, str(clients.partition.options.get("of", ""))]
    names = [name for name in names if ":" in name and name.partition(":")[0] in sys.modules]
    folders = set()
    for name in names:
        module = sys.modules[name.partition(":")[0].partition(".")[0]]
        if module.__file__ is not None:
            home = Path(module.__file__).resolve()
            folders.add(str(home.parents[1 if home.name == "__init__.py" else 0]))
    return sorted(folders)


def _revision() -> str | None:
    """The commit that runs, where Fedlens is run from a checkout of its own."""
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def torch_settings(experiment: Experiment, device: torch.device) -> Iterator[None]:
    """What an experiment asks of torch as a whole, put back afterwards."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32, threads = experiment.precision == "tf32", torch.get_num_threads()
    try:
        if device.type == "cuda":  # beside a GPU there are only small things left for the CPU,
            torch.set_num_threads(1)  # and waking threads for them costs more than they do
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        if experiment.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions
        if experiment.deterministic:  # asking costs a second: torch imports its compiler
            torch.use_deterministic_algorithms(deterministic)
