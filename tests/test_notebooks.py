"""The notebooks of examples/, run by a kernel of Jupyter as a person would."""

import asyncio
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.ipynb"))}

Cells = list[Any]


def run(folder: Path) -> dict[str, Cells]:
    """The cells with code of each notebook, after they were run; errors of theirs are raised.

    One kernel runs them all, since to import PyTorch takes longer than they do; but each begins
    without what those before it have defined.
    """
    own = {"XDG_CACHE_HOME": "cache", "IPYTHONDIR": "ipython", "JUPYTER_DATA_DIR": "jupyter"}
    environment = os.environ | {name: str(folder / place) for name, place in own.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        import nbformat
        from nbclient import NotebookClient

        read = {name: nbformat.read(path, as_version=4) for name, path in NOTEBOOKS.items()}
        for cell in read["first_run"].cells:  # shorter: what is stored shows that it learns
            cell.source = cell.source.replace("rounds=30", "rounds=3").replace("=10)", "=2)")
        whole = nbformat.v4.new_notebook()
        for one in read.values():
            whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *one.cells]
        client = NotebookClient(
            whole,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        asyncio.run(client.async_execute(env=environment))
    return {
        name: [cell for cell in one.cells if cell.cell_type == "code"] for name, one in read.items()
    }


def shown(cells: Cells, kind: str) -> list[str]:
    """What the cells displayed of a kind, such as text/html."""
    outputs = [output for cell in cells for output in cell.outputs]
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def printed(cells: Cells, stream: str) -> str:
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == stream)


@pytest.mark.slow
def test_the_notebooks_run_and_show_what_they_say(tmp_path):
    notebooks = run(tmp_path)
    assert not any(printed(cells, "stderr") for cells in notebooks.values())

    html = shown(notebooks["first_run"], "text/html")
    curve = "data:image/svg"
    assert any(curve in text and "round 3/3" in text for text in html)  # while it trained
    assert any(curve in text and "finished, 3 rounds" in text for text in html)  # a result
    assert any("<table" in text and "train_loss" in text for text in html)  # of pandas
    assert len(shown(notebooks["first_run"], "image/png")) == 2  # of `plot`

    said = printed(notebooks["own_algorithm"], "stdout")
    assert "did you mean 'longest'?" in said
    assert "both hold" in said

    sites = notebooks["own_images"]
    (table,) = [text for text in shown(sites, "text/html") if "north" in text]
    assert all(word in table for word in ("west", "federated", "local_only"))
    assert "sites/south/ring/0.png" in printed(sites, "stdout")


def test_the_notebooks_carry_what_they_showed_and_a_first_run_that_learns():
    """`python tools/notebooks.py` runs them, and keeps it."""
    assert [*NOTEBOOKS] == ["first_run", "own_algorithm", "own_images"]
    for notebook in NOTEBOOKS.values():
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert all(cell["execution_count"] for cell in code)
        told = [output for cell in code for output in cell["outputs"]]
        assert told and all(output.get("name") != "stderr" for output in told)
        if notebook == NOTEBOOKS["first_run"]:
            text = "".join(str(output) for output in told)
            reached = re.search(r"test_accuracy</td><td>(0\.\d+)", text)
            assert reached is not None and float(reached[1]) > 0.7
