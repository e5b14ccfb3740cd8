"""The page that compares algorithms, or other variants, on the same work with the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fedlens.report.blocks import (
    Bars,
    Block,
    Curves,
    Intervals,
    Line,
    Series,
    Table,
    Text,
)
from fedlens.report.curves import curve_blocks
from fedlens.report.groups import Group, in_all, mean_and_std
from fedlens.report.numbers import NONE, Cell, format_number
from fedlens.report.page import render_page
from fedlens.report.pairs import (
    SURE,
    Pair,
    Score,
    Task,
    by_seed,
    check_target,
    estimate,
    pair_rows,
    pairs,
    picture_of,
    ranks,
    tasks,
    unequal_rounds,
)
from fedlens.report.runs import caution_block, caution_words, common_folder, details
from fedlens.runs.records import is_number, number, primary_part, read_all, rounds_to
from fedlens.storage.run_files import Folders, runs_in

MOST_TASKS = 2  # with more tasks than this, each has its accuracy curves alone
WAYS = ("up", "down")  # that bytes are sent
EASY = 0.9  # share of the best final accuracy that is the target if none is given


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison."""

    tasks: list[Task]
    pairs: list[Pair]
    verdicts: list[str]  # for each pair, in words: is one better than the other?
    summary: str  # the verdict if there is one pair, else how many differences are significant
    page: Path
    left_out: str = ""  # the runs that did not finish, if any
    unequal: str = ""  # the numbers of rounds, if runs differ in them

    def __repr__(self) -> str:
        return f"<Comparison: {self.summary} Page: {self.page}>"


