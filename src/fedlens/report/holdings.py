"""Blocks about clients and classes: data, accuracy, and which clients reported or failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.config.names import BY_CLIENT, OUTCOMES, REPORTED
from fedlens.data.emd import emd, emd_per_client
from fedlens.evaluation.intervals import wilson
from fedlens.evaluation.reliability import HELD_OUT, Calibration, curve
from fedlens.report.blocks import (
    Block,
    Curves,
    Heat,
    Intervals,
    Line,
    Marks,
    Strip,
    Table,
    Tiles,
)
from fedlens.report.groups import Group, by_cost, data_names, written
from fedlens.report.numbers import NONE, format_number
from fedlens.report.tables import decimal
from fedlens.runs.records import (
    PART_NAMES,
    Run,
    interval_in,
    is_number,
    list_in,
    number,
    settings,
    table_in,
)
from fedlens.storage.run_files import MODEL

Array = np.ndarray[Any, Any]

MANY = 60  # more clients or classes than this have no room for a bubble or a name each
FEW = MANY // 3  # up to this many clients or classes have a row or a line each
EMD = "0: clients have classes in the same shares; 2: no class in common"
UNLIKE = 0.5  # from this EMD on, many clients are ordered by their main class
FEW_MARKS = 8  # values that a client's row of intervals has at most
MOST_PICTURES = 4  # of partitions, of confusion matrices, or of outcomes, on one page
MOST_CLIENTS, MOST_ROUNDS = 200, 1000  # of outcomes: more cannot be distinguished in a picture

CLIENTS = ["client", "trained on", "tested on", "accuracy", "95% interval"]
BY_THEMSELVES = {
    "fine_tuned": "fine-tuned",
    "local_only": "alone",
    "centralised": "centralised",
    "fedavg": "FedAvg",
    "fedavg_fine_tuned": "FedAvg, fine-tuned",
    "elsewhere": "on others' images",
}
"""Optional columns: accuracies of other models for each client. Keys are those of run files."""

RANKED = {"auroc": "AUROC", "average_precision": "average precision", "f1": "F1"}
LABELS = ["label", "images", *RANKED.values()]
"""What is said of each label where images may have several; keys are those of run files."""

MOST_LISTED = 60  # with more clients than this, they are not listed

MEANINGS = {
    REPORTED: "its update was taken",
    "surplus": "enough others reported before it, or too few for the round to count",
    "late": "it missed the deadline",
    "unavailable": "it was not there",
    "absent": "it never began",
    "dropped": "it stopped on its way",
    "nan": "it sent NaNs",
    "infinite": "it sent infinite numbers",
    "huge": "it sent an update of absurd length",
    "malformed": "it sent wrong shapes",
    "raised": "its program failed",
    "refused": "the site refused to train",
    "stale": "what it sent was for an earlier order",
    "foreign": "what it sent was of another experiment",
}
"""What became of a client that was asked, by its name in records."""


def partition_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """A heat map of each kind of partition, and the EMD of each client.

    Splits that differ in their seeds alone are one kind of partition: the first of them is drawn.
    """
    kinds: dict[str, list[tuple[Run, Array]]] = {}
    runs, seen = [run for one in groups for run in one.runs], set()
    for run, of in zip(runs, data_names(runs), strict=True):
        counts = matrix((run.partition or {}).get("label_counts"))
        split = of, str(run.manifest.get("partition"))
        if counts is not None and split not in seen:
            seen.add(split)
            kinds.setdefault(_partition_in_words(run, of, len(counts)), []).append((run, counts))
    for kind, alike in list(kinds.items())[:MOST_PICTURES]:
        run, counts = alike[0]
        of = f": {kind}" if len(kinds) > 1 else ""
        classes = _classes(run, counts.shape[1])
        sizes = matrix([list_in(run.partition, "sizes")])
        title = f"Who holds what{of}"
        picture = partition_heat(counts, classes, title, client_names(run), sizes)
        more = f" The first of {len(alike)} splits that differ in their seed."
        yield replace(picture, caption=picture.caption + more * (len(alike) > 1))
    splits = [(kind, *split) for kind, alike in kinds.items() for split in alike]
    many = [split for split in splits if len(split[2]) > FEW]  # fewer are seen one by one
    if many:
        yield Strip(
            title="EMD of each client",
            caption="How far each client's class shares are from everyone's: the L1 distance, 0 if "
            "they are alike, up to 2. A dot is a client; the stroke is the median.",
            groups=[
                (_split_name(kind, run, len(kinds), len(splits)), emd_per_client(counts).tolist())
                for kind, run, counts in many
            ],
            x_label="EMD",
        )


def _partition_in_words(run: Run, of: str, num_clients: int) -> str:
    """The data set `of`, its partition with its options, and the number of clients, in words."""
    flat = settings(run.experiment)
    inner = "clients.partition."
    numbers = [f"{k.removeprefix(inner)} {written(v)}" for k, v in flat.items() if inner in k]
    name = written(flat.get("clients.partition", "iid"))
    return f"{of}, {' '.join([name, *numbers])} over {num_clients} clients"


def _split_name(kind: str, run: Run, num_kinds: int, num_splits: int) -> str:
    """A name for a split that distinguishes it from the others of a page."""
    flat = settings(run.experiment)
    seed = f"seed {written(flat.get('clients.seed', flat.get('seed', 0)))}"
    if num_kinds > 1:
        return f"{kind}, {seed}" if num_splits > num_kinds else kind
    return seed if num_splits > 1 else "each client"


def partition_heat(
    counts: Array,  # [K, L]
    classes: Sequence[str],
    title: str,
    clients: Sequence[str] | None = None,
    held: Array | None = None,  # [K] examples
) -> Heat:
    """A heat map of the share of each client's examples in each class."""
    num_clients, distance = len(counts), emd(counts)
    ordered = num_clients > MANY and distance >= UNLIKE
    order = by_main_class(counts) if ordered else np.arange(num_clients)
    sizes = counts.sum(1) if held is None or held.size != num_clients else held.ravel()
    shares = (counts / np.maximum(sizes[:, None], 1))[order]  # [K, L]
    names = [clients[k] if clients else str(k) for k in order.tolist()]
    label = "clients, ordered by their main class" if ordered else "client"
    least, most = sizes.min(), sizes.max()
    each = f"{least:,} to {most:,} examples" if least < most else f"{most:,} examples each"
    across = clients is None or num_clients > FEW  # a few named clients are rows instead
    both = ("class", list(classes), shares.T), (label, names, shares)
    (row_label, rows, values), (column_label, columns, _) = both if across else both[::-1]
    return Heat(
        title=title,
        caption=f"Each client's examples by class: {num_clients:,} clients of {each}, "
        f"EMD {format_number(distance)} ({EMD})."
        + (" Clients are ordered by their main class." if ordered else ""),
        values=values.tolist(),
        row_names=rows,
        column_names=columns,
        row_label=row_label,
        column_label=column_label,
        value_label="share of the client's examples",
        percent=True,
        shares=True,
    )


