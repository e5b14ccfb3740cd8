"""A model remembers how rectangular photos got its size, wherever it is asked."""

import io
import json
from importlib.util import find_spec
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import fedlens as fl
from fedlens.deploy.serve import serving_model
from tests.data.test_fit import write_photo

EXPERIMENT = """\
dataset = {{ name = "folder", path = "photos", size = 24, fit = "{fit}" }}
model = "linear"
rounds = 3
engine = "sequential"
clients = {{ count = 2 }}
local = {{ batch_size = 4, lr = 0.1 }}
"""


@pytest.fixture(params=["crop", "letterbox"])
def run(request, here, fedlens):
    """A run on upright and lying photos, which stretched ones would not tell apart."""
    for i in range(12):
        write_photo(here / "photos" / "upright" / f"{i}.jpg", 240 + i, 320)
        write_photo(here / "photos" / "lying" / f"{i}.jpg", 320 + i, 240)
    (here / "e.toml").write_text(EXPERIMENT.format(fit=request.param))
    assert fedlens("run", "e.toml", "--quiet").status == 0
    return here / "runs" / "e"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_every_way_to_ask_fits_photos_alike(run, here, fedlens):
    classifier = fl.load(run)
    fit = classifier.preprocessing.fit
    assert fit == json.loads((run / "manifest.json").read_text())["images"]["fit"] != "stretch"
    photo = write_photo(here / "new.jpg", 500, 200)
    ended = fedlens("predict", run, photo, "--top", "2", "--json")
    (wanted,) = json.loads(ended.out)
    share = {one["class"]: one["probability"] for one in wanted["classes"]}

    with serving_model(classifier, "m", "127.0.0.1", 0) as address:
        asked = Request(f"{address}classify", photo.read_bytes(), method="POST")
        with urlopen(asked, timeout=300) as answer:
            served = json.load(answer)["classes"]
    assert {one["class"]: one["probability"] for one in served} == pytest.approx(share)

    assert fedlens("export", run, "--out", "m.pt").status == 0
    loaded = torch.jit.load("m.pt")
    pixels = np.asarray(Image.open(io.BytesIO(photo.read_bytes())).convert("RGB"))
    found = loaded(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])[0]
    exported = dict(zip(classifier.classes, found.tolist(), strict=True))
    assert exported == pytest.approx(share, abs=0.02)  # the JPEG is decoded at a smaller size here

    if find_spec("onnxscript") and find_spec("onnxruntime"):
        ended = fedlens("export", run, "--out", "m.onnx")  # which compares the answers itself
        assert ended.status == 0 and "checked" in ended.out

    assert fedlens("export", run, "--out", "m.safetensors").status == 0
    with safe_open("m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["fit"]) == fit
