"""Pages for the gallery of the documentation, as the commands write them: `make docs` runs this."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEW = """rounds=8 evaluate.metrics='["auroc"]' clients.holdout=0.2"""
PAGES = {
    "run": ("One run", f"run examples/quickstart.toml {FEW}"),
    "compare": (
        "Two experiments, compared",
        "compare examples/decay.toml examples/cosine-steps.toml rounds=4 --seeds 2",
    ),
    "private": ("A run with differential privacy", "run examples/private.toml"),
    "finding": ("A finding, from stored runs", "reproduce findings/double-softmax"),
    "table": (
        "A table of a paper, ours beside theirs",
        "reproduce fedns/table1 --scale paper --from results/papers",
    ),
}
"""By name: the title of a page, and the command that writes it."""


def make(name: str, folder: Path) -> None:
    """Run the command of a page; keep the page, and its first figure."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / name
        words = shlex.split(PAGES[name][1])
        command = [sys.executable, "-m", "fedlens", *words, "--out", str(out), "--quiet"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        shutil.copy(out / "report.html", folder / f"{name}.html")
        figure = sorted((out / "figures").glob("*.png"), key=lambda file: file.stat().st_ctime)[0]
        shutil.copy(figure, folder / f"{name}.png")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, PAGES, [folder] * len(PAGES)))
