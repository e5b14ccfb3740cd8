"""The page about one or more runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from fedlens.report.blocks import Block, Curves, Facts, Intervals, Marks, Table, Text
from fedlens.report.cautions import FAR, cautions
from fedlens.report.curves import cost_blocks, curve_blocks, measure_blocks, schedule_blocks
from fedlens.report.groups import (
    MANY,
    Group,
    around,
    best_first,
    data_names,
    different_data,
    differing,
    grid_block,
    group,
    mean_and_std,
    written,
)
from fedlens.report.holdings import (
    EMD,
    class_blocks,
    client_blocks,
    final_interval,
    outcome_blocks,
    partition_blocks,
    reliability_blocks,
)
from fedlens.report.numbers import NONE, format_number
from fedlens.report.page import render_page
from fedlens.report.personal import personal_blocks
from fedlens.report.privacy import privacy_blocks, privacy_line, sums_line
from fedlens.report.tables import decimal, rows
from fedlens.runs.records import (
    AT_CLIENTS,
    PART_NAMES,
    Run,
    evaluated_on,
    interval_in,
    number,
    primary_part,
    read_all,
    recorded_as,
    settings,
    table_in,
    tested_at_clients,
)
from fedlens.storage.run_files import EXPERIMENT, MANIFEST, UNSOUND
from fedlens.storage.words import count_of

NAMED = 5
"""The number of experiments that the headline names before it summarises the rest."""


def report(folders: Sequence[Path], out: Path | None = None, progress: bool = False) -> Path:
    """Write `report.html` and `figures/` to `out`, and return the page's path.

    Without `out` they go to the run folder, or to the common folder of several runs.
    """
    runs = read_all(folders)
    out = common_folder(runs) if out is None else Path(out)
    return render_page(title_of(runs), headline(runs), run_blocks(runs), out, progress)


def title_of(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    alone = all(len(one.runs) == 1 for one in group(runs))
    return f"{len(runs)} runs compared{', one seed each' if alone else ''}"


def run_blocks(runs: Sequence[Run]) -> list[Block]:
    """All blocks of the page about runs. Repeats are grouped."""
    part = primary_part(runs)
    groups = best_first(group(runs), f"{part}_accuracy")
    repeated = any(len(one.runs) > 1 for one in groups)
    curves = list(curve_blocks(groups, part))
    blocks = curves[:1]  # a page begins with a picture
    if len(runs) == 1:
        header, (cells,) = rows(runs)
        facts = {name: cell for name, cell in zip(header, cells, strict=True) if name != "run"}
        blocks.append(Facts(title="Results", caption=_caption(runs, header), facts=facts))
    elif repeated:
        blocks.append(_results_of_groups(groups, part))
    else:
        blocks.append(_results([one.runs[0] for one in groups], dots=min(len(groups), MANY)))
    blocks += [*caution_block(runs), *curves[1:], *measure_blocks(groups)]
    blocks += [*_ends(groups, part), *grid_block(group(runs), part)]
    blocks += [*privacy_blocks(groups, part), *cost_blocks(groups, part), *schedule_blocks(groups)]
    blocks += outcome_blocks(groups, part)
    blocks += [
        *personal_blocks(groups),
        *client_blocks(groups),
        *class_blocks(groups),
        *reliability_blocks(groups),
    ]
    blocks += [*_intervals(groups), *partition_blocks(groups)]
    if repeated:
        blocks.append(_results(runs, title="Each run"))
    if len(runs) > 1:
        blocks.append(_differences(runs))
    return [*_each_in_its_colour(blocks, groups), *details(runs)]


def _each_in_its_colour(blocks: Sequence[Block], groups: Sequence[Group]) -> Iterator[Block]:
    """Give each group the same colour in all curves, even if some groups are missing in one."""
    places = {one.name: i for i, one in enumerate(groups)}
    for block in blocks:
        if isinstance(block, Curves):
            own = [replace(line, place=places.get(line.name, line.place)) for line in block.lines]
            block = replace(block, lines=own)
        yield block


def headline(runs: Sequence[Run]) -> str:
    """The results in a sentence or two, the best first."""
    part, groups = primary_part(runs), group(runs)
    personal = all(run.is_personal for run in runs)
    metric = "personal_accuracy" if personal else f"{part}_accuracy"
    what = "accuracy" if personal else f"{PART_NAMES[part]} accuracy"
    if not personal and tested_at_clients(runs):
        metric, what = AT_CLIENTS, "accuracy on what clients hold out"
    scored = [(one, values) for one in groups if (values := one.finals(metric))]
    scored.sort(key=lambda pair: (not pair[0].is_sound, -fmean(pair[1])))
    silent = [one for one in groups if not one.finals(metric)]
    sentences = []
    if scored:
        (first, values), *others = scored if len(scored) <= NAMED + 1 else scored[:NAMED]
        over, ends = "", None if personal else final_interval(runs[0], part)
        if len(values) > 1:
            over = f" (mean of {len(values)} seeds)"
        elif len(runs) == 1 and ends is not None:
            low, high = (format_number(end, True) for end in ends)
            over = f" (95% interval {low} to {high})"
        reached = f"{mean_and_std(values, percent=True)} {what}"
        reached += " with clients' own models, on average over clients," * personal
        words = [f"{first.name} reached {reached}{over} {_end(first)}"]
        for one, values in others:
            same = "" if _end(one) == _end(first) else f" {_end(one)}"
            words.append(f"{one.name} {mean_and_std(values, percent=True)}{same}")
        if rest := scored[len(words) :]:
            lowest, highest = (format_number(fmean(rest[i][1]), True) for i in (-1, 0))
            words.append(f"{len(rest)} more between {lowest} and {highest}")
        sentences.append("; ".join(words))
    for one in silent[:NAMED]:
        losses = one.finals("train_loss")
        loss = f"; its training loss was {decimal(fmean(losses))}" if losses else ""
        sentences.append(f"{one.name} was not evaluated{loss} {_end(one)}")
    if silent[NAMED:]:
        sentences.append(f"{len(silent) - NAMED} more were not evaluated")
    if scored and (told := different_data(runs)):
        sentences.append(told)
    if len(runs) == 1:
        sentences += filter(None, [sums_line(runs[0]), privacy_line(runs[0])])
    return "\n".join([". ".join(sentences) + ".", *caution_words(runs)])


def caution_words(runs: Sequence[Run]) -> list[str]:
    """What the accuracies of runs hide, in full for a single run, else in a few words for each."""
    found = [(run.name, told) for run in runs if (told := cautions(run))]
    if len(runs) == 1:
        return [one.text for _, many in found for one in many]
    words = [f"{name} ({', '.join(one.short for one in many)})" for name, many in found[:NAMED]]
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return [f"But look closer: {', '.join([*words, *more])}."] if found else []


def caution_block(runs: Sequence[Run]) -> Iterator[Table]:
    """What the accuracies of several runs hide; the headline of a single run says it."""
    told = [(run.name, " ".join(one.text for one in cautions(run))) for run in runs]
    rows = [pair for pair in told if pair[1]]
    if rows and len(runs) > 1:
        yield Table(
            title="Look closer",
            caption="Classes, rounds and clients that are far from what the final accuracy "
            f"promises: by more than {100 * FAR:.0f} points, and more than few images explain.",
            header=["run", "what accuracy hides"],
            rows=rows,
            folded=len(rows) > MANY,
        )


def _ends(groups: Sequence[Group], part: str) -> Iterator[Intervals]:
    """Final accuracies: of repeats the mean ± std, of a single run the interval of its test."""
    metric = f"{part}_accuracy"
    scored = [one for one in groups if one.finals(metric)]
    if len(groups) < 2 or not scored:
        return
    values, lows, highs = zip(*(_around(one, part) for one in groups), strict=True)
    notes = [f"Accuracy on the {PART_NAMES[part]} examples at the end of each run."]
    if any(len(one.finals(metric)) > 1 for one in scored):
        notes.append("Of several seeds: the mean ± one standard deviation.")
    if any(len(one.finals(metric)) == 1 and final_interval(one.runs[0], part) for one in scored):
        notes.append("Of one seed: its 95% interval (Wilson's) on this test set alone.")
    told = different_data([run for one in scored for run in one.runs])
    yield Intervals(
        title=f"Final {PART_NAMES[part]} accuracy",
        name="final_accuracy",
        caption=" ".join([*notes, *([f"{told}."] if told else [])]),
        rows=[one.name for one in groups],
        series=[Marks("accuracy", values, lows, highs)],
        x_label=f"final {PART_NAMES[part]} accuracy",
        percent=True,
        dots=len(groups) <= MANY,
    )


def _around(one: Group, part: str) -> tuple[float | None, float | None, float | None]:
    """The final accuracy of a group, and the ends of what is drawn around it."""
    values = one.finals(f"{part}_accuracy")
    if len(values) > 1:
        return around(values)
    return values[0] if values else None, *(final_interval(one.runs[0], part) or (None, None))


def _results(runs: Sequence[Run], title: str = "Results", dots: int = 0) -> Table:
    header, body = rows(runs)
    told = _caption(runs, header)
    folded = title != "Results" and len(runs) > MANY
    return Table(title=title, caption=told, header=header, rows=body, folded=folded, dots=dots)


def _caption(runs: Sequence[Run], header: Sequence[str]) -> str:
    part = primary_part(runs)
    told = _unevaluated(runs, part) or f"Accuracy, loss and F1 on the {PART_NAMES[part]} examples."
    told += " A megabyte (MB) is a million bytes, over all clients and rounds."
    if "relative accuracy" in header:
        told += " Relative accuracy is that of the run over that of its centralised twin; rounds "
        told += "to 90% of it."
    return told


def _unevaluated(runs: Sequence[Run], part: str) -> str:
    """A sentence if no model was evaluated (any loss is then a training loss); else empty."""
    if evaluated_on(runs, part):
        return ""
    losses = any(run.has("train_loss") for run in runs)
    return "Nothing was evaluated" + (": the loss is that of local training." if losses else ".")


def _results_of_groups(groups: Sequence[Group], part: str) -> Table:
    runs = [run for one in groups for run in one.runs]
    measures = {
        "final accuracy": (f"{part}_accuracy", True),
        "final loss": (recorded_as(runs, part, "loss"), False),
        "macro F1": (f"{part}_f1", False),
        "AUROC": (f"{part}_auroc", False),
        "average precision": (f"{part}_average_precision", False),
        "relative accuracy": ("relative_accuracy", True),
    }
    kept = {k: m for k, m in measures.items() if any(one.finals(m[0]) for one in groups)}
    costs = {"MB up": ("bytes_up", 1e6), "MB down": ("bytes_down", 1e6), "seconds": ("seconds", 1)}
    body = []
    for one in groups:
        cells = [mean_and_std(one.finals(metric), percent) for metric, percent in kept.values()]
        for column, unit in costs.values():
            spent = one.values(partial(Run.total, column=column))
            cells.append(decimal(fmean(spent) / unit, 1) if spent else NONE)
        status = ", ".join(sorted({run.status for run in one.runs}))
        body.append([one.name, *cells, str(len(one.runs)), one.runs[0].algorithm, status])
    blind = _unevaluated(runs, part)
    told = f". {blind}" if blind else f", on the {PART_NAMES[part]} examples."
    return Table(
        title="Results",
        caption=f"Means ± one standard deviation over seeds{told} A megabyte (MB) is a million "
        "bytes, over all clients and rounds of one run.",
        header=["experiment", *kept, *costs, "seeds", "algorithm", "status"],
        rows=body,
        dots=min(len(groups), MANY),
    )


def _intervals(groups: Sequence[Group]) -> Iterator[Table]:
    """Tables of the confidence intervals of final measures, for runs that recorded them."""
    for one in groups:
        run = one.runs[0]
        known = table_in(run.summary, "intervals")
        found = {name: ends for name in known if (ends := interval_in(known, name))}
        rows = [[n, *map(decimal, (run.final(n), *ends))] for n, ends in found.items()]
        if rows:
            yield Table(
                title="Intervals" + (f": {one.name}" if len(groups) > 1 else ""),
                caption="Final measures with their 95% intervals by bootstrap: those of clients by "
                "drawing clients, the others by drawing examples. Of repeats, the first run.",
                header=["measure", "value", "from", "to"],
                rows=rows,
            )


def _differences(runs: Sequence[Run]) -> Block:
    title = "Settings that differ"
    keys, values = differences(runs)
    if not keys:
        return Text(title=title, paragraphs=["None: every run was given the same experiment."])
    body = [[run.name, *row] for run, row in zip(runs, values, strict=True)]
    return Table(title=title, header=["run", *keys], rows=body, folded=len(runs) > MANY)


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The settings in which runs differ, and one row of their values for each run."""
    flat = [settings(run.experiment) for run in runs]
    differ = differing(flat)
    return differ, [[written(one.get(key)) for key in differ] for one in flat]