def compare(
    folders: Folders | Mapping[str, Folders],
    by: str | None = None,
    target: float | None = None,
    last: int | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare finished runs, and write the page to `out`/report.html.

    Variants differ in the settings under `by` (such as `algorithm`, or `local.lr,model`). If
    `folders` maps names to run folders, its keys are the variants instead. Runs of two variants
    are paired by seed. They are compared by the mean accuracy of the `last` evaluations: see
    `pairs.Score`. The costs are those of reaching the accuracy `target`. Without `out` the page
    goes to `comparison` in the folder that the runs have in common.
    """
    check_target(target, "target")
    called: dict[Path, str] = {}
    if isinstance(folders, Mapping):
        if by is not None:
            raise ValueError("variants have names, or are told apart by settings: leave out one")
        inside = {name: runs_in(some) for name, some in folders.items()}
        called = {one.resolve(): name for name, some in inside.items() for one in some}
        folders = [one for some in inside.values() for one in some]
    runs = read_all(runs_in(folders))
    finished = [run for run in runs if run.status == "finished"]
    left_out = [f"{run.name} ({run.status})" for run in runs if run.status != "finished"]
    unfinished = f"did not finish: {', '.join(left_out)}" if left_out else ""
    these = f"; these {unfinished}" if left_out else ""
    part = primary_part(finished)
    finished = [run for run in finished if run.final(f"{part}_accuracy") is not None]
    if not finished:
        raise ValueError(f"no run finished with an accuracy: name runs that did{these}")
    score = Score.of(finished, part, last)
    keys = [key.strip() for key in by.split(",")] if by else []
    names = [called[run.folder.resolve()] for run in finished] if called else None
    found = tasks(finished, keys, names)
    if all(len(task.variants) < 2 for task in found):
        raise ValueError(
            "there is nothing to compare: name runs of two or more variants that are alike in all "
            f"other settings{these}"
        )
    if part == "test":
        for task in found:
            _check_same_tests(task)
    paired = pairs(found, score)
    unequal = unequal_rounds(found)
    summary = _summary(found, paired)
    blocks = [
        *(
            Text(title=title, paragraphs=[words])
            for title, words in (
                ("Not compared", f"Left out, since they {unfinished}." if left_out else ""),
                ("Different numbers of rounds", unequal),
            )
            if words
        ),
        *_picture_of_differences(paired),
        _results(found, paired, score),
        *([_differences(paired)] if len(paired) > 1 else ()),  # the summary has a single one
        *caution_block(finished),
        *_pictures(found, part, score),
        _to_target(found, score, target),
        *_ranks(found, score),
        *details(runs),
    ]
    folder = Path(out) if out is not None else common_folder(runs) / "comparison"
    headline = "\n".join([summary, *caution_words(finished)])
    page = render_page(f"{' or '.join(_names(found))}?", headline, blocks, folder, progress)
    verdicts = [pair.words() for pair in paired]
    return Comparison(found, paired, verdicts, summary, page, unfinished, unequal)


def _check_same_tests(task: Task) -> None:
    """Raise if runs were tested on different examples: their accuracies are not comparable."""
    runs = [run for group in task.variants for run in group.runs if "test_data" in run.manifest]
    for run in runs:
        if run.manifest["test_data"] != runs[0].manifest["test_data"]:
            raise ValueError(
                f"{runs[0].folder} and {run.folder} were tested on different images, so "
                "which is better cannot be told: run both on the same data set, or try one on the "
                "other's with `fedlens evaluate`"
            )


def _summary(found: Sequence[Task], paired: Sequence[Pair]) -> str:
    if len(paired) == 1:
        return paired[0].words()
    num_runs = sum(len(group.runs) for task in found for group in task.variants)
    tested = [pair.p for pair in paired if pair.p is not None]
    sure = sum(p < SURE for p in tested)
    over = f" on {len(found)} tasks" if len(found) > 1 else ""
    told = (
        f"{sure} of {len(tested)} tested differences of {paired[0].measure} can be told from chance"
    )
    return f"{num_runs} runs{over}: {told}."


def _names(found: Sequence[Task]) -> list[str]:
    """The names of all variants."""
    return list(dict.fromkeys(group.name for task in found for group in task.variants))


def _picture_of_differences(paired: Sequence[Pair]) -> Iterator[Intervals]:
    """How far one variant is ahead of another, pair by pair; not significant ones are grey."""
    found = {}
    for pair in paired:
        if pair.difference is not None and pair.difference.n > 1:
            first, second, far = pair.ahead()
            found[f"{first} − {second}{f' ({pair.task})' if pair.task else ''}"] = far
    if found:
        yield picture_of(
            found,
            title="How far is one ahead of another?",
            name="ahead",
            caption=f"Differences of {paired[0].measure} in points, paired by seed: the mean, and "
            "its 95% confidence interval. What cannot be said to be better is grey.",
        )


def _results(found: Sequence[Task], paired: Sequence[Pair], score: Score) -> Table:
    """Mean accuracies: a row for each variant; with several tasks a row for each task."""
    names = _names(found)
    rows: list[list[Cell]] = []
    strong = set()
    for task in found:
        finals = {group.name: group.values(score) for group in task.variants}
        best = max(finals, key=lambda name: fmean(finals[name]))
        rivals = [p for p in paired if p.task == task.name and best in (p.one, p.other)]
        if rivals and all(pair.is_sure and pair.ahead()[0] == best for pair in rivals):
            strong.add((len(rows), 1 + names.index(best)))
        cells = [mean_and_std(finals.get(name, []), percent=True) for name in names]
        seeds = sorted({len(group.runs) for group in task.variants})
        rows.append([task.name, *cells, " or ".join(map(str, seeds))])
    header, dots = ["task", *names, "seeds"], 0
    if len(found) == 1:
        seeds_of = [str(len(group.runs)) for group in found[0].variants]
        rows = [list(row) for row in zip(names, rows[0][1:-1], seeds_of, strict=True)]
        strong = {(column - 1, 1) for _, column in strong}
        header, dots = ["variant", score.words, "seeds"], len(names)
    return Table(
        title=score.words.capitalize(),
        name="results",
        caption="Mean ± one standard deviation over seeds. What can be said to be better than all "
        "others stands out.",
        header=header,
        rows=rows,
        strong=frozenset(strong),
        dots=dots,
    )


def _differences(paired: Sequence[Pair]) -> Table:
    header, rows = pair_rows(paired)
    return Table(
        title="Paired differences",
        caption=f"The first minus the second, in points of {paired[0].measure}, over the n "
        "seeds that both were run with; intervals and two-sided p-values are Student's. What can "
        "be said to be better stands out. p-values, not intervals, are corrected for "
        f"{len(paired)} comparisons (Holm).",
        header=header,
        rows=rows,
        strong=frozenset((i, 2) for i, pair in enumerate(paired) if pair.is_sure),
    )


def _pictures(found: Sequence[Task], part: str, score: Score) -> Iterator[Block]:
    """Curves of each task (accuracy alone if tasks are many), and bars of their ends."""
    many = len(found) > MOST_TASKS
    for task in found:
        of = f": {task.name}" if task.name else ""
        curves = [
            replace(block, title=f"{block.title}{of}", name="")  # named by the new title
            for block in curve_blocks(task.variants, part)
        ]
        yield from curves[:1] if many else curves
        lines = [line for line in _difference_lines(task, score.metric) if line.x]
        if lines and not many:
            yield Curves(
                title=f"Difference to {_reference(task).name} in points{of}",
                name=f"difference{of}",
                caption=f"What is compared, minus that of {_reference(task).name} with the same "
                "seed, round by round, in points. Bands are 95% confidence intervals of the mean.",
                lines=lines,
                y_label="difference, points",
                levels=[(_reference(task).name, 0.0)],
            )
    yield from [_ends(found, score)] if len(found) > 1 else []


def _ends(found: Sequence[Task], score: Score) -> Bars:
    """Accuracies at the end by task, a bar for each variant."""
    names = _names(found)
    finals = [{one.name: estimate(one.values(score)) for one in task.variants} for task in found]
    return Bars(
        title="Accuracy by task",
        name="final_accuracy",
        caption=f"{score.words.capitalize()}; whiskers are ± one standard deviation.",
        groups=[task.name for task in found],
        series=[
            Series(
                name,
                [one[name].mean if name in one else None for one in finals],
                [one[name].std if name in one else None for one in finals],
            )
            for name in names
        ],
        y_label=score.words,
        percent=True,
    )


def _reference(task: Task) -> Group:
    """The variant that the others are compared with: FedAvg if there is one, else the first."""
    plain = (group for group in task.variants if group.settings.get("algorithm") == "fedavg")
    return next(plain, task.variants[0])


def _difference_lines(task: Task, metric: str) -> Iterator[Line]:
    """The differences to the reference, with the same seeds, in each round that all have."""
    reference = _reference(task)
    for place, group in enumerate(task.variants):
        differences: list[dict[int, float]] = []
        for run, other in by_seed(group, reference) if group is not reference else ():
            there = dict(zip(*other.curve(metric), strict=True))
            points = zip(*run.curve(metric), strict=True)
            both = {at: 100 * (value - there[at]) for at, value in points if at in there}
            differences.append({at: value for at, value in both.items() if is_number(value)})
        shared = in_all(differences)
        found = [estimate(values) for values in shared.values()]
        line = Line(group.name, list(shared), [one.mean for one in found], place=place)
        if len(differences) > 1:
            low, high = [one.low for one in found], [one.high for one in found]
            line = replace(line, low=low, high=high)
        yield line


def _to_target(found: Sequence[Task], score: Score, target: float | None) -> Table:
    tasked = any(task.name for task in found)
    rows: list[list[Cell]] = []
    for task in found:
        best = max(fmean(group.values(score)) for group in task.variants)
        wanted = target if target is not None else round(EASY * best, 2)
        for group in task.variants:
            rounds, megabytes = [], []
            for run in group.runs:
                if (at := rounds_to(run.rounds, wanted, score.metric)) is not None:
                    records = [row for row in run.rounds if row["round"] <= at]
                    ways = [number(row.get(f"bytes_{way}")) for row in records for way in WAYS]
                    rounds.append(float(at))
                    megabytes.append(sum(filter(None, ways)) / 1e6)
            share = f"{len(rounds)} of {len(group.runs)}"
            cells = [format_number(wanted, True), share, _spread(rounds), _spread(megabytes)]
            rows.append([group.name, *([task.name] if tasked else []), *cells])
    chosen = "" if target is not None else " The target is 90% of the best mean accuracy."
    return Table(
        title="What the target costs",
        caption=f"Rounds, and megabytes sent up and down by all clients, until accuracy first "
        f"reached the target: mean ± std over the runs that reached it.{chosen}",
        header=["variant", *(["task"] * tasked), "target", "reached it", "rounds", "MB"],
        rows=rows,
    )


def _ranks(found: Sequence[Task], score: Score) -> Iterator[Table]:
    names = _names(found)
    whole = [task for task in found if len(task.variants) == len(names)]
    if len(whole) < 2:
        return
    table = []
    for task in whole:
        finals = {group.name: fmean(group.values(score)) for group in task.variants}
        table.append(ranks([finals[name] for name in names]))
    means = [fmean(column) for column in zip(*table, strict=True)]
    body: list[list[Cell]] = [
        [task.name, *(f"{rank:g}" for rank in row)] for task, row in zip(whole, table, strict=True)
    ]
    yield Table(
        title="Ranks over tasks",
        caption=f"1 is the highest {score.words}; equals share their places. Only tasks "
        "that every variant was run on.",
        header=["task", *names],
        rows=[*body, ["mean rank", *(f"{mean:.2f}" for mean in means)]],
        strong=frozenset({(len(body), 1 + means.index(min(means)))}),
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return NONE
    found = estimate(values)
    return f"{found.mean:,.1f}" + ("" if found.std is None else f" ± {found.std:,.1f}")
