"""Blocks about clients and classes: the data of each client, and accuracy for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.data.emd import emd, emd_per_client
from fedlens.report.blocks import (
    Bars,
    Block,
    Curves,
    Intervals,
    Line,
    Marks,
    Series,
    Strip,
    Table,
)
from fedlens.report.datasets import data_names
from fedlens.report.grids import Heat
from fedlens.report.groups import Group, written
from fedlens.report.numbers import format_number
from fedlens.report.tables import BY_THEMSELVES, client_header, client_rows, worth
from fedlens.runs.intervals import wilson
from fedlens.runs.records import Run, is_number, number, settings

Array = np.ndarray[Any, Any]

MANY = 60  # more clients or classes than this have no room for a bubble or a name each
UNLIKE = 0.5  # from this EMD on, many clients are ordered by their main class
MOST_PICTURES = 4  # of partitions, or of confusion matrices, on one page


def partition_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """A heat map of each kind of partition, and the EMD of each client.

    Splits that differ in their seeds alone are one kind of partition: the first of them is drawn.
    """
    found: dict[tuple[str, str], tuple[str, Run, Array]] = {}  # by data set and split
    runs = [run for one in groups for run in one.runs]
    for run, of in zip(runs, data_names(runs), strict=True):
        counts = _matrix((run.partition or {}).get("label_counts"))
        if counts is not None:
            way = _dealing(run, of, len(counts))
            found.setdefault((of, str(run.manifest.get("partition"))), (way, run, counts))
    ways = {way: (run, counts) for way, run, counts in reversed(found.values())}
    for way, (run, counts) in list(reversed(ways.items()))[:MOST_PICTURES]:
        of = f": {way}" if len(ways) > 1 else ""
        title, classes = f"Who holds what{of}", _classes(run, counts.shape[1])
        picture = partition_heat(counts, classes, title, client_names(run))
        splits = sum(way == other for other, _, _ in found.values())
        more = f" The first of {splits} splits that differ in their seed." if splits > 1 else ""
        yield replace(picture, caption=picture.caption + more)
    if found:
        yield Strip(
            title="EMD of each client",
            caption="How far each client's class shares are from everyone's: the L1 distance, 0 if "
            "they are alike, up to 2. A dot is a client; the stroke is the median.",
            groups=[
                (_split_name(way, run, len(ways), len(found)), emd_per_client(counts).tolist())
                for way, run, counts in found.values()
            ],
            x_label="EMD",
        )


def _dealing(run: Run, of: str, num_clients: int) -> str:
    """The data set `of`, its partition with its options, and the number of clients, in words."""
    flat = settings(run.experiment)
    inner = "clients.partition."
    numbers = [f"{k.removeprefix(inner)} {written(v)}" for k, v in flat.items() if inner in k]
    name = written(flat.get("clients.partition", "iid"))
    return f"{of}, {' '.join([name, *numbers])} over {num_clients} clients"


def _split_name(way: str, run: Run, num_ways: int, num_splits: int) -> str:
    """A name for a split that distinguishes it from the others of a page."""
    flat = settings(run.experiment)
    seed = f"seed {written(flat.get('clients.seed', flat.get('seed', 0)))}"
    if num_ways > 1:
        return f"{way}, {seed}" if num_splits > num_ways else way
    return seed if num_splits > 1 else "each client"


def partition_heat(
    counts: Array,  # [K, L]
    classes: Sequence[str],
    title: str,
    clients: Sequence[str] | None = None,
) -> Heat:
    """A heat map of the share of each client's examples in each class."""
    num_clients, distance = len(counts), emd(counts)
    order, ordered = np.arange(num_clients), num_clients > MANY and distance >= UNLIKE
    if ordered:
        order = by_main_class(counts)
    shares = (counts / np.maximum(counts.sum(1, keepdims=True), 1))[order]  # [K, L]
    names = [clients[k] if clients else str(k) for k in order.tolist()]
    across = clients is None or num_clients > MANY // 3  # a few named clients are rows instead
    label = "clients, ordered by their main class" if ordered else "client"
    sizes = counts.sum(1)
    least, most = sizes.min(), sizes.max()
    held = f"{least:,} to {most:,} examples" if least < most else f"{most:,} examples each"
    return Heat(
        title=title,
        caption=f"Each client's examples by class: {num_clients:,} clients of {held}, "
        f"EMD {format_number(distance)}."
        + (" Clients are ordered by their main class." if ordered else ""),
        values=(shares.T if across else shares).tolist(),
        row_names=list(classes) if across else names,
        column_names=names if across else list(classes),
        row_label="class" if across else label,
        column_label=label if across else "class",
        value_label="share of the client's examples",
        percent=True,
        shares=True,
    )


