"""`fedlens new`."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

ENDING = ".txt"  # suffix of the template files in the package, so that nothing imports them


def new_command(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
) -> None:
    """Create a project: experiment, model, algorithm, and tests."""
    from fedlens.storage.files import write_atomically
    from fedlens.storage.reading import argument

    if not re.fullmatch(r"[\w.-]+", name.name):
        raise ValueError(f"{name.name!r} cannot name a project: use letters, digits, _ and -")
    if name.exists():
        raise ValueError(f"{name} exists: choose another name")
    name.mkdir(parents=True)
    for file in sorted(files("fedlens.cli").joinpath("project").iterdir(), key=lambda f: f.name):
        text = file.read_text(encoding="utf-8").replace("# NAME\n", f"# {name.name}\n")
        path = name / file.name.removesuffix(ENDING)
        write_atomically(path, text.encode())
        print(path)
    print(f"next: cd {argument(name)} && fedlens run experiment.toml")
