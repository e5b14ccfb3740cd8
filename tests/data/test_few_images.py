"""What `fedlens import` writes for a few images, its next command runs."""

import numpy as np
import pytest
from PIL import Image

pytestmark = [
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
    pytest.mark.usefixtures("quick_pages"),
]


@pytest.mark.parametrize("sites", [("north", "south"), ()])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_an_import_of_a_few_images_writes_what_runs(fedlens, tmp_path, monkeypatch, sites, number):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in sites or (".",):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / site / name).mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / site / name / f"{i}.png")
    imported = fedlens("import", "photos", "--quiet")
    if number == 1 and not sites:  # nothing is left to test on
        assert (imported.status, [path.name for path in tmp_path.iterdir()]) == (2, ["photos"])
        return
    assert imported.status == 0
    words = ("run", "photos.toml", "--quiet", "rounds=1", "engine=sequential")
    assert fedlens(*words).status == 0
