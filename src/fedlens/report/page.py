"""One HTML page about one or more runs, and its figures as files beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.files import write_atomically
from fedlens.report.records import (
    NONE,
    SPOKEN,
    Run,
    decimal,
    number,
    part,
    percent,
    read_all,
    rows,
    settings,
)

NAMED = 5
"""How many runs the headline names before it sums up the rest."""


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write `report.html` and `figures/*.png` to `out`, and return the page's path.

    Without `out` they go to the run folder, or to the folder that several runs have in common.
    """
    import jinja2

    from fedlens.report import figures

    runs = read_all(folders)
    out = _common([run.folder for run in runs]) if out is None else Path(out)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.jinja")
    try:
        pictures = []
        for draw in (
            figures.accuracy,
            figures.relative_accuracy,
            figures.loss,
            figures.final_accuracy,
            figures.clients,
        ):
            path = out / "figures" / f"{draw.__name__}.png"
            picture = draw(runs, path)
            if picture:
                pictures.append(picture)
            else:
                path.unlink(missing_ok=True)  # an earlier report's
        header, body = rows(runs)
        page = template.render(
            title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
            headline=headline(runs),
            header=header,
            body=body,
            judged=SPOKEN[part(runs)],
            pictures=pictures,
            differences=differences(runs) if len(runs) > 1 else None,
            runs=[_details(run) for run in runs],
            colours=figures.COLOURS,
        )
        write_atomically(out / "report.html", page.encode())
    except OSError as error:
        raise ValueError(
            f"the report cannot be written to {out} ({error.strerror}): name another folder"
        ) from error
    return out / "report.html"


def headline(runs: Sequence[Run]) -> str:
    """What came out, in a sentence or two: the best run first."""
    judged = part(runs)
    metric = f"{judged}_accuracy"
    scored = [(y, run) for run in runs if (y := run.final(metric)) is not None]
    scored.sort(key=lambda pair: -pair[0])
    silent = [run for run in runs if run.final(metric) is None]
    sentences = []
    if scored:
        shown = scored if len(scored) <= NAMED + 1 else scored[:NAMED]
        (value, first), others = shown[0], shown[1:]
        words = [f"{first.name} reached {percent(value)} {SPOKEN[judged]} accuracy {_end(first)}"]
        for value, run in others:
            same = "" if _end(run) == _end(first) else f" {_end(run)}"
            words.append(f"{run.name} {percent(value)}{same}")
        rest = [value for value, _ in scored[len(shown) :]]
        if rest:
            words.append(f"{len(rest)} more between {percent(rest[-1])} and {percent(rest[0])}")
        sentences.append("; ".join(words))
    for run in silent[:NAMED]:
        loss = run.final("train_loss")
        told = "" if loss is None else f"; its training loss was {decimal(loss)}"
        sentences.append(f"{run.name} was not evaluated{told} {_end(run)}")
    if silent[NAMED:]:
        sentences.append(f"{len(silent) - NAMED} more were not evaluated")
    return ". ".join(sentences) + "."


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The settings in which runs differ, and one row of their values a run."""
    flat = [settings(run.experiment) for run in runs]
    columns = {
        key: [_value(one[key]) if key in one else NONE for one in flat]
        for key in dict.fromkeys(key for one in flat for key in one)
    }
    differ = [key for key, values in columns.items() if len(set(values)) > 1]
    return differ, [[columns[key][place] for key in differ] for place in range(len(runs))]


def _end(run: Run) -> str:
    rounds = f"{run.num_rounds} round{'' if run.num_rounds == 1 else 's'}"
    ends = {"diverged": f"(diverged in round {run.num_rounds})"}
    ends |= {"interrupted": f"(interrupted after {rounds})", "running": f"(running, {rounds})"}
    return ends.get(run.status, f"after {rounds}")


def _details(run: Run) -> dict[str, Any]:
    """What a page says of one run besides its figures."""
    flat = settings(run.experiment)
    facts = [str(flat[key]) for key in ("dataset", "model") if key in flat]
    parameters, clients = run.manifest.get("parameters"), flat.get("clients.count")
    if isinstance(parameters, int):
        facts.append(f"{parameters:,} parameters".replace(",", "\u202f"))
    if clients is None and run.partition:
        clients = run.partition.get("num_clients")
    if clients is not None:
        per_round = flat.get("clients.per_round")
        facts.append(f"{clients} clients" + (f", {per_round} a round" if per_round else ""))
    emd = number(run.summary.get("emd"))
    if emd is not None:
        facts.append(f"EMD {emd:.2f}")
    twin = run.summary.get("twin")
    reached = number(twin.get("accuracy")) if isinstance(twin, dict) else None
    if reached is not None:
        facts.append(f"centralised twin {percent(reached)}")
    if "device" in run.manifest:
        facts.append(_value(run.manifest["device"]))
    peak = number(run.summary.get("peak_memory_bytes"))
    if peak:
        facts.append(f"peak memory {peak / 1e9:.1f} GB")
    return {
        "name": run.name,
        "status": run.status,
        "facts": facts,
        "experiment": (run.folder / "experiment.toml").read_text("utf-8").strip(),
        "manifest": json.dumps(run.manifest, indent=2, ensure_ascii=False),
    }


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _common(folders: Sequence[Path]) -> Path:
    if len(folders) == 1:
        return folders[0]
    try:
        common = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    except ValueError:  # two drives
        common = Path("/")
    if common == Path(common.anchor):
        raise ValueError("the runs have no folder in common: name one for the report")
    return common
