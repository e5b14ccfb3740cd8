"""Blocks that pages of recipes share: our numbers beside published ones, curves, what was run.

A table of a recipe's experiments, with the settings in which they differ.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import compress
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment, Named, as_plain, fields_by_key
from fedlens.recipes.recipe import NUM_CLASSES, Measured, Recipe, Results, Scale
from fedlens.report.blocks import (
    Bars,
    Block,
    Curves,
    Intervals,
    Line,
    Series,
    Table,
    Text,
    is_drawn,
)
from fedlens.report.groups import written
from fedlens.report.numbers import NONE
from fedlens.report.pairs import estimate, picture_of
from fedlens.runs.records import Run, settings, spent
from fedlens.storage.words import count_of

OPENING = "What was run"
SAID = {
    "smoke": "This is a smoke test: a few rounds on the embedded images, to see that everything "
    "works. None of its numbers can be compared with the paper's.",
    "small": "This is a small version of the paper's experiment, made for a laptop: fewer rounds "
    "and a lighter model. The shape of the results can be compared with the paper's, the numbers "
    "cannot.",
}
OWN_SETTINGS = "These are the paper's own settings, as far as it states them"
OUR_EXPERIMENTS = (
    "The paper has no such experiments: these are ours, in its setting as far as it states one."
)
OTHER_DATA = (
    "This is not the paper's experiment: other data take the place of its own, or of some of them."
)
SPREAD = "Bands and ± are one standard deviation over seeds."
ONE_SEED = "One seed says nothing about the spread: more are run with --seeds."
MAY_DIFFER = (  # from a cell to its runs: when to evaluate is no change of an experiment
    *("seed", "weights", "engine", "device"),
    *("evaluate.every", "evaluate.at"),
)
CAPTIONS = "Captions"  # the section of notes with those of several items
MANY = 12  # longest list that is written in full
NOT_COMPARED = "Published numbers are of other data than ours."
CUT = "A mean over seeds ends where the first of its runs diverged."


def opening(recipe: Recipe, results: Results) -> Text:
    """The text about what was run, and whose settings it has."""
    runs = results.all
    if not runs:
        said = [recipe.stand_in or "The data are the paper's own. Nothing is trained."]
        return Text(title=OPENING, paragraphs=said)
    unlike = changed(recipe, results)
    count, missing = len(results.runs), [cell for cell in recipe.cells if not results.runs[cell]]
    numbers = sorted({len(of_cell) for of_cell in results.runs.values()})
    seeds = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    machines = {
        f"{m.get('device', '?')} ({m.get('cores', '?')} cores, torch {m.get('torch', '?')})"
        for m in (run.manifest for run in runs)
    }
    seconds = sum(map(_spent, runs))
    said = [
        *_whose(recipe, results, bool(unlike)),
        recipe.stand_in,
        f"Not as in the recipe: {', '.join(unlike)}." if unlike else "",
        f"{count} of the {len(recipe.cells)} experiments are here. Not run yet: "
        f"{_first_three(missing)}."
        if missing
        else "",
        _diverged(results, recipe.of_diverged),
        f"{count_of(count, 'experiment')}, {seeds} "
        f"seed{'s' if numbers[-1] > 1 else ''}{' each' if count > 1 else ''}, on "
        f"{' and '.join(sorted(machines))}: "
        f"{f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'} of training and "
        f"evaluation in all. {SPREAD if numbers[-1] > 1 else ONE_SEED}",
    ]
    return Text(title=OPENING, paragraphs=[*filter(None, said)])


def _whose(recipe: Recipe, results: Results, is_changed: bool) -> list[str]:
    """Sentences about whose settings and data these are."""
    fewer: dict[str, None] = {}  # data sets of which the runs have only some classes
    for run in results.all:
        name = str(settings(run.experiment)["dataset"])
        whole = NUM_CLASSES.get(name)
        if whole is not None and (count := len(run.manifest["classes"])) < whole:
            fewer[
                f"The data have {count} of the {whole} classes of {name}: that is an easier task, "
                "and no number can be compared with the published ones."
            ] = None
    if results.scale.name != "paper":
        return [SAID[results.scale.name], *fewer]
    if recipe.ours or recipe.other_data:
        return [OUR_EXPERIMENTS if recipe.ours else OTHER_DATA, *fewer]
    return [*fewer] or [OWN_SETTINGS + (", but for some that were changed." if is_changed else ".")]


def _diverged(results: Results, shown: str) -> str:
    """A sentence about experiments with diverged runs, and what is shown of these runs."""
    cells = [
        cell for cell, runs in results.runs.items() for run in runs if run.status == "diverged"
    ]
    if not cells:
        return ""
    count, of = len(cells), len(results.all)
    them = "it" if count == 1 else "them"
    shown = shown or f"What is shown of {them} was evaluated before that."
    some = _first_three([*dict.fromkeys(cells)])
    return f"{count} of {count_of(of, 'run')} diverged: {some}. {shown}"


def _first_three(cells: Sequence[str]) -> str:
    return "; ".join(cells[:3]) + (" and so on" if len(cells) > 3 else "")


def changed(recipe: Recipe, results: Results, except_for: Sequence[str] = ()) -> list[str]:
    """The settings of runs that differ from those of their cells, as key=value."""
    found: dict[str, None] = {}
    for cell, experiment in recipe.cells.items():
        planned = settings(experiment.plain())
        for run in results.runs[cell]:
            for key, value in settings(Experiment.of(run.experiment).plain()).items():
                if key not in (*MAY_DIFFER, *except_for) and value != planned.get(key):
                    found[f"{key}={_abridged(value)}"] = None
    return list(found)


def _abridged(value: object) -> str:
    """A setting as text; a long list is shortened to its beginning."""
    if not isinstance(value, list | tuple) or len(value) <= MANY:
        return str(value)
    return f"[{', '.join(map(str, value[:3]))}, ... ({len(value):,} in all)]"


def _spent(run: Run) -> float:
    """The time of training and evaluation; runs side by side each have their share."""
    if (seconds := spent(run.summary)) is not None:
        return seconds
    columns = ("seconds", "evaluation_seconds")
    return float(sum(row.get(name, 0.0) for row in run.rounds for name in columns))


def told(module: str, item: str, **values: str) -> tuple[str, str, Mapping[str, str]]:
    """The title of an item's page, what it is about, and captions by the titles of their blocks.

    They are in notes.md beside a paper's module, where the item's section is called ITEM: TITLE.
    Captions follow in it, each under its block's title; those of several items are in the section
    Captions. `values` take the place of their {names}.
    """
    notes = _notes(module)
    section = next(title for title in notes if title.startswith(f"{item}: "))
    about, *own = _filled(notes[section], values).split("\n### ")
    shared = notes.get(CAPTIONS, "").split("\n### ")[1:]
    captions: dict[str, str] = {}
    for title, _, said in (one.partition("\n") for one in (*own, *shared)):
        captions.setdefault(title, _joined(said))
    return _filled(section.removeprefix(f"{item}: "), values), _joined(about), captions


def recipe(
    module: str,
    scale: Scale,
    item: str,
    blocks: Callable[[Results], list[Block]],
    *,
    on: Sequence[str] = (),
    seeds: tuple[int, int, int] = (1, 1, 3),
    small: str = "",
    also: Sequence[str] = (),
    values: Mapping[str, str] = {},
    **more: Any,
) -> Recipe:
    """The recipe of an item, with its texts in notes.md and so many seeds at each scale.

    `on` are the paper's data sets: what replaces those that are not here is said first. `small` is
    said at the scale small, `also` at every scale. `values` are those of {names} in the texts.
    """
    words = [*dict.fromkeys(map(scale.instead, on)), small * (scale.name == "small"), *also]
    stand_in = " ".join(filter(None, words))
    texts, seeded = told(module, item, **values), range(scale.pick(*seeds))
    return Recipe(*texts, blocks, seeds=seeded, stand_in=stand_in, **more)


def captioned(block: Block, captions: Mapping[str, str]) -> Block:
    """The block with the caption under its title, before what it says itself.

    A {name} in a title stands for anything, and for the same in the caption.
    """
    for title, said in captions.items():
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(title))
        if match := re.fullmatch(pattern, block.title):
            caption = f"{_filled(said, match.groupdict())} {block.caption}".strip()
            return replace(block, caption=caption)
    return block


def note(module: str, title: str, **values: str) -> Text:
    """Another section of notes.md. Of several with one title, each is called ITEM / TITLE there."""
    said = _filled(_notes(module)[title], values).strip().split("\n\n")
    return Text(title=title.split(" / ")[-1], paragraphs=[*map(_joined, said)])


def sentences(module: str, *titles: str) -> str:
    """The words of sections of notes.md, as one paragraph."""
    return " ".join(_joined(_notes(module)[title]) for title in titles)


@cache
def _notes(module: str) -> Mapping[str, str]:
    """The text of each section of the notes beside a module, by title."""
    text = (files(module.rpartition(".")[0]) / "notes.md").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in text.split("\n## ")[1:])
    return {title: said for title, _, said in sections}


def published(module: str) -> dict[str, Any]:
    """The numbers that a paper prints: those in published.toml beside its module."""
    text = (files(module.rpartition(".")[0]) / "published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with values in the place of their {names}."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _joined(lines: str) -> str:
    return " ".join(lines.split())


def led_by_a_figure(blocks: Sequence[Block], told: Text) -> list[Block]:
    """A recipe's blocks with the first picture at the top and the text `told` below it.

    Bars, pictures and tables of experiments that were not run are left out.
    """
    shown: list[Block] = []
    for block in blocks:
        is_empty = isinstance(block, Table) and not block.rows
        if isinstance(block, Curves):
            is_empty = not any(line.x for line in block.lines if line.style != "dashed")
        elif isinstance(block, Bars):
            is_run = (any(height is not None for height in one.heights) for one in block.series)
            block = replace(block, series=[*compress(block.series, is_run)])
            is_empty = not block.series
        if not is_empty:
            shown.append(block)
    lead = next((one for one in shown if is_drawn(one)), None)
    return [*([lead] if lead else []), told, *(one for one in shown if one is not lead)]


def curves(
    results: Results,
    cells: Mapping[str, str] | Sequence[str] = (),
    measure: str = "test_accuracy",
    *,
    title: str,
    caption: str = "",
    published: Mapping[str, Sequence[float | None]] | None = None,
    x_label: str = "round",
    y_label: str = "",
    against: str = "",
) -> Curves:
    """A measure by round: the mean over seeds with its band, together with the published curves.

    A mean ends where the first of its runs diverged: the remaining runs would have another mean.
    `cells` are cells, all by default, or names of lines by cell. Published curves are dashed lines
    with the same names. With `against`, the curves show the difference to that cell.
    """
    names = cells if isinstance(cells, Mapping) else {cell: cell for cell in cells or results.runs}
    lines = [
        Line(name, range(1, len(values) + 1), values, style="dashed")
        for name, values in (published or {}).items()
    ]
    lines += [
        _line(results, cell, name, measure, against)
        for cell, name in names.items()
        if results.runs[cell]
    ]
    if any(line.note and line.low is not None for line in lines):
        caption = f"{caption} {CUT}".strip()
    return Curves(
        title=title,
        caption=caption,
        lines=lines,
        x_label=x_label,
        y_label=y_label or measure.replace("_", " "),
        percent="accuracy" in measure,
        styles={"solid": "ours", "dashed": "published"} if published else {},
    )


def _line(results: Results, cell: str, name: str, measure: str, against: str) -> Line:
    if against:
        both = [(_points(a, measure), _points(b, measure)) for a, b in results.pairs(cell, against)]
        runs = [{r: y - other[r] for r, y in run.items() if r in other} for run, other in both]
    else:
        runs = [_points(run, measure) for run in results.runs[cell]]
    ends = results.diverged(cell)
    note = "" if ends is None else f"diverged in round {ends}"
    last = math.inf if ends is None or len(runs) < 2 else ends - 1
    rounds = sorted({r for run in runs for r in run if r <= last})
    found = [Measured.of([run.get(r) for run in runs]) for r in rounds]
    mean = [m.mean if m else None for m in found]
    if len(runs) < 2:
        return Line(name, rounds, mean, note=note)
    low = [m.mean - (m.std or 0.0) if m else None for m in found]
    high = [m.mean + (m.std or 0.0) if m else None for m in found]
    return Line(name, rounds, mean, low, high, note=note)


def _points(run: Run, measure: str) -> dict[int, float]:
    return dict(zip(*run.curve(measure), strict=True))


def mean_of(found: Measured | None, digits: int = 2, times: float = 100) -> str:
    """A mean over seeds, with its spread if there are several, in %: multiplied by `times`."""
    if found is None:
        return NONE
    numbers = (found.mean,) if found.std is None else (found.mean, found.std)
    return " ± ".join(f"{times * number:,.{digits}f}" for number in numbers)


def bars(
    groups: Sequence[str],
    found: Mapping[str, Sequence[Measured | None]],
    *published: Series,
    title: str,
    caption: str = "",
    digits: int = 2,
) -> Bars:
    """Means of test accuracies over seeds with their spread: by series, one for each group."""
    return Bars(
        title=title,
        caption=caption,
        groups=groups,
        series=[
            *(
                Series(n, [f and f.mean for f in of], [f and f.std for f in of])
                for n, of in found.items()
            ),
            *published,
        ],
        y_label="test accuracy",
        percent=True,
        digits=digits,
    )


def at_the_end(results: Results, cell: str) -> str:
    """A cell's test accuracy after the last round, in %; if runs diverged, in which rounds."""
    return results.when_diverged(cell) or mean_of(results.final(cell))


