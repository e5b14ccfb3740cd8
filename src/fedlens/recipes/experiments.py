"""A table of a recipe's experiments, with the settings in which they differ."""

from __future__ import annotations

from pathlib import Path

from fedlens.config.experiment import Experiment, Named, as_plain, fields_by_key
from fedlens.recipes.recipe import Results
from fedlens.report.blocks import Table
from fedlens.report.groups import written
from fedlens.report.numbers import NONE
from fedlens.runs.records import Run

TOLD = (  # also where they are the defaults: papers often do not say them
    *("dataset", "normalise", "model", "rounds", "clients.count", "clients.per_round"),
    *("clients.partition", "local.epochs", "local.batch_size", "local.lr", "local.momentum"),
    *("local.weight_decay", "algorithm"),
)
UNTOLD = ("seed", "engine", "device", "precision", "weights", "weights_sha256")
"""Those of each run, and what the column `computed` says."""


def experiments(results: Results) -> Table:
    """One row per cell with the settings that differ, as run; shared settings are listed once."""
    rows = [{"experiment": name} | _settings(runs[0]) for name, runs in results.runs.items()]
    for row, runs in zip(rows, results.runs.values(), strict=True):
        row["computed"] = "; ".join(dict.fromkeys(map(_computed, runs)))
    keys = dict.fromkeys(key for row in rows for key in row)
    texts = {key: [row.get(key, NONE) for row in rows] for key in keys}
    apart = [key for key in keys if key == "experiment" or len({*texts[key]}) > 1]
    shared = [f"{key} {texts[key][0]}" for key in keys if key not in apart]
    alike = f" All have: {'; '.join(shared)}." if shared else ""
    return Table(
        title="The experiments",
        name="experiments",
        header=apart,
        rows=[*zip(*(texts[key] for key in apart), strict=True)],
        caption="What sets each experiment apart, by the keys of an experiment, and what it was "
        f"computed with. Its run folder has all of it: every setting, and every round.{alike}",
        folded=len(rows) > 12,
    )


def _settings(run: Run) -> dict[str, str]:
    """The settings of a run by key: those of `TOLD`, and others that are no defaults."""
    cell, weights = Experiment.of(run.experiment), run.manifest.get("weights")
    plain = Experiment("fashion-mnist-mini", "linear", rounds=1)
    sections = {key.rpartition(".")[0] for key in fields_by_key()}
    untold = {*sections, *UNTOLD, *_unused(cell)}
    found = {}
    for key in fields_by_key():
        if key in untold or key.startswith("evaluate."):
            continue
        value, usual = _value(cell, key), _value(plain, key)
        if value is not None and (key in TOLD or value != usual):
            found[key] = _said(value)
    if cell.clients.count is None and run.partition:
        found["clients.count"] = str(len(run.partition["sizes"]))
    return found | ({"weights": Path(weights["source"]).name} if weights else {})


def _unused(cell: Experiment) -> list[str]:
    """The settings of local training that an algorithm has its own rule for."""
    names = [one.name for one in cell.algorithm]
    by_gradient = [one for one in cell.algorithm if one.options.get("local") == "gradient"]
    if by_gradient or "celiadmm" in names:  # they step on all examples of a client
        return ["local.epochs", "local.batch_size"]
    return ["local.epochs"] if "fedvc" in names else []


def _value(cell: object, key: str) -> object:
    for name in key.split("."):
        cell = getattr(cell, name, None)
    return cell


def _said(value: object) -> str:
    """A setting in short: floats have four digits, and what has a name its options."""
    if isinstance(value, Named):
        options = [f"{k} {_said(v)}" for k, v in value.options.items() if v is not None]
        name = value.name.rpartition(":")[2]  # without the module of a function
        return f"{name} ({', '.join(options)})" if options else name
    if isinstance(value, tuple) and value:
        return " + ".join(map(_said, value))
    if isinstance(value, float):  # 1.0 clients a round are all of them, and 1 is one
        text = f"{value:.4g}"
        return f"{text}.0" if text.isdecimal() else text
    return written(as_plain(value))


def _computed(run: Run) -> str:
    """The precision and engine that were used, and the clients trained at once."""
    told = run.manifest
    at_once = told.get("at_once", 1)
    side_by_side = f", up to {at_once} clients at once" if at_once > 1 else ""
    return f"{told.get('precision', '?')}, {told.get('engine', '?')}{side_by_side}"
