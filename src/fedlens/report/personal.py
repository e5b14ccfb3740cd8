"""Models of clients' own beside FedAvg's, and beside those that clients train alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.report.blocks import Block, Curves, Line, Table
from fedlens.report.groups import Group
from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import Run, is_number

Array = NDArray[Any]

COMPARED = {
    "federated": "",
    "fedavg": "FedAvg, one model",
    "fedavg_fine_tuned": "FedAvg, fine-tuned",
    "local_only": "each client alone",
    "centralised": "all data in one place",
    "elsewhere": "own models on the others' images",
}
HEADER = ["model", "mean", "by images", "worst tenth", "std", "better than alone", "gain", "p"]


def personal_rows(run: Run) -> list[list[str]]:
    """A row for each kind of model; empty if there is nothing that clients' own compare with.

    `by images` is the mean in which every test image counts the same; the gain is that of the
    clients' own models, with its 95% interval over clients, and p is corrected (Holm).
    """
    known = {name: shares(run, name) for name in COMPARED}
    if len(known["fedavg"]) == 0 or len(known["federated"]) != len(known["fedavg"]):
        return []
    count, new = len(known["fedavg"]), shares(run, "unseen") == 1
    known = {name: found for name, found in known.items() if len(found) == count}
    if len(new) != count:
        return [*_rows(run, known, np.ones(count, bool), "")]
    return [*_rows(run, known, ~new, ""), *_rows(run, known, new, ", new clients")]


def _rows(run: Run, known: dict[str, Array], which: Array, of: str) -> Iterator[list[str]]:
    """The rows of some of the clients."""
    tested = shares(run, "client_tested")
    alone, against = known.get("local_only"), run.summary.get("against")
    for name, found in known.items():
        sound = np.isfinite(found) & which
        worst = np.sort(found[sound])[: max(int(sound.sum()) // 10, 1)]
        weights = tested[sound] if len(tested) == len(found) and tested[sound].any() else None
        better = NONE
        if name not in ("local_only", "elsewhere") and alone is not None:
            both = sound & np.isfinite(alone)
            better = f"{int((found > alone)[both].sum())} of {int(both.sum())}"
        about = against.get(name) if isinstance(against, dict) and not of else None
        if not sound.any():
            continue
        numbers = (
            np.mean(found[sound]),
            np.average(found[sound], weights=weights),
            np.mean(worst),
            np.std(found[sound]),
        )
        yield [
            (COMPARED[name] or f"{run.algorithm}, a model for each") + of,
            *(format_number(float(x), True) for x in numbers),
            better,
            *(_gain(about) if isinstance(about, dict) else (NONE, NONE)),
        ]


def shares(run: Run, name: str) -> Array:  # [K], empty if there are none
    """Accuracies by client from the end of a run; NaN where nothing is tested."""
    found = run.evaluation.get(name)
    listed = found if isinstance(found, list) else []
    return np.array([x if is_number(x) or isinstance(x, bool) else np.nan for x in listed], float)


def _gain(about: dict[str, object]) -> tuple[str, str]:
    gain, ends, p = (about.get(key) for key in ("gain", "gain_interval", "p"))
    if not is_number(gain):
        return NONE, NONE
    words = f"{100 * gain:+.1f}"
    if isinstance(ends, list | tuple) and len(ends) == 2 and all(map(is_number, ends)):
        words += f" ({100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})"
    return words, format_number(p) if is_number(p) else NONE


def personal_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """A table for each group, and a dot for each client: alone against federated."""
    lines = []
    for one in groups:
        run = one.runs[0]
        rows = personal_rows(run)
        if not rows:
            continue
        of = f": {one.name}" if len(groups) > 1 else ""
        yield Table(
            title=f"Was it worth it to federate?{of}",
            caption="All models on the same test images of each client, which nobody trained on, "
            "after the last round. `by images` counts every image alike; gains are those of the "
            "clients' own models, in points, with 95% intervals over clients; p is corrected for "
            "the number of comparisons (Holm)."
            + " Of repeats, the first run."
            * (len(one.runs) > 1),
            header=HEADER,
            rows=rows,
        )
        alone, own = shares(run, "local_only"), shares(run, "federated")
        if len(alone) == len(own):
            order = np.argsort(alone)
            lines.append(Line(one.name, alone[order].tolist(), own[order].tolist(), style="dots"))
    if lines:
        yield Curves(
            title="Alone or together",
            caption="A dot is a client: above the dotted line its model from the federation is "
            "better than the one that it trains alone.",
            lines=[*lines, Line("equally good", [0.0, 1.0], [0.0, 1.0], style="dotted")],
            x_label="accuracy alone",
            y_label="accuracy of its own model",
            percent=True,
        )