def by_main_class(counts: Array) -> Array:  # [K, L] -> [K]
    """Client indices sorted by main class, and within a class by its share, largest first."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.lexsort((-shares.max(1), shares.argmax(1)))


def class_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Recall by class and confusion matrices, or tables of the labels if images have several."""
    yield from _label_tables(groups)
    known = [(one, *told) for one in groups if (told := _confusion(one)) is not None]
    named = [_classes(one.runs[0], len(total)) for one, total, _ in known]
    if not known or any(classes != named[0] for classes in named):
        return
    classes, sizes = named[0], known[0][2]
    recalls = [
        [
            hit / size if size else None
            for hit, size in zip(total.diagonal().tolist(), total.sum(1).tolist(), strict=True)
        ]
        for _, total, _ in known
    ]
    caption = (
        "Which share of a class's examples the final model recognises; behind the name, how many "
        "examples these are."
    )
    sized = [f"{name} ({n:,})" for name, n in zip(classes, sizes, strict=True)]
    if len(known) == 1 and len(classes) <= FEW:
        yield Intervals(
            title="Recall by class",
            caption=f"{caption} Lines are 95% intervals (Wilson's).",
            rows=sized,
            series=[_marks("recall", recalls[0], sizes.tolist())],
            x_label="recall",
            percent=True,
        )
    else:
        yield Heat(
            title="Recall by class",
            caption=caption,
            values=[list(row) for row in zip(*recalls, strict=True)],
            row_names=sized,
            column_names=[one.name for one, *_ in known],
            row_label="class",
            value_label="recall",
            percent=True,
        )
    many = len(known) > MOST_PICTURES
    first = f" Of {len(known)} experiments, the first." if many else ""
    for one, total, _ in known[:1] if many else known:
        of = f": {one.name}" if len(known) > 1 else ""
        outside = total[:, -1].any()  # predictions of outputs that belong to no class
        counts = total if outside else total[:, :-1]
        yield Heat(
            title=f"Confusion{of}",
            caption="What the final model takes the examples of each class for, in percent of the "
            f"class; the diagonal is right.{first}",
            values=(counts / np.maximum(counts.sum(1, keepdims=True), 1)).tolist(),
            row_names=classes,
            column_names=[*classes, "none of them"] if outside else classes,
            row_label="true class",
            column_label="predicted class",
            percent=True,
            shares=True,
        )


