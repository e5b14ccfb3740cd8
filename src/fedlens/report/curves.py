"""The curves of runs: accuracy and loss by round, and accuracy by its costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from fedlens.config.names import RECORD_FIELDS
from fedlens.evaluation.measures import OF_MODEL
from fedlens.report.blocks import Block, Curves, Line, Style
from fedlens.report.groups import MANY, Group, best_round, by_cost, curve, off_if_many
from fedlens.report.numbers import format_number, format_place
from fedlens.runs.records import (
    AT_CLIENTS,
    PART_NAMES,
    Run,
    is_number,
    number,
    recorded_as,
    tested_at_clients,
)

STYLES: dict[str, Style] = {"test": "solid", "validation": "dotted", "train": "dashed"}


def curve_blocks(groups: Sequence[Group], part: str) -> Iterator[Block]:
    """Curves of accuracy, relative accuracy and loss by round, where they were recorded."""
    runs = [run for one in groups for run in one.runs]
    yield from _curves(groups, "accuracy", part)
    if tested_at_clients(runs):
        yield Curves(
            title="Accuracy at the clients",
            name="accuracy",
            caption="How many of the examples that clients hold out the model classifies "
            "correctly, of all clients together, round by round. Rings mark the best round.",
            lines=off_if_many([_annotated(one, AT_CLIENTS, percent=True) for one in groups]),
            y_label="accuracy at the clients",
            percent=True,
        )
    metric = "relative_accuracy"
    if any(run.has(metric) for run in runs):
        yield Curves(
            title="Relative accuracy",
            caption="Accuracy as a share of that of the run's centralised twin: the same model, "
            "trained by one client that holds everything, for as many examples: in whole passes, "
            "at least one.",
            lines=off_if_many([_annotated(one, metric, percent=True) for one in groups]),
            y_label="relative accuracy",
            percent=True,
            levels=[("the twin", 1.0)],
        )
    yield from _curves(groups, "loss", part)


def _curves(groups: Sequence[Group], measure: str, part: str) -> Iterator[Curves]:
    runs = [run for one in groups for run in one.runs]
    names = {each: recorded_as(runs, each, measure) for each in STYLES}
    parts = [each for each, name in names.items() if any(run.has(name) for run in runs)]
    if not parts:
        return
    main = part if part in parts else parts[0]
    percent = measure == "accuracy"
    styles: dict[Style, str] = {"solid": PART_NAMES[main]}
    # Test images that chose a round cannot tell how good a personal run is.
    ringed = main != "test" or not any(run.is_personal for run in runs)
    lines = [_annotated(one, names[main], percent, ringed) for one in groups]
    for other in parts:
        if other != main:
            style: Style = STYLES[other] if STYLES[other] != "solid" else "dashed"
            styles[style] = PART_NAMES[other]
            lines += [curve(one, names[other], style) for one in groups]
    sound = [y for line in lines for y in line.y if y is not None and y == y]
    others = " and ".join(PART_NAMES[other] for other in parts if other != main)
    caption = f"{measure.capitalize()} on the {PART_NAMES[main]} examples, round by round."
    caption += f" Broken lines: {others} {measure}." if others else ""
    caption += " Rings mark the best round." * ringed
    caption += " It is that of the server's one model." * (not ringed)
    if any(line.low for line in lines):
        caption += " Lines are means over seeds, bands ± one standard deviation."
    if len(groups) > MANY:
        caption += f" Drawn are the best {MANY} of {len(groups)}; a click on a name draws another."
    known = [run.manifest for run in runs if "multi_label" not in run.manifest]
    counts = {len(c) if isinstance(c := one.get("classes"), list) else 0 for one in known}
    alike = percent and len(counts) == 1  # guessing one of the classes is then as good for all
    yield Curves(
        title=f"{PART_NAMES[main].capitalize()} {measure}",
        name=measure,
        caption=caption,
        lines=off_if_many([line for line in lines if line.x]),
        y_label=f"{PART_NAMES[main]} {measure}",
        percent=percent,
        levels=[("chance", 1 / count) for count in counts if count] if alike else (),
        log_y=not percent and min(sound) > 0 and max(sound) / min(sound) > 100,
        styles=styles,
    )


def measure_blocks(groups: Sequence[Group]) -> Iterator[Curves]:
    """Curves of the algorithms' own measures and of requested metrics, by round."""
    for key in _recorded(groups):
        if key in {*RECORD_FIELDS, *OF_MODEL} or "." in key:
            continue
        words = key.replace("_", " ")
        yield Curves(
            title=words.capitalize(),
            name=key,
            caption=f"What was recorded as {key}, round by round.",
            lines=off_if_many([line for one in groups if (line := curve(one, key)).x]),
            y_label=words,
        )


def schedule_blocks(groups: Sequence[Group]) -> Iterator[Curves]:
    """Curves of scheduled settings by round, for those that changed."""
    for key in _recorded(groups):
        changed = any(len(set(run.curve(key)[1])) > 1 for one in groups for run in one.runs)
        if (key == "lr" or "." in key) and changed:
            what = "local.lr" if key == "lr" else key
            yield Curves(
                title=f"Schedule of {what}",
                caption=f"What {what} was in each round.",
                lines=[line for one in groups if (line := curve(one, key)).x],
                y_label=what,
            )


def _recorded(groups: Sequence[Group]) -> list[str]:
    """The names of all numbers in records."""
    rows = (row for one in groups for run in one.runs for row in run.rounds)
    return list(dict.fromkeys(key for row in rows for key in row if is_number(row[key])))


def _annotated(one: Group, metric: str, percent: bool, ringed: bool = True) -> Line:
    """A group's curve with its best round, and the status of runs that did not finish."""
    line, best = curve(one, metric), best_round(one, metric) if ringed else None
    words = []
    if best is not None:
        words = [f"best {format_number(best[1], percent)} (round {format_place(best[0])})"]
    words += sorted({run.status for run in one.runs} - {"finished"})
    return Line(line.name, line.x, line.y, line.low, line.high, note=", ".join(words), ring=best)


def cost_blocks(groups: Sequence[Group], part: str) -> Iterator[Curves]:
    """Accuracy against bytes sent and against seconds of training, if there are several groups."""
    if len(groups) < 2:
        return
    metric = f"{part}_accuracy"
    for name, columns, unit, what in (
        ("accuracy_by_bytes", ("bytes_up", "bytes_down"), 1e6, "megabytes"),
        ("accuracy_by_seconds", ("seconds",), 1.0, "seconds"),
    ):
        lines = [line for one in groups if (line := _by_cost(one, metric, columns, unit)).x]
        alike = len({tuple(line.x) for line in lines}) == 1  # equal costs: same as by rounds
        if len(lines) > 1 and not alike:
            spent = (
                "sent up and down by all clients" if unit > 1 else "of training, evaluation apart"
            )
            yield Curves(
                title=f"Accuracy by {what}",
                name=name,
                caption=f"{PART_NAMES[part].capitalize()} accuracy against the {what} {spent}, "
                "added up over rounds; of repeats, the means.",
                lines=off_if_many(lines),
                x_label=what,
                y_label=f"{PART_NAMES[part]} accuracy",
                percent=True,
            )


def _by_cost(one: Group, metric: str, columns: Sequence[str], unit: float) -> Line:
    def costs(run: Run) -> Iterator[float]:
        return accumulate(
            sum(number(row.get(name)) or 0.0 for name in columns) for row in run.rounds
        )

    line = by_cost(one, metric, costs, unit)
    return line if any(line.x) else Line(one.name, [], [])
