"""The origin of measured numbers, which every JSON file in results/ contains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def origin() -> dict[str, str]:
    """The git revision of the code, with a + if files have changed since, and the command."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    script = Path(sys.argv[0]).resolve()
    named = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    return {
        "revision": found.stdout.strip() or "unknown",
        "command": " ".join(["python", str(named), *sys.argv[1:]]),
    }