def _label_tables(groups: Sequence[Group]) -> Iterator[Table]:
    known = [one for one in groups if table_in(one.runs[0].evaluation, "by_label")]
    for one in known[:MOST_PICTURES]:
        yield Table(
            title="Label by label" + (f": {one.name}" if len(known) > 1 else ""),
            caption="How well the final model finds each label: the images that have it; the area "
            "under its ROC curve, 0.5 being chance; its average precision, chance being the share "
            "of images that have it; and F1 at a probability of one half."
            + (" Of repeats, the first run." if len(one.runs) > 1 else ""),
            header=LABELS,
            rows=label_rows(table_in(one.runs[0].evaluation, "by_label")),
        )


def label_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What is known of each label, by its name, as text; the header is `LABELS`."""
    known = {name: table_in(found, name) for name in found}
    return [
        [
            name,
            format_number(number(of.get("images"))),
            *(decimal(number(of.get(k))) for k in RANKED),
        ]
        for name, of in known.items()
    ]


def reliability_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """How sure the final model is and how often it is right, as trained and calibrated."""
    lines, told = [], []
    for one in groups:
        about = Calibration.of(one.runs[0].evaluation, MODEL)
        if about is None:
            continue
        lines.append(Line(one.name, *curve(about.after)))
        lines.append(Line(one.name, *curve(about.before), style="dashed"))
        before, after = (format_number(error, True) for error in about.errors)
        told.append(
            f"A temperature of {about.temperature:.3g} takes the expected calibration error "
            f"from {before} to {after}, on {about.images:,} {HELD_OUT[about.part]}."
        )
    if lines:
        yield Curves(
            title="Reliability",
            caption="How often answers are right that are given with a certain confidence, by bins "
            "of confidence. Below the diagonal a model is overconfident. "
            + (told[0] if len(told) == 1 else "Of repeats, the first run."),
            lines=[*lines, Line("as sure as right", [0.0, 1.0], [0.0, 1.0], style="dotted")],
            x_label="confidence",
            y_label="accuracy",
            percent=True,
            styles={"solid": "calibrated", "dashed": "as trained"},
        )


def client_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """The spread of accuracy over clients, by round and at the end, where it was recorded."""
    lines = []
    for one in groups:
        run, names = one.runs[0], client_names(one.runs[0])
        if names is not None and (named := _named_lines(run, names)):
            yield Curves(
                title="Accuracy of each client" + (f": {one.name}" if len(groups) > 1 else ""),
                caption=f"{whose(run)} on its own examples, round by round."
                + (" Of repeats, the first run." if len(one.runs) > 1 else ""),
                lines=named,
                y_label="accuracy on clients' own examples",
                percent=True,
            )
            continue
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
            caption="Accuracy on each client's own examples. Line: the median client. Dashes: the "
            "tenth percentile. Band: from the worst client to the best.",
            lines=lines,
            y_label="accuracy on clients' own examples",
            percent=True,
            styles={"solid": "median client", "dashed": "tenth percentile"},
            most_bands=2,  # each band is nearly as tall as the picture
        )
    yield from _client_tables(groups)
    if (told := _client_intervals(groups)) is not None:
        yield told
        return
    dots = []
    for one in groups:
        for key, values in accuracies(one.runs[0]).items():
            words = BY_THEMSELVES.get(key)
            dots.append((f"{one.name}, {words}" if words else one.name, values))
    if dots:
        yield Strip(
            title="Accuracy of each client at the end",
            caption="Accuracy on examples of each client's own that nobody trained on. A dot is a "
            "client; the stroke is the median.",
            groups=dots,
            x_label="accuracy",
            percent=True,
        )


def _named_lines(run: Run, names: Sequence[str]) -> list[Line]:
    """The accuracy of each client by round; none if it was not recorded, as of many clients."""
    found = [(row["round"], row[BY_CLIENT]) for row in run.rounds if BY_CLIENT in row]
    if not all(isinstance(one, list) and len(one) == len(names) for _, one in found):
        return []
    rounds = [round for round, _ in found]
    return [
        Line(name, rounds, [number(one[k]) for _, one in found])
        for k, name in enumerate(names if found else ())
    ]


def _client_intervals(groups: Sequence[Group]) -> Intervals | None:
    """Final accuracies of clients with intervals, the worst first; None if they are too many."""
    first = groups[0].runs[0]
    tested = list_in(first.evaluation, "client_tested")
    if not 0 < len(tested) <= FEW:
        return None
    names = client_names(first) or [f"client {k}" for k in range(len(tested))]
    columns: dict[str, list[float | None]] = {}
    for one in groups:
        run = one.runs[0]
        if run.evaluation.get("client_tested") != tested or client_names(run) not in (None, names):
            return None
        for key, values in accuracies(run).items():
            words = BY_THEMSELVES.get(key, "federated")
            of_group = f"{one.name}, {words}" if key in BY_THEMSELVES else one.name
            if len(values) == len(names):
                columns[words if len(groups) == 1 else of_group] = values
    if not 0 < len(columns) <= FEW_MARKS:
        return None
    leading = next(iter(columns.values()))
    order = sorted(range(len(names)), key=lambda k: x if (x := leading[k]) is not None else 2.0)
    sizes = [int(number(tested[k]) or 0) for k in order]
    return Intervals(
        title="Who is left behind",
        caption="Accuracy on examples of each client's own, set apart from training, with its 95% "
        "interval (Wilson's); the worst client first. Where intervals overlap widely, a difference "
        "may be chance.",
        rows=[names[k] for k in order],
        series=[_marks(name, [x[k] for k in order], sizes) for name, x in columns.items()],
        x_label="accuracy",
        percent=True,
    )


def _marks(name: str, shares: Sequence[float | None], counts: Sequence[int]) -> Marks:
    """Shares of so many examples, with their 95% intervals."""
    ends = [wilson(x, n) if x is not None and n else (None, None)
            for x, n in zip(shares, counts, strict=True)]  # fmt: skip
    return Marks(name, shares, [low for low, _ in ends], [high for _, high in ends])


def final_interval(run: Run, part: str) -> tuple[float, float] | None:
    """The 95% interval of a run's final accuracy, on the images that it was tested on."""
    confusion, accuracy = matrix(run.evaluation.get("confusion")), run.final(f"{part}_accuracy")
    count = number(run.evaluation.get("tested")) if confusion is None else int(confusion.sum())
    if not count or accuracy is None or run.evaluation.get("part") != part:
        return None
    return wilson(accuracy, int(count))


