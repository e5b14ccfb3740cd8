"""A synthetic iNaturalist of geotagged JPEG files, from its metadata to a trained model.

`make test-large` makes it 20,000 files; that takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.data.curation import listing
from fedlens.data.store import CHUNK, MARK
from tests.command_line import Ended
from tests.data.naturalists import make

NAME = "inaturalist-user-120k"
SIZE = 96
MOST = 3 * 10**9  # bytes of memory
NUM_VAL = 4  # test images of each species

large = pytest.mark.skipif(
    "FEDLENS_LARGE" not in os.environ, reason="20,000 files take minutes: make test-large"
)


def command(*words: object) -> list[str]:
    return [str(Path(sys.executable).with_name("fedlens")), *map(str, words)]


def species(num_images: int) -> dict[int, int]:
    """Training images of each species: 110, and the last too few to be kept."""
    whole, rest = divmod(num_images, 110 + NUM_VAL)
    return dict.fromkeys(range(whole), 110) | {whole: rest - NUM_VAL}


def memory(pid: int) -> int:
    """The bytes that a process and its children have, each page counted once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    own = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own + sum(memory(int(child)) for child in children)


def finished(words: list[str], place: Path) -> tuple[str, int]:
    """What a command printed, and the most memory it had."""
    most = 0
    with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err)
        while process.poll() is None:
            most = max(most, memory(process.pid))
            time.sleep(0.1)
    assert process.returncode == 0, (place / "err").read_text()
    return (place / "out").read_text(), most


def killed_when(file: Path, num_done: int, words: list[str]) -> None:
    """Start a command, and kill it as soon as so many images are marked as done."""
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        while not file.exists() or np.count_nonzero(np.fromfile(file, MARK)["state"]) < num_done:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("num_images", "model"),
    [
        (400, '"linear"'),
        pytest.param(20_000, '{ name = "mobilenetv2", norm = "group" }', marks=large),
    ],
)
def test_geotagged_photographs_become_clients_and_train(
    num_images: int, model: str, tmp_path: Path, fedlens: Callable[..., Ended]
) -> None:
    nature = make(tmp_path / "nature", species(num_images), NUM_VAL, side=120)
    files = {file.stem: file for file in nature.rglob("*.jpg")}
    assert len(files) == num_images
    listed = listing(NAME, nature)
    num_train = 100 * (len(species(num_images)) - 1)
    assert listed.num_train == num_train
    assert len(listed.classes) == len(species(num_images)) - 1

    # A pipe in place of a picture keeps `prepare` waiting there, so that it is killed in the
    # midst of its work. What was done by then cannot be done again: the files are gone.
    middle = max(len(listed.ids) // 2, CHUNK)
    num_done = middle // CHUNK * CHUNK
    picture = files[listed.ids[middle]]
    content = picture.read_bytes()
    picture.unlink()
    os.mkfifo(picture)
    files[listed.ids[-1]].write_bytes(b"no picture")
    words = (NAME, "--from", nature, "--images", nature, "--size", SIZE, "--data", tmp_path)
    prepare = command("data", "prepare", *words, "--quiet")
    store = tmp_path / f"{NAME}-{SIZE}"
    killed_when(store / "done.part", num_done, prepare)
    for name in listed.ids[:num_done]:
        files[name].unlink()
    picture.unlink()
    picture.write_bytes(content)
    said, preparing = finished(prepare, tmp_path)
    assert f"{num_train:,} + {len(listed.ids) - num_train - 1:,} images" in said
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["left_out"] == [{"id": listed.ids[-1], "why": "cannot be decoded"}]

    n_max = num_train // 15
    experiment = tmp_path / "nature.toml"
    experiment.write_text(
        f'dataset = "{NAME}"\nrounds = 2\nmodel = {model}\n'
        f'clients = {{ per_round = 2, partition = {{ name = "s2", n_max = {n_max} }} }}\n'
        "local = { batch_size = 16, lr = 0.01 }\nevaluate = { every = 2 }\n"
    )
    picture = tmp_path / "split.png"
    split = json.loads(
        fedlens("partition", experiment, "--data", tmp_path, "--json", "--out", picture).out
    )
    assert n_max / 100 <= min(split["sizes"]) <= max(split["sizes"]) <= n_max
    assert len(set(split["client_names"])) == split["num_clients"] > 10
    assert picture.exists()
    assert picture.with_name("split-map.png").exists()

    run = command("run", experiment, "--data", tmp_path, "--out", tmp_path / "run", "--json")
    said, training = finished(run, tmp_path)
    summary: dict[str, Any] = json.loads(said)
    assert (summary["status"], summary["rounds"]) == ("finished", 2)
    assert 0 <= summary["final"]["test_accuracy"] <= 1
    print(f"memory: {preparing / 1e6:,.0f} MB to prepare, {training / 1e6:,.0f} MB to train")
    assert 0 < preparing < MOST
    assert 0 < training < MOST
