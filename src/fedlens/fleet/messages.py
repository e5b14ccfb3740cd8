"""What is in a message of Flower: a text of facts, and the bytes of tensors."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlens.fleet import STAGES

TYPES = {"sizes": "query.sizes", "train": "train.train", "test": "evaluate.test"}
TYPES |= {stage: f"query.{stage}" for stage in STAGES}
RAISED, ENDED = 2, 8  # Flower's codes for an app that raised an error, and for one that ended
FACTS, TENSORS = "facts", "tensors"
SMALL = 2**20  # bytes: an array of its own takes three more calls of the server


def packed(facts: str, content: bytes) -> RecordDict:
    """The content of a message; Flower sends a long array in pieces."""
    if len(content) <= SMALL:
        return RecordDict({FACTS: ConfigRecord({"json": facts, TENSORS: content})})
    array = Array("uint8", (len(content),), "safetensors", content)
    return RecordDict({FACTS: ConfigRecord({"json": facts}), TENSORS: ArrayRecord({"all": array})})


def unpacked(content: RecordDict) -> tuple[str, bytes]:
    """What `packed` was given; a ValueError for any other content."""
    try:
        facts = content[FACTS]
        tensors = content[TENSORS]["all"].data if TENSORS in content else facts[TENSORS]
        if isinstance(facts["json"], str) and isinstance(tensors, bytes):
            return facts["json"], tensors
        raise ValueError("it is of another kind")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
