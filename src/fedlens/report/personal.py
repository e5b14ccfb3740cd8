"""Models of clients' own beside FedAvg's, and beside those that clients train alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.data.emd import emd_per_client
from fedlens.report.blocks import Block, Curves, Line, Table
from fedlens.report.groups import Group
from fedlens.report.holdings import EMD, FEW, client_names, matrix
from fedlens.report.numbers import NONE, format_number
from fedlens.runs.records import Run, interval_in, is_number, list_in, table_in

Array = NDArray[Any]
Of = Callable[[Run], Array]

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
    alone, against = known.get("local_only"), table_in(run.summary, "against")
    for name, found in known.items():
        sound = np.isfinite(found) & which
        worst = np.sort(found[sound])[: max(int(sound.sum()) // 10, 1)]
        weights = tested[sound] if len(tested) == len(found) and tested[sound].any() else None
        better = NONE
        if name not in ("local_only", "elsewhere") and alone is not None:
            both = sound & np.isfinite(alone)
            better = f"{int((found > alone)[both].sum())} of {int(both.sum())}"
        if not sound.any():
            continue
        own = found[sound]
        numbers = np.mean(own), np.average(own, weights=weights), np.mean(worst), np.std(own)
        yield [
            (COMPARED[name] or f"{run.algorithm}, a model for each") + of,
            *(format_number(float(x), True) for x in numbers),
            better,
            *_gain(table_in(against, name) if not of else {}),
        ]


def shares(run: Run, name: str) -> Array:  # [K], empty if there are none
    """Accuracies by client from the end of a run; NaN where nothing is tested."""
    listed = list_in(run.evaluation, name)
    return np.array([x if is_number(x) or isinstance(x, bool) else np.nan for x in listed], float)


def _gain(about: dict[str, Any]) -> tuple[str, str]:
    gain, p = about.get("gain"), about.get("p")
    if not is_number(gain):
        return NONE, NONE
    words = f"{100 * gain:+.1f}"
    if ends := interval_in(about, "gain_interval"):
        words += f" ({100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})"
    return words, format_number(p) if is_number(p) else NONE


def personal_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Tables of what was compared, and pictures of who gains: clients are dots or slopes."""
    known = [one for one in groups if personal_rows(one.runs[0])]
    for one in known:
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
            rows=personal_rows(one.runs[0]),
        )
    if alone := _dots(known, _alone, _own):
        yield Curves(
            title="Alone or together",
            caption="A dot is a client: above the dotted line its model from the federation is "
            "better than the one that it trains alone.",
            lines=[*alone, Line("equally good", [0.0, 1.0], [0.0, 1.0], style="dotted")],
            x_label="accuracy alone",
            y_label="accuracy of its own model",
            percent=True,
        )
    emd = f"EMD is that of its classes from everyone's ({EMD})."
    for what, of, of_client, about in (
        ("size", "training images", _sizes, ""),
        ("EMD", "EMD", _emds, emd),
    ):
        if lines := _dots(known, of_client, lambda run: 100 * (_own(run) - _alone(run))):
            yield Curves(
                title=f"Who gains, by {what}",
                caption="A dot is a client: how much better its model from the federation is than "
                f"the one that it trains alone. {about}",
                lines=lines,
                x_label=of,
                y_label="gain over alone, in points",
                log_x=what == "size",
                levels=[("as good as alone", 0.0)],
            )
    if known:
        yield _slopes(known)


def _alone(run: Run) -> Array:  # [K]
    return shares(run, "local_only")


def _own(run: Run) -> Array:  # [K]
    return shares(run, "federated")


def _sizes(run: Run) -> Array:  # [K], or empty
    listed = list_in(run.partition, "sizes")
    return np.array([x if is_number(x) and x > 0 else np.nan for x in listed], float)


def _emds(run: Run) -> Array:  # [K], or empty
    counts = matrix((run.partition or {}).get("label_counts"))
    return np.array([]) if counts is None else emd_per_client(counts)


def _dots(known: Sequence[Group], x: Of, y: Of) -> list[Line]:
    """A dot for each client; a few clients with names have a line of the legend each."""
    lines = []
    for run, called in ((one.runs[0], one.name) for one in known):
        names, across, up = client_names(run), x(run), y(run)
        if len(across) != len(up):
            continue
        order = [k for k in np.argsort(across) if np.isfinite(across[k]) and np.isfinite(up[k])]
        if len(known) == 1 and names is not None and len(names) == len(up) <= FEW:
            lines += [Line(names[k], [across[k]], [up[k]], style="dots") for k in order]
        elif order:
            lines.append(Line(called, across[order].tolist(), up[order].tolist(), style="dots"))
    return lines


def _slopes(known: Sequence[Group]) -> Curves:
    """How each of a few clients, or each fifth of many, does from method to method."""
    first = known[0].runs[0]
    columns = {
        "alone": _alone(first),
        "FedAvg": shares(first, "fedavg"),
        "FedAvg, tuned": shares(first, "fedavg_fine_tuned"),
    }
    for one in known:  # of several runs, those on the same clients
        if np.array_equal(_alone(one.runs[0]), columns["alone"], equal_nan=True):
            columns[one.name if len(known) > 1 else one.runs[0].algorithm] = _own(one.runs[0])
    table = np.array([*columns.values()])  # [methods, K]
    order = np.argsort(table[0])
    order = order[np.isfinite(table[:, order]).all(0)]
    named = client_names(first)
    if len(order) > (FEW if named else FEW // 2):
        words, fifths = ("worst", "second", "middle", "fourth", "best"), np.array_split(order, 5)
        parts = {f"{w} fifth alone": k for w, k in zip(words, fifths, strict=True)}
    else:
        parts = {named[k] if named else f"client {k}": np.array([k]) for k in order}
    return Curves(
        title="From method to method",
        caption="Mean accuracy of the same clients by each method: a line that rises gains."
        + " Clients are in fifths, by their accuracy alone." * (len(parts) < len(order)),
        lines=[
            Line(name, [*range(len(table))], table[:, some].mean(1).tolist())
            for name, some in parts.items()
        ],
        x_label="method",
        y_label="accuracy",
        percent=True,
        ticks=[*columns],
    )
