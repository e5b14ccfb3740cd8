"""Lines of JSON, each with `chain`: a hash of its content and of the chain of the line before.

So a line that is changed, inserted or taken out breaks all that follow.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any


def chained(chain: str, content: dict[str, Any]) -> str:
    """The chain of a line with this content, after a line with that chain."""
    text = json.dumps([chain, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def written(chain: str, content: dict[str, Any]) -> tuple[bytes, str]:
    """A line, and its chain."""
    chain = chained(chain, content)
    return json.dumps({**content, "chain": chain}).encode() + b"\n", chain


def parsed(line: bytes) -> tuple[dict[str, Any], str]:
    """The content of a line and the chain that it has; a ValueError for any other bytes."""
    try:
        content = json.loads(line)
        return content, str(content.pop("chain"))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it has no chain") from error


def append(handle: int, end: int, content: bytes) -> None:
    """Write at the end, to the disk. What an earlier write left there of a line is overwritten."""
    os.ftruncate(handle, end)
    done = 0
    while done < len(content):
        done += os.pwrite(handle, content[done:], end + done)
    os.fsync(handle)