def by_main_class(counts: Array) -> Array:  # [K, L] -> [K]
    """Client indices sorted by main class, and within a class by its share, largest first."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.lexsort((-shares.max(1), shares.argmax(1)))


def class_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Recall by class and confusion matrices, for runs that recorded a confusion matrix."""
    shown = [(one, total) for one in groups if (total := _confusion(one)) is not None]
    named = [_classes(one.runs[0], len(total)) for one, total in shown]
    if not shown or any(classes != named[0] for classes in named):
        return
    classes = named[0]
    recalls = [_recall(total) for _, total in shown]
    caption = (
        "Which share of a class's examples the final model recognises; behind the name, how many "
        "examples these are."
    )
    sizes = _class_sizes(shown[0][0])
    sized = [f"{name} ({n:,})" for name, n in zip(classes, sizes, strict=True)]
    if len(shown) == 1 and len(classes) <= MANY // 3:
        series = [Series("recall", recalls[0])]
        yield Bars(
            title="Recall by class",
            caption=caption,
            groups=sized,
            series=series,
            y_label="recall",
            percent=True,
        )
    else:
        yield Heat(
            title="Recall by class",
            caption=caption,
            values=[list(row) for row in zip(*recalls, strict=True)],
            row_names=sized,
            column_names=[one.name for one, _ in shown],
            row_label="class",
            value_label="recall",
            percent=True,
        )
    for one, total in shown if len(shown) <= MOST_PICTURES else shown[:1]:
        of = f": {one.name}" if len(shown) > 1 else ""
        outside = total[:, -1].any()  # predictions of outputs that belong to no class
        counts = total if outside else total[:, :-1]
        yield Heat(
            title=f"Confusion{of}",
            caption="What the final model takes the examples of each class for, in percent of the "
            f"class; the diagonal is right.{_first_of(shown)}",
            values=(counts / np.maximum(counts.sum(1, keepdims=True), 1)).tolist(),
            row_names=classes,
            column_names=[*classes, "none of them"] if outside else classes,
            row_label="true class",
            column_label="predicted class",
            percent=True,
            shares=True,
        )


def _first_of(shown: Sequence[object]) -> str:
    return f" Of {len(shown)} experiments, the first." if len(shown) > MOST_PICTURES else ""


