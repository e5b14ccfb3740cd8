"""Run the notebooks of examples/, and keep what they show: `tools/notebooks.py [NAME ...]`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def execute(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(path, place)
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        resources = {"metadata": {"path": place}}
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(file.stem for file in EXAMPLES.glob("*.ipynb")):
        execute(EXAMPLES / f"{name}.ipynb")