def client_rows(run: Run) -> list[list[str]]:
    """The final model's accuracy for each client; empty if untested or too many clients."""
    found = accuracies(run)
    sizes, tested = list_in(run.partition, "sizes"), list_in(run.evaluation, "client_tested")
    shares = found.pop("client_accuracy", [])
    if not len(sizes) == len(tested) == len(shares) <= MOST_LISTED:
        return []
    names = client_names(run) or list(map(str, range(len(sizes))))
    return [
        [name, str(size), str(count), *measured(share, count)]
        + [format_number(x, True) for x in more]
        for name, size, count, share, *more in zip(
            names, sizes, tested, shares, *found.values(), strict=False
        )
    ]


def whose(run: Run) -> str:
    own = run.final("personal_accuracy") is not None
    return "Each client's own model" if own else "The one model, for each client"


def client_header(run: Run) -> list[str]:
    """The header of the table whose rows are `client_rows`."""
    return CLIENTS + [words for key, words in BY_THEMSELVES.items() if key in accuracies(run)]


def accuracies(run: Run) -> dict[str, list[float | None]]:
    """The accuracies of each client that were recorded: of the final model, and of others."""
    found = {key: run.evaluation.get(key) for key in ("client_accuracy", *BY_THEMSELVES)}
    if "federated" in run.evaluation:  # the same; or, where clients tune it at the end, then
        found["client_accuracy"] = run.evaluation["federated"]
    return {key: [*map(number, some)] for key, some in found.items() if isinstance(some, list)}


