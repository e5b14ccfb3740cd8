"""What tests of checkpoints share."""

from pathlib import Path

import torch

from fedlens.rounds import State
from fedlens.runs.folder import RunFolder


def new_run(path: Path, overwrite: bool = False) -> RunFolder:
    """A run folder without files."""
    return RunFolder.create(path, overwrite, {})


def load_state(folder: RunFolder) -> State:
    """The state that a folder holds."""
    found = folder.load_checkpoint(torch.device("cpu"))
    assert found is not None
    return found.state