def reliability_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Calibration curves of the final model, for runs with the metric `ece`."""
    lines = []
    for one in groups:
        table = one.runs[0].evaluation.get("reliability")
        bins = zip(*table, strict=False) if isinstance(table, list) and len(table) == 3 else ()
        points = [(sure / count, hits / count) for count, sure, hits in bins if count]
        if points:
            lines.append(Line(one.name, [x for x, _ in points], [y for _, y in points]))
    if lines:
        yield Curves(
            title="Reliability",
            caption="How often answers are right that are given with a certain confidence, by bins "
            "of confidence. Below the diagonal a model is overconfident. Of repeats, the "
            "first run.",
            lines=[*lines, Line("as sure as right", [0.0, 1.0], [0.0, 1.0], style="dotted")],
            x_label="confidence",
            y_label="accuracy",
            percent=True,
        )


def client_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """The spread of accuracy over clients, by round and at the end, where it was recorded."""
    lines = []
    for one in groups:
        run = one.runs[0]
        if not run.has("client_accuracy_median"):
            continue
        (x, middle), (_, low), (_, high) = (
            run.curve(f"client_accuracy_{word}") for word in ("median", "min", "max")
        )
        banded = len(low) == len(high) == len(x)
        lines.append(Line(one.name, x, middle, *((low, high) if banded else (None, None))))
        lines.append(Line(one.name, *run.curve("client_accuracy_p10"), style="dashed"))
    if lines:
        yield Curves(
            title="Accuracy over clients",
            name="clients",
            caption="Accuracy of the one model on each client's own examples. Line: the median "
            "client. Dashes: the tenth percentile. Band: from the worst client to the best.",
            lines=lines,
            y_label="accuracy on clients' own examples",
            percent=True,
            styles={"solid": "median client", "dashed": "tenth percentile"},
            most_bands=2,  # each band is nearly as tall as the picture
        )
    yield from _client_tables(groups)
    if len(groups) == 1 and (told := _client_intervals(groups[0].runs[0])) is not None:
        yield told
        return
    dots = []
    for one in groups:
        found = one.runs[0].evaluation
        for key, words in {"client_accuracy": "", **BY_THEMSELVES}.items():
            if isinstance(found.get(key), list):
                dots.append((f"{one.name}, {words}" if words else one.name, found[key]))
    if dots:
        yield Strip(
            title="Accuracy of each client",
            caption="Accuracy of the final model on examples of each client's own that nobody "
            "trained on. A dot is a client; the stroke is the median.",
            groups=dots,
            x_label="accuracy",
            percent=True,
        )


def _client_intervals(run: Run) -> Intervals | None:
    """Accuracies of named clients with intervals, the worst first; None if unnamed or too many."""
    names, tested = client_names(run), run.evaluation.get("client_tested")
    accuracy = run.evaluation.get("client_accuracy")
    if (
        names is None
        or not (isinstance(accuracy, list) and isinstance(tested, list))
        or not len(accuracy) == len(tested) == len(names) <= MANY // 3
    ):
        return None
    order = sorted(range(len(names)), key=lambda k: x if is_number(x := accuracy[k]) else 2.0)
    series = []
    for key, words in {"client_accuracy": "federated", **BY_THEMSELVES}.items():
        values = run.evaluation.get(key)
        if isinstance(values, list) and len(values) == len(names):
            found = [(number(values[k]), number(tested[k])) for k in order]
            ends = [wilson(x, int(n)) if x is not None and n else (None, None) for x, n in found]
            low, high = ([one[side] for one in ends] for side in (0, 1))
            series.append(Marks(words, [x for x, _ in found], low, high))
    return Intervals(
        title="Who is left behind",
        caption="Accuracy on examples of each client's own, set apart from training, with its 95% "
        "interval (Wilson); the client with the lowest of the federated model first. Where "
        "intervals overlap widely, the models may be equally good.",
        rows=[names[k] for k in order],
        series=series,
        x_label="accuracy",
        percent=True,
    )


def _client_tables(groups: Sequence[Group]) -> Iterator[Table]:
    """A table of the clients of each group, if they have names."""
    for one in groups[:MOST_PICTURES]:
        rows = client_rows(one.runs[0])
        if rows and client_names(one.runs[0]):
            of = f": {one.name}" if len(groups) > 1 else ""
            yield Table(
                title=f"Client by client{of}",
                caption="The one model, tested on examples of each client's own that nobody "
                "trained on. The interval is Wilson's: with few examples it is wide. "
                + " ".join(worth(one.runs[0]))
                + (" Of repeats, the first run." if len(one.runs) > 1 else ""),
                header=client_header(one.runs[0]),
                rows=rows,
            )


def client_names(run: Run) -> list[str] | None:
    named = (run.partition or {}).get("client_names")
    return [str(name) for name in named] if isinstance(named, list) else None


def _confusions(one: Group) -> list[Array]:  # [L, L + 1] each
    found = [_matrix(run.evaluation.get("confusion")) for run in one.runs]
    return [m for m in found if m is not None and m.shape[1] == len(m) + 1]


def _class_sizes(one: Group) -> Array:  # [L]
    """The number of test examples of each class: of one run if repeats have the same, else all."""
    sizes = [confusion.sum(1) for confusion in _confusions(one)]
    alike = all(np.array_equal(sizes[0], others) for others in sizes)
    total: Array = sizes[0] if alike else np.sum(sizes, axis=0)
    return total


def _confusion(one: Group) -> Array | None:  # [L, L + 1]
    sound = _confusions(one)
    if not sound or len({matrix.shape for matrix in sound}) > 1:
        return None
    total: Array = np.sum(sound, axis=0)
    return total


def _recall(confusion: Array) -> list[float | None]:
    sizes = confusion.sum(1)
    return [
        float(confusion[label, label] / size) if size else None for label, size in enumerate(sizes)
    ]


def _classes(run: Run, num_classes: int) -> list[str]:
    named = run.manifest.get("classes")
    if isinstance(named, list) and len(named) == num_classes:
        return [str(name) for name in named]
    return [str(label) for label in range(num_classes)]


def _matrix(value: Any) -> Array | None:
    """The value as a matrix of whole numbers, or None if it is not one."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        return None
    if len({len(row) for row in value}) > 1 or not value[0]:
        return None
    if not all(type(cell) is int and 0 <= cell < 2**31 for row in value for cell in row):
        return None
    return np.array(value, dtype=np.int64)
