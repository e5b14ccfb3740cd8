"""Images of very many pixels: small files that need much memory."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image

from fedlens.data import DATASETS, Source, pictures
from fedlens.data.pictures import Budget


def photos(place: Path, width: int, height: int) -> Path:
    """Two classes of four small images, and a large one of a single colour."""
    for name in ("cat", "dog"):
        (place / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (40 * i, 9, 0)).save(place / name / f"{i}.png")
    Image.new("L", (width, height)).save(place / "cat" / "large.png")
    return place


# The most memory that a command has used, beyond what it has after its imports.
MEASURED = """
import resource, sys
import fedlens.runs.run, fedlens.data.pictures, PIL.Image
from fedlens.cli.main import main

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.argv = ["fedlens", *sys.argv[1:]]
try:
    main()
finally:
    print("MB:", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1000)
"""


def measured(folder: Path, *words: str) -> tuple[int, str]:
    """The megabytes of memory of a command, and what it printed."""
    line = [sys.executable, "-c", MEASURED, *words]
    ended = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    told, _, size = ended.stdout.rpartition("MB: ")
    return int(size), told + ended.stderr


def test_an_image_of_too_many_pixels_is_left_out_of_an_import_and_refused_by_a_run(tmp_path):
    place = photos(tmp_path / "photos", 15_000, 11_800)
    needed, told = measured(tmp_path, "import", "photos", "--quiet")
    assert needed < 200
    assert "left out: photos/cat/large.png cannot be decoded (177 megapixels" in told
    assert "Warning" not in told
    with pytest.raises(ValueError, match="177") as refused:
        DATASETS["folder"](Source(), path=str(place), size=8)
    assert str(place / "cat/large.png") in str(refused.value)


def test_the_limit_on_pixels_is_a_key_and_an_option(tmp_path):
    place = photos(tmp_path / "photos", 2_000, 1_000)
    assert len(DATASETS["folder"](Source(), path=str(place), size=8).parts) == 2
    with pytest.raises(ValueError, match="megapixels = 1"):
        DATASETS["folder"](Source(), path=str(place), size=8, megapixels=1.0)
    _, told = measured(tmp_path, "import", "photos", "--quiet", "--megapixels", "1.5")
    assert "left out: photos/cat/large.png" in told
    assert "megapixels = 1.5" in (tmp_path / "photos.toml").read_text()


def waits(thread: threading.Thread) -> bool:
    """Whether a thread that was started waits: one that does not is over long before."""
    thread.join(0.5)
    return thread.is_alive()


def test_threads_take_no_more_together_than_their_budget():
    budget = Budget(10)

    def take(part: int) -> None:
        with budget.taking(part):
            pass

    threads = [threading.Thread(target=take, args=[part]) for part in (3, 4, 12)]
    with budget.taking(7):
        for thread in threads:
            thread.start()
        assert [waits(thread) for thread in threads] == [False, True, True]
    for thread in threads:
        thread.join()


def test_images_are_decoded_within_the_budget_of_all_threads(tmp_path):
    file = photos(tmp_path / "photos", 20, 10) / "cat" / "large.png"
    reading = threading.Thread(target=pictures.read, args=[file, pictures.Form()])
    with pictures._pixels.taking(pictures.MEGAPIXELS * 1e6 - 100):  # half of what it needs is left
        reading.start()
        assert waits(reading)
    reading.join()
