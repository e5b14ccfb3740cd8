"""The number of threads of a run, and what its manifest says about those who resumed it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.storage.free_memory import num_cores
from tests.runs.resumable import Stop, assert_same_run, forgetful

pytestmark = pytest.mark.usefixtures("quick_pages")

# In a folder and with this OMP_NUM_THREADS: Ctrl-C ends the run after its second round.
RUN = """
import sys
import fedlens as fl
from tests.runs.resumable import Stop

fl.run(fl.Experiment.read("e.toml"), sys.argv[1], watch=Stop(2) if "stop" in sys.argv else None)
"""

EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 3
engine = "sequential"
clients = { count = 20, per_round = 2 }
local = { batch_size = 1000 }
evaluate = { every = 3 }
"""


def ran(folder: Path, threads: int | None, *words: str) -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    own.pop("OMP_NUM_THREADS", None)
    own |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    line = (sys.executable, *words)
    return subprocess.run(line, cwd=folder, env=own, capture_output=True, text=True, check=False)


def test_a_run_is_resumed_with_as_many_threads_as_it_began_with(tmp_path):
    if num_cores() < 2:
        pytest.skip("one core: two threads are not restored")
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    assert ran(tmp_path, 2, "-c", RUN, "whole").returncode == 0
    assert "KeyboardInterrupt" in ran(tmp_path, 2, "-c", RUN, "run", "stop").stderr
    ended = ran(tmp_path, 1, "-m", "fedlens", "resume", "run", "--quiet")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    about = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (about["threads"], about["resumed"]) == (2, [])
    assert ran(tmp_path, None, "-c", RUN, "one").returncode == 0
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["threads"] == 1
    two, one = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "one"))
    assert two != one  # so the number of threads matters here


def test_versions_and_threads_that_trained_later_rounds_are_said_and_listed(tmp_path, caplog):
    """A machine with fewer cores cannot have the threads of the first, so it says so."""
    experiment, run = forgetful(), tmp_path / "run"

    def resumed_as(known: dict[str, object], stop: int) -> list[dict[str, object]]:
        """The manifest's list after another machine with other versions resumes the run."""
        about = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(about | known))
        with pytest.raises(KeyboardInterrupt):
            fl.resume(run, experiment=experiment, watch=Stop(stop))
        about = json.loads((run / "manifest.json").read_text())
        assert known.items() <= about.items()
        resumed: list[dict[str, object]] = about["resumed"]
        return resumed

    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(1))
    many = num_cores() + 1
    (first,) = resumed_as({"torch": "1.0", "threads": many}, stop=2)
    (line,) = caplog.messages
    assert f"threads {many}, now {num_cores()}" in line
    assert (first["after_round"], first["threads"]) == (1, num_cores())
    assert first["torch"] != "1.0"
    assert resumed_as({}, stop=3) == [first]  # by the same versions
    # What was resumed by others, but trained nothing, is left out.
    others = [first, {**first, "torch": "1.1", "after_round": 3}]
    assert fl.resume(run, experiment=experiment).status == "finished"
    (run / "manifest.json").write_text(
        json.dumps(json.loads((run / "manifest.json").read_text()) | {"resumed": others})
    )
    fl.resume(run, experiment=forgetful(rounds=5))
    assert json.loads((run / "manifest.json").read_text())["resumed"][:2] == others
