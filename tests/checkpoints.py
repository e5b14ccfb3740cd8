"""What tests of checkpoints share."""

import torch

from fedlens.rounds import State
from fedlens.runs.folder import RunFolder


def load_state(folder: RunFolder) -> State:
    """The state that a folder holds."""
    found = folder.load_checkpoint(torch.device("cpu"))
    assert found is not None
    return found.state