def details(runs: Sequence[Run]) -> Iterator[Text]:
    """The experiment and the manifest of each run."""
    yield Text(
        title="The run in full" if len(runs) == 1 else "Each run in full",
        paragraphs=[" · ".join(_facts(runs[0]))] if len(runs) == 1 else (),
    )
    for run in runs:
        manifest = json.dumps(run.manifest, indent=2, ensure_ascii=False)
        if len(runs) == 1:
            yield Text(title=EXPERIMENT, code=run.toml, folded=True)
            yield Text(title=MANIFEST, code=manifest, folded=True)
        else:
            about = [" · ".join(_facts(run))]
            both = f"{run.toml}\n\n{manifest}"
            name = f"run {run.name}"
            yield Text(title=run.name, name=name, paragraphs=about, code=both, folded=True)


def _facts(run: Run) -> list[str]:
    flat = settings(run.experiment)
    facts = data_names([run]) if "dataset" in flat else []
    facts += [str(flat["model"])] if "model" in flat else []
    if isinstance(parameters := run.manifest.get("parameters"), int):
        facts.append(f"{parameters:,} parameters")
    clients = flat.get("clients.count") or (run.partition or {}).get("num_clients")
    if clients is not None:
        asked = flat.get("clients.per_round", 1.0)
        some = f"{asked} a round"
        if isinstance(asked, float):  # a share of all clients
            some = "all in every round" if asked == 1 else f"{100 * asked:g}% a round"
        facts.append(f"{count_of(clients, 'client')}, {some}")
    if (emd := number(run.summary.get("emd"))) is not None:
        facts.append(f"EMD {emd:.2f} ({EMD})")
    if (reached := number(table_in(run.summary, "twin").get("accuracy"))) is not None:
        facts.append(f"centralised twin {format_number(reached, True)}")
    if "device" in run.manifest:
        facts.append(written(run.manifest["device"]))
    if peak := number(run.summary.get("peak_memory_bytes")):
        facts.append(f"peak memory {peak / 1e9:.1f} GB")
    return facts


def _end(one: Group) -> str:
    run = min(one.runs, key=lambda run: (run.status == "finished", run.num_rounds))
    rounds = count_of(run.num_rounds, "round")
    alike = sum(other.status == run.status for other in one.runs)
    some = "" if alike == len(one.runs) else f"{alike} of {len(one.runs)} runs "
    whose = f"of {some}the" if some else "its"
    ends = {
        "diverged": f"({some}diverged in round {run.num_rounds})",
        "stopped": f"({some}stopped after {rounds}: too few clients reported)",
        "invalid": f"({whose} loss is {UNSOUND} after {rounds})",
        "interrupted": f"({some}interrupted after {rounds})",
        "running": f"(running, {rounds})",
    }
    early = f" ({written(run.summary['reason'])})" if "reason" in run.summary else ""
    return ends.get(run.status, f"after {rounds}{early}")


def common_folder(runs: Sequence[Run]) -> Path:
    """The folder of a single run, or the lowest folder that contains all runs."""
    if len(runs) == 1:
        return runs[0].folder
    try:
        common = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    except ValueError:  # the runs are on two drives
        common = Path("/")
    if common == Path(common.anchor):
        raise ValueError("the runs have no folder in common: name one for the report")
    return common
