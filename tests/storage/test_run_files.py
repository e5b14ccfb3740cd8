"""The files of a run folder, as they are read by whoever goes on with a run or reports on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedlens
from fedlens.storage import run_files
from fedlens.storage.locks import FolderLock
from tests.report.run_folders import make_run

WITHOUT_TORCH = """
import sys, types
package = types.ModuleType("fedlens")  # as it is, but for what `import fedlens` offers
package.__path__ = [sys.argv[1]]
sys.modules |= {"fedlens": package, "torch": None, "numpy": None}

from pathlib import Path
from fedlens.storage import run_files
from fedlens.runs import records
print(run_files.read_status(Path(sys.argv[2])), records.read(Path(sys.argv[2])).num_rounds)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two rounds that was killed in its third."""
    (tmp_path / "experiment.toml").write_text('model = "linear"\nrounds = 3\n')
    (tmp_path / "manifest.json").write_text(json.dumps({"code": ["/mine", 3]}))
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    return tmp_path


def test_what_a_killed_process_left_beside_runs_is_none(tmp_path):
    for name in ("a", ".b.new"):
        make_run(tmp_path / "runs" / name)
    assert run_files.runs_in([tmp_path / "runs"]) == [tmp_path / "runs" / "a"]


def test_sweeps_beside_runs_are_passed_over_and_named(tmp_path):
    run, point = make_run(tmp_path / "run"), make_run(tmp_path / "sweep" / "lr=0.1")
    assert run_files.runs_in([tmp_path]) == [run]
    assert run_files.passed_over([tmp_path]) == [tmp_path / "sweep"]
    assert run_files.passed_over([tmp_path, tmp_path / "sweep"]) == []
    assert run_files.runs_in([tmp_path, tmp_path / "sweep"]) == [run, point]
    assert run_files.passed_over([run, tmp_path / "sweep", tmp_path / "none"]) == []


def test_a_run_can_be_read_without_torch(run):
    home = Path(fedlens.__file__).parent
    command = [sys.executable, "-c", WITHOUT_TORCH, str(home), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("interrupted 2\n", "")


def test_what_is_not_there_yet_is_empty_or_none(run, tmp_path_factory):
    assert run_files.read_summary(run) == {}
    assert run_files.last_saved(run) is None
    assert run_files.read_json(run / run_files.EVALUATION) is None
    (run / "rounds.jsonl").unlink()
    assert run_files.read_records(run) == []
    empty = tmp_path_factory.mktemp("empty")
    assert run_files.read_status(empty) is None
    assert run_files.own_code(empty) == []
    assert not run_files.is_run(empty)


def test_a_status_is_what_the_summary_says_or_interrupted(run):
    assert run_files.read_status(run) == "interrupted"
    for summary, status in (({"status": "diverged"}, "diverged"), ({}, "interrupted")):
        (run / "summary.json").write_text(json.dumps(summary))
        assert run_files.read_status(run) == status


def test_a_run_that_says_it_is_running_is_if_somebody_writes_it(run):
    (run / "summary.json").write_text(json.dumps({"status": "running"}))
    assert run_files.read_status(run) == "interrupted"
    with FolderLock(run):
        assert run_files.read_status(run) == "running"
    assert run_files.read_status(run) == "interrupted"


@pytest.mark.parametrize("content", [b"", b'{"status": ', b"\xff\xff", b'{"a": 1, "b": 2, "a": 3}'])
def test_a_damaged_file_is_named_to_whoever_asks(run, content):
    for name, read in (
        ("manifest.json", run_files.read_manifest),
        ("summary.json", run_files.read_summary),
        ("checkpoint/state-000002.json", lambda folder: run_files.read_state_index(folder, 2)),
    ):
        (run / name).parent.mkdir(exist_ok=True)
        before = (run / name).read_bytes() if (run / name).exists() else b"{}"
        (run / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*\): run .* again"):
            read(run)
        (run / name).write_bytes(before)


def test_only_the_last_line_of_the_records_may_be_torn(run):
    assert [record["round"] for record in run_files.read_records(run)] == [1, 2]
    whole = (run / "rounds.jsonl").read_bytes()
    (run / "rounds.jsonl").write_bytes(whole + b"\n\n")
    assert len(run_files.read_records(run)) == 2
    (run / "rounds.jsonl").write_bytes(whole + b'\n{"round": 3}\n')
    with pytest.raises(ValueError, match="line 3"):
        run_files.read_records(run)


def test_code_of_the_users_own_is_found_where_the_run_found_it(run):
    assert run_files.own_code(run) == [Path("/mine")]
    (run / "manifest.json").write_text("{")
    assert run_files.own_code(run) == []


def test_pages_among_runs_are_passed_over(tmp_path):
    """Also one that somebody put there with --out; a run that is damaged is not."""
    run, page = make_run(tmp_path / "run"), tmp_path / "page"
    page.mkdir()
    (page / "report.html").touch()
    (tmp_path / "figures").mkdir()
    assert run_files.runs_in(sorted(tmp_path.iterdir())) == [run]
    (run / "manifest.json").unlink()
    (run / "report.html").touch()
    assert run_files.runs_in(sorted(tmp_path.iterdir())) == [run]
