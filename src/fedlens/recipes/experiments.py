"""A table of a recipe's experiments, with the settings in which they differ."""

from __future__ import annotations

from pathlib import Path

from fedlens.config.experiment import Constants, Experiment, Named
from fedlens.config.names import MODELS
from fedlens.data.augment import Augment
from fedlens.recipes.recipe import Results
from fedlens.report.blocks import Table
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

NO_DECAY = "no weight decay"
ENDS = {"start": "from", "end": "to"}  # values of a schedule
NORMALISED = {
    "dataset": "images normalised by the data set",
    "imagenet": "images normalised as ImageNet's",
    "none": "images not normalised",
}


def experiments(results: Results) -> Table:
    """One row per cell with the settings that differ, as run; shared settings are listed once."""
    rows = [{"experiment": name} | _described(runs[0]) for name, runs in results.runs.items()]
    for row, runs in zip(rows, results.runs.values(), strict=True):
        row["computed"] = "; ".join(dict.fromkeys(map(_computed, runs)))
    first = rows[0]
    apart = [c for c in first if c == "experiment" or any(row[c] != first[c] for row in rows)]
    shared = [f"{c} {first[c]}" for c in first if c not in apart and first[c] != NONE]
    alike = f" All have: {'; '.join(shared)}." if shared else ""
    return Table(
        title="The experiments",
        name="experiments",
        header=apart,
        rows=[[row[c] for c in apart] for row in rows],
        caption="What sets each experiment apart, and what it was computed with. Its run folder "
        f"has all of it: the settings in full, and every round.{alike}",
        folded=len(rows) > 12,
    )


def _described(run: Run) -> dict[str, str]:
    cell, weights = Experiment.of(run.experiment), run.manifest.get("weights")
    clients, held = cell.clients, run.partition
    count = len(held["sizes"]) if clients.count is None and held else clients.count
    outputs = f", {cell.outputs} outputs" if cell.outputs else ""
    layers = f", the last {cell.train_last} layers" if cell.train_last else ""
    return {
        "data": f"{_named(cell.dataset)}, {_normalised(cell)}",
        "augmentation": _augmentation(cell),
        "model": f"{_named(cell.model)}{outputs}{layers}",
        "start": f"weights of {Path(weights['source']).name}" if weights else "from scratch",
        "normalisation": _normalisation(cell),
        "clients": f"{NONE if count is None else f'{count:,}'}, {_cohort(clients.per_round)}",
        "partition": _named(clients.partition),
        "local": _local(cell),
        "algorithm": " + ".join(map(_named, cell.algorithm)),
        "rounds": f"{cell.rounds:,}",
    }


def _normalised(cell: Experiment) -> str:
    given = cell.normalise
    if isinstance(given, Constants):
        return f"images normalised by a mean of {given.mean} and a deviation of {given.deviation}"
    return NORMALISED[given]


def _augmentation(cell: Experiment) -> str:
    """The augmentations of training images, in the order of their application."""
    augment = cell.augment
    shape = f", shape up to {augment.aspect:.3g}" if augment.aspect != Augment.aspect else ""
    done = {
        f"resized crop from {augment.resized:g}{shape}": augment.resized,
        f"crop {augment.crop}": augment.crop,
        "flip": augment.flip,
        f"rotation up to {augment.rotate:g}°": augment.rotate,
        f"brightness {augment.brightness:g}": augment.brightness,
        f"contrast {augment.contrast:g}": augment.contrast,
        f"saturation {augment.saturation:g}": augment.saturation,
        f"RandAugment {augment.rand_augment} of {augment.magnitude:g}": augment.rand_augment,
        f"cutout {augment.cutout}": augment.cutout,
        f"mixup {augment.mixup:g}": augment.mixup,
    }
    return ", ".join(words for words, amount in done.items() if amount) or "none"


def _normalisation(cell: Experiment) -> str:
    """The treatment of normalisation layers, if the model has any.

    Our models have them if they have an option `norm`. Models of users may have them.
    """
    model = cell.model
    if not isinstance(model, Named) or model.name not in list(MODELS):
        return cell.norm
    return cell.norm if "norm" in model.options else NONE


def _local(cell: Experiment) -> str:
    """The local training of a client in a round, according to its algorithm."""
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
    # Weight decay is always listed: papers often do not say whether they use it.
    decay = f"weight decay {_number(local.weight_decay)}" if local.weight_decay else NO_DECAY
    loss = "" if cell.loss.name == "cross_entropy" else cell.loss.name.replace("_", " ")
    return ", ".join(filter(None, (steps, lr, momentum, decay, loss)))


def _number(given: object) -> str:
    """A number, or its schedule, as in "cosine from 0.1 to 0"."""
    if not isinstance(given, Named):
        return _rounded(given)
    options = {key: value for key, value in given.options.items() if value is not None}
    ends = [f"{word} {_rounded(options.pop(key))}" for key, word in ENDS.items() if key in options]
    more = ", ".join(f"{key} {_number(value)}" for key, value in options.items())
    return " ".join([_own_name(given), *ends, *([f"({more})"] if more else [])])


def _rounded(value: object) -> str:
    """A float with four digits; anything else unchanged."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _computed(run: Run) -> str:
    """The precision and engine that were used, and the clients trained at once."""
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
    own = _own_name(thing)
    options = ", ".join(f"{k} {_rounded(v)}" for k, v in thing.options.items() if v is not None)
    return f"{own} ({options})" if options else own


def _own_name(thing: Named) -> str:
    return thing.name.rpartition(":")[2]  # without the module of a function
