"""Write the JSON files in src/fedlens from which commands print help without importing PyTorch.

    python tools/make_described.py

described.json: the meaning of each key of an experiment, from the docs. named.json: everything that
can be chosen by name, with its options. schema.json: the JSON Schema of experiment files.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "fedlens"
LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


SECTIONS = {"stop": "schedules.md", "faults": "faults.md", "reporting": "faults.md"}
"""Sections of an experiment whose keys are listed on another page of the docs."""


def described() -> dict[str, str]:
    """The description of each key: the last column of its row, with links as page names."""
    found = {}
    for line in (DOCS / "experiments.md").read_text(encoding="utf-8").splitlines():
        if (row := re.fullmatch(r"\| `([a-z_.0-9]+)` \|[^|]*\|[^|]*\| (.*) \|", line)) is not None:
            found[row[1]] = LINK.sub(_page, row[2]).replace("`", "")
        elif line == "## Names":
            break
    for section, page in SECTIONS.items():
        found |= _section(section, (DOCS / page).read_text(encoding="utf-8"))
    return found


def _section(name: str, text: str) -> dict[str, str]:
    """The keys of a section, from the table whose first column is headed by its name."""
    lines = iter(text.splitlines())
    heading = next(line for line in lines if line.startswith(f"| {name} |"))
    last = heading.split("|")[-2].strip()
    begin = "" if last == "meaning" else f"{last} "
    found = {}
    for line in lines:
        if (row := re.fullmatch(r"\| `([a-z_]+)` \|[^|]*\| (.*) \|", line)) is not None:
            found[f"{name}.{row[1]}"] = begin + LINK.sub(_page, row[2]).replace("`", "")
        elif found:
            break
    return found


def _page(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    return f"docs/{text}" if text.endswith(".md") else f"{text} (docs/{_file(target)})"


def _file(target: str) -> str:
    return target.partition("#")[0] or "experiments.md"


def as_text(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    (PACKAGE / "described.json").write_text(as_text(described()), encoding="utf-8")
    from fedlens import schema  # it reads that file

    (PACKAGE / "named.json").write_text(as_text(schema.named()), encoding="utf-8")
    (PACKAGE / "schema.json").write_text(as_text(schema.schema()), encoding="utf-8")


if __name__ == "__main__":
    main()
