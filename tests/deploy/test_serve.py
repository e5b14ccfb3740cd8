"""A model behind a local page: what it answers, to whom, and how it looks in a browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from torch import nn

import fedlens as fl
from fedlens.deploy import serve
from fedlens.deploy.classifier import Classifier, Preprocessing
from fedlens.deploy.serve import serving_model
from tests.deploy.conftest import Trained
from tests.report.browser import CHROMIUM, Page, browser
from tests.sites import CLASSES


@pytest.fixture(scope="module")
def address(trained: Trained) -> Iterator[str]:
    told = ["It is weak at <b>boots</b>."]
    with serving_model(
        fl.load(trained.run), "clothes", "127.0.0.1", 0, abstain=0.99, told=told
    ) as address:
        yield address


def asked(address: str, content: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = Request(f"{address}classify", content, headers)
    try:
        with urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            told = error.read()
            return error.code, json.loads(told) if told.startswith(b"{") else {}


def test_a_program_gets_what_predict_says(trained: Trained, address: str) -> None:
    files = {path: path.stat() for path in trained.run.rglob("*")}
    for path in sorted(trained.images.rglob("1*.jpg"))[:4]:
        status, found = asked(address, path.read_bytes())
        (expected,) = fl.load(trained.run).predict([path], top=3)
        assert status == 200 and found["answer"] == expected.at_least(0.99)
        for one, (name, share) in zip(found["classes"], expected.classes, strict=True):
            assert one["class"] == name and one["probability"] == pytest.approx(share, abs=1e-6)
        assert found["heat_map"].startswith("data:image/png;base64,iVBOR")
    assert {path: path.stat() for path in trained.run.rglob("*")} == files  # nothing is kept


@pytest.mark.parametrize(
    "content", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\xff\xd8"]
)
def test_what_is_no_photo_is_refused(address: str, content: bytes) -> None:
    status, found = asked(address, content)
    assert status == 400 and "cannot be read" in found["error"]


def test_the_page_runs_nothing_that_comes_from_names(address: str) -> None:
    with urlopen(address, timeout=300) as answer:
        page = answer.read().decode()
    assert "weak at &lt;b&gt;boots" in page and "default-src 'none'" in page


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {"Host": "evil.example"}, 403),
        ("POST", "/classify", {"Host": "evil.example"}, 403),
        ("POST", "/classify", {"Origin": "http://evil.example"}, 403),
        ("POST", "/classify", {"Origin": "null"}, 403),
        ("GET", "/classify", {}, 404),
        ("POST", "/", {"Content-Length": "0"}, 404),
        ("GET", "/../../etc/passwd", {}, 404),
        ("POST", "/classify", {"Content-Length": "-1"}, 411),
        ("POST", "/classify", {"Content-Length": str(2**40)}, 413),
        ("POST", "/classify", {"Content-Length": "9" * 400}, 413),
        ("PUT", "/classify", {"Content-Length": "0"}, 501),
    ],
)
def test_only_the_page_and_programs_of_this_machine_may_ask(
    address: str, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port or 0, timeout=300)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == status
    answer.read()
    connection.close()


def test_the_page_itself_may_ask(trained: Trained, address: str) -> None:
    photo = next(trained.images.rglob("*.jpg")).read_bytes()
    origin = address.rstrip("/")
    assert asked(address, photo, Origin=origin)[0] == 200


def test_a_photo_may_be_so_large(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = next(trained.images.rglob("*.jpg")).read_bytes()
    for most, status in ((len(photo), 200), (len(photo) - 1, 413)):
        monkeypatch.setattr(serve, "LARGEST", most)
        with serving_model(fl.load(trained.run), "clothes", "127.0.0.1", 0) as address:
            assert asked(address, photo)[0] == status


def test_others_than_this_machine_need_the_token(trained: Trained) -> None:
    photo = next(trained.images.rglob("*.jpg")).read_bytes()
    with serving_model(fl.load(trained.run), "clothes", "0.0.0.0", 0) as address:
        place = urlsplit(address)
        assert len(place.path) > 20
        assert asked(f"http://127.0.0.1:{place.port}{place.path}", photo)[0] == 200
        assert asked(f"http://127.0.0.1:{place.port}/", photo)[0] == 404


def test_a_model_without_a_convolution_answers_without_a_heat_map(trained: Trained) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 3))
    plain = Classifier(
        module, Preprocessing((3, 24, 24), (0.5,) * 3, (0.2,) * 3), [*CLASSES]
    ).eval()
    with serving_model(plain, "plain", "127.0.0.1", 0, top=1) as address:
        status, found = asked(address, next(trained.images.rglob("*.jpg")).read_bytes())
    assert status == 200 and found.keys() == {"classes"} and len(found["classes"]) == 1


def test_the_command_serves_until_it_is_stopped(trained: Trained) -> None:
    command = [sys.executable, "-m", "fedlens", "serve-model", str(trained.run), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--trust-code"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    with process.stdout as out:
        address = out.readline().split()[1]
        assert asked(address, next(trained.images.rglob("*.jpg")).read_bytes())[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        assert out.read() == "stopped\n"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("pages are tried in chromium: none here")
    with browser() as page:
        yield page


@pytest.mark.parametrize("width", [1200, 360])
def test_photos_that_are_dropped_are_answered_in_a_browser(
    trained: Trained, address: str, tab: Page, width: int, tmp_path: Path
) -> None:
    photos = sorted(map(str, trained.images.rglob("1*.jpg")))[:2]
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    tab.open(address, width=width)
    data = {"items": [], "files": photos, "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        tab.call("Input.dispatchDragEvent", type=kind, x=100, y=200, data=data)
    tab.wait_for("document.querySelectorAll('.photo dl').length === 2")
    (answer,) = fl.load(trained.run).predict(photos[1:], top=3)
    heading = tab.run("document.querySelector('.photo h2').textContent")  # the newest is first
    assert heading == f"{Path(photos[1]).name}: {answer.at_least(0.99) or 'unsure'}"
    assert tab.run("document.querySelectorAll('.photo img').length") == 4
    tab.wait_for("[...document.querySelectorAll('.photo img')].every((x) => x.naturalWidth > 0)")
    shares = tab.run(
        "[...document.querySelector('dl').querySelectorAll('progress')].map((x) => x.value)"
    )
    assert shares == pytest.approx([share for _, share in answer.classes], abs=1e-6)
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    field = tab.call("DOM.querySelector", nodeId=root, selector="input")["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / "broken.jpg")])
    tab.wait_for("document.querySelector('.photo').textContent.includes('cannot be read')")
    tab.wait_for("document.querySelector('.photo').querySelector('img') === null")
    assert tab.run("document.documentElement.scrollWidth") <= width
    if place := os.environ.get("FEDLENS_SCREENSHOTS"):
        tab.screenshot(Path(place) / f"serve-{width}.png")
    broken = [problem for problem in tab.problems if "400 (Bad Request)" not in problem]
    tab.problems.clear()
    assert broken == []