Ours = Measured | float | str | None
"""A mean over seeds, a number that is no mean, or a text."""


def beside(
    rows: Iterable[tuple[str, float | None, Ours]],
    *,
    title: str,
    caption: str = "",
    of: str = "",
    percent: bool = True,
    digits: int = 2,
    compared: bool = True,
) -> Table:
    """Published numbers, ours, and ours minus published; `of` names the first column.

    If our data differ from the published ones, numbers are not `compared`: the difference is left
    out. Our numbers show their number of seeds, unless all have one run. A text may replace a
    missing number.
    """
    told = [
        (name, theirs, Measured.one(found) if isinstance(found, int | float) else found)
        for name, theirs, found in rows
    ]
    runs = max((found.runs for _, _, found in told if isinstance(found, Measured)), default=1)

    def said(value: float | None, sign: str = "") -> str:
        if value is None or not math.isfinite(value):
            return NONE
        return f"{100 * value if percent else value:{sign}.{digits}f}".replace("-", "−")

    def ours(found: Measured | str | None) -> str:
        if isinstance(found, str):
            return found
        if found is None or runs == 1 or not math.isfinite(found.mean):
            return said(found.mean if found else None)
        spread = "" if found.std is None else f" ± {said(found.std)}"
        return f"{said(found.mean)}{spread} ({found.seeds})"

    if all(theirs is None for _, theirs, _ in told):
        body = [[name, ours(found)] for name, _, found in told]
        return Table(title=title, caption=caption, header=(of or "", "ours"), rows=body)
    body = [[name, said(theirs), ours(found)] for name, theirs, found in told]
    if compared:
        for line, (_, theirs, found) in zip(body, told, strict=True):
            mean = found.mean if isinstance(found, Measured) else None
            line.append(NONE if mean is None or theirs is None else said(mean - theirs, "+"))
    return Table(
        title=title,
        caption=caption if compared else f"{caption} {NOT_COMPARED}".strip(),
        header=(of or "", "published", "ours", *(("ours − published",) if compared else ())),
        rows=body,
        published=frozenset({1}),
    )


def ahead(results: Results, pairs: Sequence[tuple[str, str]], *, title: str) -> Intervals:
    """A picture of paired differences in final test accuracy between two cells, by seed."""
    found = {f"{a} − {b}": estimate(d) for a, b in pairs if (d := results.differences(a, b))}
    return picture_of(
        found,
        title=title,
        caption="Differences in percentage points, paired by seed: the mean over seeds, and its "
        "95% confidence interval (Student's). What may be chance is grey.",
        x_label="points of test accuracy",
    )


def paired(
    results: Results, pairs: Sequence[tuple[str, str]], measure: str, *, title: str
) -> Table:
    """A table of paired differences in a final measure between two cells, by seed."""
    rows: list[list[str]] = []
    for cell, other in pairs:
        found = results.differences(cell, other, measure)
        row = estimate(found).cells() if found else [NONE, NONE, NONE, "0"]
        rows.append([f"{cell} − {other}", *row])
    return Table(
        title=title,
        caption="With one seed both start from the same model and see the same images, so that the "
        "difference has less spread than either. In percentage points; the interval and the "
        "p-value are Student's, for one comparison at a time.",
        header=("difference", "mean", "95% confidence interval", "chance", "seeds"),
        rows=rows,
    )


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