def measured(share: float | None, count: int) -> list[str]:
    """A share of so many images as text, and its 95% interval (Wilson's)."""
    if share is None or not count:
        return [NONE, NONE]
    low, high = (format_number(end, True) for end in wilson(share, count))
    return [format_number(share, True), f"{low} to {high}"]


def worth(run: Run) -> list[str]:
    """Whether federated learning helped, and how many clients: a sentence for each comparison."""
    against = table_in(run.summary, "against")
    words = {
        "local_only": "Each client trained alone",
        "fine_tuned": "The final model fine-tuned by each client",
    }
    if "fedavg" in against:  # `personal_rows` say it
        del words["local_only"]
    found = []
    for key, what in words.items():
        if not (about := table_in(against, key)):
            continue
        own, ours = (format_number(about.get(of), True) for of in ("own_mean", "federated_mean"))
        gain = ""
        if ends := interval_in(about, "gain_interval"):
            low, high = (f"{100 * end:+.1f}" for end in ends)
            gain = f" (gain {100 * about['gain']:+.1f} points, {low} to {high})"
        found.append(
            f"{what}: {own} on average, against {ours} of the federated model, which is "
            f"better for {about.get('federated_better')} of {about.get('clients')} clients and "
            f"worse for {about.get('own_better')}{gain}."
        )
    share = number(table_in(run.summary, "twin").get("accuracy"))
    if found and share is not None:
        whole = format_number(share, True)
        found.append(
            f"One model trained on the examples of all clients: {whole} on all that is tested."
        )
    return found


def _client_tables(groups: Sequence[Group]) -> Iterator[Table]:
    """A table of the clients of each group, if they have names."""
    for one in groups[:MOST_PICTURES]:
        rows = client_rows(one.runs[0])
        if rows and client_names(one.runs[0]):
            of = f": {one.name}" if len(groups) > 1 else ""
            yield Table(
                title=f"Client by client{of}",
                caption=f"{whose(one.runs[0])}, tested on examples of its own that nobody "
                "trained on. The interval is Wilson's: with few examples it is wide. "
                + " ".join(worth(one.runs[0]))
                + (" Of repeats, the first run." if len(one.runs) > 1 else ""),
                header=client_header(one.runs[0]),
                rows=rows,
            )


def client_names(run: Run) -> list[str] | None:
    return [str(name) for name in list_in(run.partition, "client_names")] or None


