"""Keeps the runs of a reproduction, what its page can be drawn from again, and its figures as SVG.

    python tools/store_results.py reproductions/ghaemi/fedavg-paper results/papers/ghaemi/fedavg

Of every finished run: experiment.toml, manifest.json, summary.json, partition.json and
evaluation.json if there are any, and the rounds packed. With
`--revision` manifests get this one, where the runs were made from a copy without its history.
`fedlens reproduce ITEM --scale paper --from results/papers/...` draws the page.

Of an item that trains nothing the data behind its page are kept instead, as csv, with a manifest of
its own: name the `--revision` and the `--command` that drew it.

    python tools/store_results.py --back results/papers/fedns/table1 runs/fedns/table1-paper

lays stored runs out again, so that `fedlens reproduce` runs only what is not among them. They have
no models: what starts from one of them must be run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from pathlib import Path

from fedlens.run_files import OVER, read_status


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--revision")
    parser.add_argument("--command")
    parser.add_argument("--back", action="store_true")
    arguments = parser.parse_args()
    runs = sorted(place.parent for place in arguments.source.glob("runs/*/manifest.json"))
    if arguments.command and (runs or not arguments.revision):
        parser.error("--command is for an item that trains nothing, and needs --revision")
    if arguments.back:
        laid_out = [lay_out(run, arguments.target / "runs" / run.name) for run in runs]
        print(f"{sum(laid_out)} of {len(runs)} runs are laid out in {arguments.target}")
        return
    stored = [store(run, arguments.target, arguments.revision) for run in runs]
    if arguments.command:
        store_drawn(arguments.source, arguments.target, arguments.revision, arguments.command)
    figures = sorted(arguments.source.glob("figures/*.svg"))
    for figure in figures:
        place = arguments.target / "figures" / figure.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(figure, place)
    print(f"{sum(stored)} of {len(runs)} runs are over and stored in {arguments.target}")
    print(f"{len(figures)} figures stored")


def store_drawn(source: Path, target: Path, revision: str, command: str) -> None:
    """The data behind a page without runs, as csv, and where they come from."""
    (target / "data").mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("figures/*.csv")):
        shutil.copyfile(file, target / "data" / file.name)
    manifest = {"revision": revision, "command": command}
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def store(run: Path, target: Path, revision: str | None) -> bool:
    if read_status(run) not in OVER:
        return False
    place = target / "runs" / run.name
    place.mkdir(parents=True, exist_ok=True)
    for name in ("experiment.toml", "summary.json", "evaluation.json"):
        if (run / name).exists():
            shutil.copyfile(run / name, place / name)
    if (run / "partition.json").exists():  # in one line: it is a table of clients and labels
        held = json.loads((run / "partition.json").read_text(encoding="utf-8"))
        (place / "partition.json").write_text(json.dumps(held) + "\n", encoding="utf-8")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    if revision is not None:
        manifest["revision"] = revision
    (place / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    rounds = (run / "rounds.jsonl").read_bytes()
    (place / "rounds.jsonl.gz").write_bytes(gzip.compress(rounds, mtime=0))
    return True


def lay_out(stored: Path, place: Path) -> bool:
    """A stored run as a run folder; what is there already stays."""
    if place.exists():
        return False
    made = place.with_name(f".{place.name}.new")
    shutil.copytree(stored, made, dirs_exist_ok=True)
    rounds = made / "rounds.jsonl.gz"
    (made / "rounds.jsonl").write_bytes(gzip.decompress(rounds.read_bytes()))
    rounds.unlink()
    made.replace(place)
    return True


if __name__ == "__main__":
    main()
