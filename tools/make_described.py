"""Print src/fedlens/described.json: what each key of an experiment means, as the docs say it.

python tools/make_described.py > src/fedlens/described.json
"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


def described() -> dict[str, str]:
    """By key: the last column of its row, links as the names of their pages."""
    found = {}
    for line in (DOCS / "experiments.md").read_text(encoding="utf-8").splitlines():
        if (row := re.fullmatch(r"\| `([a-z_.0-9]+)` \|[^|]*\|[^|]*\| (.*) \|", line)) is not None:
            found[row[1]] = LINK.sub(_page, row[2]).replace("`", "")
        elif line == "## Names":
            break
    return found


def _page(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    return f"docs/{text}" if text.endswith(".md") else f"{text} (docs/{_file(target)})"


def _file(target: str) -> str:
    return target.partition("#")[0] or "experiments.md"


if __name__ == "__main__":
    print(json.dumps(described(), indent=1, ensure_ascii=False))
