"""Write what commands say without importing PyTorch, into src/fedlens.

    python tools/make_described.py

described.json: what each key of an experiment means, as the docs say it. named.json: what can be
chosen by name, with its options. schema.json: the JSON Schema of experiment files.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "fedlens"
LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


SECTIONS = {"stop": "schedules.md", "faults": "faults.md", "reporting": "faults.md"}
"""The tables of an experiment that have a table of keys on another page."""


def described() -> dict[str, str]:
    """By key: the last column of its row, links as the names of their pages."""
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
    """The keys of a section: of the table whose first column is headed by its name."""
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
    (PACKAGE / "described.json").write_text(as_text(described()), encoding="utf-8")
    from fedlens import schema  # which reads that file

    (PACKAGE / "named.json").write_text(as_text(schema.named()), encoding="utf-8")
    (PACKAGE / "schema.json").write_text(as_text(schema.schema()), encoding="utf-8")


if __name__ == "__main__":
    main()
