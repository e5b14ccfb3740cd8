"""What is in a message of Flower: a text of facts, and the bytes of tensors."""

from __future__ import annotations

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlens.fleet import STAGES

TYPES = {"sizes": "query.sizes", "train": "train.train", "test": "evaluate.test"}
TYPES |= {"keep": "query.keep"}
TYPES |= {stage: f"query.{stage}" for stage in STAGES}
RAISED, ENDED = 2, 8  # Flower's codes for an app that raised an error, and for one that ended
FACTS, TENSORS = "facts", "tensors"
SMALL = 2**20  # bytes: an array of its own takes three more calls of the server
PIECE = 2**24  # bytes of an array: while Flower puts one together it holds it three times


def is_busy(error: Exception) -> bool:
    """Whether the SuperLink failed by itself, as when its database could not be written."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.is_server_error


def packed(facts: str, content: bytes) -> RecordDict:
    """The content of a message."""
    if len(content) <= SMALL:
        return RecordDict({FACTS: ConfigRecord({"json": facts, TENSORS: content})})
    pieces = [content[first : first + PIECE] for first in range(0, len(content), PIECE)]
    arrays = ArrayRecord(
        {str(n): Array("uint8", (len(one),), "safetensors", one) for n, one in enumerate(pieces)}
    )
    return RecordDict({FACTS: ConfigRecord({"json": facts}), TENSORS: arrays})


def unpacked(content: RecordDict) -> tuple[str, bytes]:
    """What `packed` was given; a ValueError for any other content."""
    try:
        facts, arrays = content[FACTS], content.get(TENSORS, {})
        pieces = [arrays[str(n)].data for n in range(len(arrays))]
        tensors = b"".join(pieces) if pieces else facts[TENSORS]
        if isinstance(facts["json"], str) and isinstance(tensors, bytes):
            return facts["json"], tensors
        raise ValueError("it is of another kind")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