def _confusion(one: Group) -> tuple[Array, Array] | None:  # [L, L + 1], [L]
    """The confusion over repeats, and the test examples of a class: of one run if all have them."""
    found = [matrix(run.evaluation.get("confusion")) for run in one.runs]
    sound = [m for m in found if m is not None and m.shape[1] == len(m) + 1]
    if not sound or len({m.shape for m in sound}) > 1:
        return None
    sizes = [m.sum(1) for m in sound]
    alike = all(np.array_equal(sizes[0], others) for others in sizes)
    return np.sum(sound, axis=0), sizes[0] if alike else np.sum(sizes, axis=0)


def _classes(run: Run, num_classes: int) -> list[str]:
    named = list_in(run.manifest, "classes")
    return [*map(str, named if len(named) == num_classes else range(num_classes))]


def matrix(value: Any) -> Array | None:
    """The value as a matrix of whole numbers, or None if it is not one."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return None
    if len({len(row) for row in value}) != 1 or not value[0]:
        return None
    if not all(type(cell) is int and 0 <= cell < 2**31 for row in value for cell in row):
        return None
    return np.array(value, dtype=np.int64)


def outcome_blocks(groups: Sequence[Group], part: str) -> Iterator[Block]:
    """For runs with failures: outcomes by client and round, and accuracy by virtual time."""
    failing = [one for one in groups if any("failed" in row for row in _rounds(one.runs[0]))]
    for one in failing[:MOST_PICTURES]:
        of = f": {one.name}" if len(failing) > 1 else ""
        yield _outcome_tiles(one.runs[0], f"Who reported{of}")
    first = [replace(one, runs=one.runs[:1]) for one in failing]
    lines = [by_cost(one, f"{part}_accuracy", _clock) for one in first]
    if lines := [line for line in lines if line.x]:
        yield Curves(
            title="Accuracy by virtual time",
            caption=f"{PART_NAMES[part].capitalize()} accuracy against the time of the virtual "
            "clock, on which clients compute and send as their devices do; of repeats, the first "
            "run.",
            lines=lines,
            x_label="virtual seconds",
            y_label=f"{PART_NAMES[part]} accuracy",
            percent=True,
        )


def _clock(run: Run) -> list[float | None]:
    return [number(row.get("clock")) for row in run.rounds]


def _rounds(run: Run) -> list[dict[str, Any]]:
    """The records of a run, and that of the round where it stopped since too few reported."""
    stopped = table_in(run.summary, "stopped_round")
    return [*run.rounds, stopped] if isinstance(stopped.get("round"), int) else run.rounds


def _outcome_tiles(run: Run, title: str) -> Tiles:
    everything, names = _rounds(run), client_names(run) or []
    rounds = _thinned(everything, MOST_ROUNDS)
    columns = [_outcomes(row) for row in rounds]
    everyone = sorted({client for column in columns for client in column})
    clients = _thinned(everyone, MOST_CLIENTS)
    named = {name for column in columns for name in column.values()}
    legend = "; ".join(f"{name}: {MEANINGS[name]}" for name in OUTCOMES if name in named)
    caption = f"What became of each client that was asked, round by round. {legend}."
    for what, some, every in (("clients", clients, everyone), ("rounds", rounds, everything)):
        if len(some) < len(every):
            caption += f" {len(some)} of {len(every)} {what} are shown."
    return Tiles(
        title=title,
        caption=caption,
        kinds=OUTCOMES,
        values=[[column.get(client) for column in columns] for client in clients],
        row_names=[names[client] if client < len(names) else str(client) for client in clients],
        column_names=[str(row["round"]) for row in rounds],
        row_label="client",
        column_label="round",
    )


def _outcomes(row: dict[str, Any]) -> dict[int, str]:
    """The outcome of each client in a record; one that failed and then reported has reported."""
    told = {**table_in(row, "failed"), REPORTED: row.get("clients")}
    return {
        int(client): name
        for name in told
        if name in OUTCOMES
        for client in list_in(told, name)
        if is_number(client)
    }


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spaced."""
    count = min(most, len(values))
    return [values[len(values) * i // count] for i in range(count)]
