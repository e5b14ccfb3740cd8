"""Keeps the runs of a reproduction, what its page can be drawn from again, and its figures as SVG.

    python tools/store_results.py reproductions/ghaemi/fedavg-paper results/papers/ghaemi/fedavg

Every finished run is stored as experiment.toml, manifest.json, summary.json, the rounds compressed,
and partition.json and evaluation.json if they exist. `--revision` sets the revision in the
manifests, for runs that were made from a copy without git history.
`fedlens reproduce ITEM --scale paper --from results/papers/...` draws the page.

For an item that trains nothing, the data of its page are stored instead, as csv, with their own
manifest: give the `--revision` and the `--command` that drew the page.

    python tools/store_results.py --back results/papers/fedns/table1 runs/fedns/table1-paper

restores stored runs as run folders, so that `fedlens reproduce` runs only the missing ones. They
have no models: a run that starts from the model of one of them needs that one to be run again.
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
    """Store the data of a page without runs as csv, with a manifest of their origin."""
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
    if (run / "partition.json").exists():  # written in one line: a table of clients and labels
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
    """Restore a stored run as a run folder; return False if the folder already exists."""
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
