"""The experiments of a recipe in a table: what sets each apart, as it was run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlens.experiment import Experiment, Named
from fedlens.recipes.recipe import Results
from fedlens.report.blocks import Table
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

_HEADER = (
    *("experiment", "data", "augmentation", "model", "start", "normalisation", "clients"),
    *("partition", "local", "algorithm", "rounds", "computed"),
)


def experiments(results: Results) -> Table:
    """Every cell in a line: what sets it apart, as it was run; what all share is said once."""
    rows = [_described(name, runs) for name, runs in results.runs.items()]
    columns = list(zip(*rows, strict=True))
    apart = [i for i, cells in enumerate(columns) if i == 0 or len(set(cells)) > 1]
    shared = [f"{_HEADER[i]} {cells[0]}" for i, cells in enumerate(columns) if i not in apart]
    alike = f" All have: {'; '.join(shared)}." if shared else ""
    return Table(
        title="The experiments",
        name="experiments",
        header=[_HEADER[i] for i in apart],
        rows=[[row[i] for i in apart] for row in rows],
        caption="What sets each experiment apart, and what it was computed with. Its run folder "
        f"has all of it: the settings in full, and every round.{alike}",
        folded=len(rows) > 12,
    )


NORMALISED = {"dataset": "", "imagenet": ", normalised as ImageNet", "none": ", not normalised"}


def _described(name: str, runs: Sequence[Run]) -> list[str]:
    cell = Experiment.of(runs[0].experiment)
    clients = cell.clients
    held = runs[0].partition
    count = len(held["sizes"]) if clients.count is None and held else clients.count
    outputs = f", {cell.outputs} outputs" if cell.outputs else ""
    layers = f", the last {cell.train_last} layers" if cell.train_last else ""
    return [
        name,
        f"{_named(cell.dataset)}{NORMALISED[cell.normalise]}",
        _augmentation(cell),
        f"{_named(cell.model)}{outputs}{layers}",
        _start(runs[0]),
        cell.norm,
        f"{NONE if count is None else f'{count:,}'}, {_cohort(clients.per_round)}",
        _named(clients.partition),
        _local(cell),
        " + ".join(map(_named, cell.algorithm)),
        f"{cell.rounds:,}",
        "; ".join(dict.fromkeys(_computed(run) for run in runs)),
    ]


def _augmentation(cell: Experiment) -> str:
    augment = cell.augment
    crop = f"crop {augment.crop}" if augment.crop else ""
    resized = f"resized crop from {augment.resized:g}" if augment.resized else ""
    return ", ".join(filter(None, (crop, resized, "flip" if augment.flip else ""))) or "none"


def _start(run: Run) -> str:
    """Where the model began."""
    weights = run.manifest.get("weights")
    return f"weights of {Path(weights['source']).name}" if weights else "from scratch"


def _local(cell: Experiment) -> str:
    """What a client does in a round, as its algorithm has it."""
    local = cell.local
    steps = f"{local.epochs} epoch{'' if local.epochs == 1 else 's'} of {local.batch_size}"
    lr = f"lr {_number(local.lr)}"
    for one in cell.algorithm:
        if one.name == "celiadmm" or (one.name, one.options.get("local")) == ("liadmm", "gradient"):
            count = one.options.get("k0", 1)
            steps = f"{count} full-batch step{'' if count == 1 else 's'}"
            lr = f"γ {_number(one.options['gamma'] or local.lr)}"
        elif one.name == "fedvc":
            steps = f"{one.options['size']} examples in batches of {local.batch_size}"
    momentum = f"momentum {_number(local.momentum)}" if local.momentum else ""
    decay = f"weight decay {_number(local.weight_decay)}" if local.weight_decay else ""
    loss = "" if cell.loss.name == "cross_entropy" else cell.loss.name.replace("_", " ")
    return ", ".join(filter(None, (steps, lr, momentum, decay, loss)))


def _number(given: float | Named) -> str:
    return given.name if isinstance(given, Named) else f"{given:g}"


def _computed(run: Run) -> str:
    """What the engine really used."""
    told = run.manifest
    at_once = told.get("at_once", 1)
    side_by_side = f", up to {at_once} clients at once" if at_once > 1 else ""
    return f"{told.get('precision', '?')}, {told.get('engine', '?')}{side_by_side}"


def _cohort(per_round: int | float) -> str:
    if isinstance(per_round, int):
        return f"{per_round} a round"
    return "all in each" if per_round == 1 else f"{per_round:.0%} a round"


def _named(thing: object) -> str:
    if not isinstance(thing, Named):
        return type(thing).__name__
    own = thing.name.rpartition(":")[2]  # a function is named by its module, too
    options = ", ".join(f"{k} {v}" for k, v in thing.options.items() if v is not None)
    return f"{own} ({options})" if options else own
