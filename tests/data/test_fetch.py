import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedlens.cli.data import data_check
from fedlens.data import DATASETS, Source, published
from fedlens.data.fetch import check, get, get_from, here, named_sets, remedy_for
from fedlens.data.places import cache
from fedlens.data.published import PUBLISHED, Download, Form, Published
from fedlens.storage.download import Unreachable
from tests.data.published_files import write_cifar100, write_idx_set

IMAGES = "train-images-idx3-ubyte.gz"


class Server(ThreadingHTTPServer):
    """Serves bytes by path on the loopback interface, as well or badly as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.knows_ranges = True
        self.cuts: list[int] = []  # each of the next answers breaks off after so many bytes
        self.errors: list[int] = []  # each of the next answers is this status
        self.seen: list[tuple[str, str | None]] = []  # path and range of each request
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.seen.append((self.path, wanted))
        if self.server.errors:
            return self.send_error(self.server.errors.pop(0))
        if self.path not in self.server.files:
            return self.send_error(404)
        content = self.server.files[self.path]
        start = 0
        if wanted and self.server.knows_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start:end])
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def listed(entry: Published, monkeypatch, **changed) -> Published:
    """The entry with other files, in the catalogue under the same name."""
    small = replace(entry, **changed)
    monkeypatch.setitem(PUBLISHED, entry.name, small)
    return small


@pytest.fixture
def fashion(tmp_path: Path, server, monkeypatch) -> Path:
    """A small Fashion-MNIST in the catalogue, on the server, and in the folder returned."""
    folder = tmp_path / "original" / "FashionMNIST" / "raw"
    write_idx_set(folder, zipped=True)
    contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    server.files |= {f"/fashion-mnist/{name}": content for name, content in contents.items()}
    downloads = tuple(Download(n, len(c), md5(c)) for n, c in contents.items())
    forms = published.idx_forms(PUBLISHED["fashion-mnist"].forms[0].folders, downloads)
    listed(PUBLISHED["fashion-mnist"], monkeypatch, downloads=downloads, forms=forms)
    return folder


@pytest.fixture
def cifar100(tmp_path: Path, server, monkeypatch) -> Path:
    """A small CIFAR-100 in the catalogue; its archive on the server and at the path returned."""
    folder = tmp_path / "original" / "cifar-100-python"
    write_cifar100(folder, binary=False)
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    content = archive.read_bytes()
    server.files[f"/cifar100/{archive.name}"] = content
    first, *others = PUBLISHED["cifar100"].forms
    sums = {name: md5((folder / name).read_bytes()) for name in first.files}
    forms = (Form(first.folders, sums, first.read), *others)
    downloads = (Download(archive.name, len(content), md5(content)),)
    listed(PUBLISHED["cifar100"], monkeypatch, downloads=downloads, forms=forms)
    return archive


def test_files_are_fetched_checked_and_load(fashion, server, tmp_path):
    told = []
    folder = get(
        "fashion-mnist",
        tmp_path / "dest",
        base_url=server.url,
        progress=lambda done, total: told.append((done, total)),
    )
    assert folder == tmp_path / "dest" / "fashion-mnist"
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        file.name for file in fashion.iterdir()
    )
    total = sum(len(content) for content in server.files.values())
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert len(DATASETS["fashion-mnist"](Source(data=tmp_path / "dest")).train) == 20


def test_what_is_there_and_right_is_not_fetched_again(fashion, server, tmp_path):
    folder = get("fashion-mnist", tmp_path, base_url=server.url)
    server.seen.clear()
    get("fashion-mnist", tmp_path, base_url=server.url)
    assert not server.seen
    (folder / IMAGES).write_bytes(b"spoilt")
    get("fashion-mnist", tmp_path, base_url=server.url)
    assert server.seen == [(f"/fashion-mnist/{IMAGES}", None)]
    assert (folder / IMAGES).read_bytes() == (fashion / IMAGES).read_bytes()


@pytest.mark.usefixtures("fashion")
def test_the_official_addresses_are_asked_in_turn(server, tmp_path, monkeypatch):
    addresses = (f"{server.url}/gone", f"{server.url}/fashion-mnist")
    listed(PUBLISHED["fashion-mnist"], monkeypatch, addresses=addresses)
    get("fashion-mnist", tmp_path)
    assert len(server.seen) == 8


@pytest.mark.usefixtures("fashion")
def test_the_variable_names_a_mirror(server, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_MIRROR", f"{server.url}/")
    assert get("fashion-mnist", tmp_path / "a").is_dir()
    monkeypatch.setenv("FEDLENS_MIRROR", f"{server.url}/fashion-mnist")
    assert get("fashion-mnist", tmp_path / "b").is_dir()
    monkeypatch.setenv("FEDLENS_MIRROR", "ftp://example.org")
    with pytest.raises(ValueError, match="address"):
        get("fashion-mnist", tmp_path / "c")


def test_a_cut_connection_is_resumed_where_it_broke_off(fashion, server, tmp_path):
    size = (fashion / "t10k-images-idx3-ubyte.gz").stat().st_size
    server.cuts = [1000, 500, size]
    folder = get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01)
    assert [asked for _, asked in server.seen[:4]] == [None, "bytes=1000-", "bytes=1500-", None]
    assert {state for _, state in check("fashion-mnist", Source(data=tmp_path))} == {"ok"}
    assert not list(folder.glob("*.part"))


@pytest.mark.usefixtures("fashion")
def test_a_server_that_ignores_ranges_is_read_from_the_start(server, tmp_path):
    server.knows_ranges, server.cuts = False, [1000]
    get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01)
    assert server.seen[1][1] == "bytes=1000-"
    assert {state for _, state in check("fashion-mnist", Source(data=tmp_path))} == {"ok"}


@pytest.mark.usefixtures("fashion")
def test_a_later_run_goes_on_where_an_earlier_one_gave_up(server, tmp_path):
    server.cuts = [700, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(Unreachable, match="--from"):
        get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01)
    server.seen.clear()
    server.cuts.clear()
    get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01)
    assert server.seen[0][1] == "bytes=700-"


@pytest.mark.usefixtures("fashion")
def test_a_server_in_trouble_is_asked_again(server, tmp_path):
    server.errors = [503, 500]
    assert get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01).is_dir()


@pytest.mark.usefixtures("fashion")
@pytest.mark.parametrize("wrong", [lambda c: c[:-1] + b"?", lambda c: c[:-9], lambda c: c + b"??"])
def test_a_file_with_a_wrong_checksum_is_removed(server, tmp_path, wrong):
    path = f"/fashion-mnist/{IMAGES}"
    server.files[path] = wrong(server.files[path])
    with pytest.raises(Unreachable, match=rf"{IMAGES} \(wrong checksum, removed\), .*: try again"):
        get("fashion-mnist", tmp_path / "dest", base_url=server.url, wait=0.01)
    assert not list((tmp_path / "dest" / "fashion-mnist").glob(f"{IMAGES}*"))


@pytest.mark.usefixtures("fashion")
def test_an_unfinished_file_longer_than_the_servers_is_begun_anew(server, tmp_path):
    path = f"/fashion-mnist/{IMAGES}"
    whole, server.files[path] = server.files[path], b"short"
    part = tmp_path / "fashion-mnist" / f"{IMAGES}.part"
    part.parent.mkdir()
    part.write_bytes(whole[:100])
    with pytest.raises(Unreachable, match="wrong checksum"):
        get("fashion-mnist", tmp_path, base_url=server.url, wait=0.01)
    assert not part.exists()


@pytest.mark.usefixtures("fashion")
def test_an_address_that_cannot_be_reached_is_named_with_the_remedy(server, tmp_path):
    with pytest.raises(Unreachable) as caught:
        get("fashion-mnist", tmp_path, base_url="http://127.0.0.1:9", wait=0.001)
    for part in ("http://127.0.0.1:9/", "refused", "fedlens data get fashion-mnist --from PATH"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(Unreachable, match="404"):
        get("fashion-mnist", tmp_path, base_url=f"{server.url}/nowhere")


@pytest.mark.usefixtures("cifar100")
def test_an_archive_is_unpacked_and_removed(server, tmp_path):
    folder = get("cifar100", tmp_path / "dest", base_url=server.url)
    assert folder == tmp_path / "dest" / "cifar-100-python"
    assert [entry.name for entry in (tmp_path / "dest").iterdir()] == ["cifar-100-python"]
    assert len(DATASETS["cifar100"](Source(data=tmp_path / "dest")).train) == 20
    assert get("cifar100", tmp_path / "dest", base_url=server.url) == folder
    assert len(server.seen) == 1


def test_files_one_has_are_taken_from_a_folder_or_the_archive(cifar100, fashion, tmp_path):
    assert get_from("cifar100", cifar100, tmp_path / "a") == tmp_path / "a" / "cifar-100-python"
    get_from("cifar100", tmp_path / "original", tmp_path / "b")
    get_from("cifar100", tmp_path / "original" / "cifar-100-python", tmp_path / "c")
    get_from("fashion-mnist", fashion, tmp_path / "a")
    write_idx_set(tmp_path / "plain" / "FashionMNIST" / "raw", zipped=False)
    get_from("fashion-mnist", tmp_path / "plain", tmp_path / "b")
    for place in "abc":
        assert len(DATASETS["cifar100"](Source(data=tmp_path / place)).test) == 10
    for place in "ab":
        assert len(DATASETS["fashion-mnist"](Source(data=tmp_path / place)).test) == 10
    assert get_from("cifar100", tmp_path / "a", tmp_path / "a").is_dir()
    assert not list(tmp_path.glob("[abc]/*/*.part"))


def test_files_that_are_not_the_published_ones_are_not_taken(fashion, cifar100, tmp_path):
    dest = tmp_path / "dest"
    with pytest.raises(ValueError, match="t10k"):
        get_from("fashion-mnist", tmp_path / "original" / "cifar-100-python", dest)
    (fashion / IMAGES).write_bytes(b"spoilt")
    with pytest.raises(ValueError, match=rf"{IMAGES} in .* is damaged .*: take another copy"):
        get_from("fashion-mnist", fashion, dest)
    (fashion / IMAGES).unlink()
    with pytest.raises(ValueError, match=f"lacks {IMAGES}"):
        get_from("fashion-mnist", fashion, dest)
    with pytest.raises(ValueError, match="there is no"):
        get_from("fashion-mnist", tmp_path / "nowhere", dest)
    cifar100.write_bytes(cifar100.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cannot be read"):
        get_from("cifar100", cifar100, dest)
    assert not list(dest.iterdir())


def test_an_archive_cannot_write_outside_its_folder(cifar100, tmp_path):
    with tarfile.open(cifar100, "w:gz") as tar:
        tar.add(tmp_path / "original" / "cifar-100-python" / "meta", arcname="../../meta")
    with pytest.raises(ValueError, match="cannot be read"):
        get_from("cifar100", cifar100, tmp_path / "x" / "dest")
    assert not list((tmp_path / "x").rglob("meta"))


def test_an_archive_that_unpacks_to_more_than_the_set_has_is_refused(cifar100, tmp_path):
    large = tarfile.TarInfo()
    large.size = 2**26
    with tarfile.open(cifar100, "w:gz", compresslevel=1) as tar:
        for number in range(8):  # none of them is too large by itself
            large.name = f"{number}/meta"
            tar.addfile(large, io.BytesIO(bytes(large.size)))
    with pytest.raises(ValueError, match="7/meta"):
        get_from("cifar100", cifar100, tmp_path / "dest")
    assert not list((tmp_path / "dest").iterdir())


@pytest.mark.usefixtures("fashion")
def test_a_file_is_fetched_by_one_process_at_a_time(server, tmp_path):
    refused: list[object] = []

    def fetch_too(done: int, _: int | None) -> None:
        if not refused and done:
            with pytest.raises(ValueError, match="fetched") as caught:
                get("fashion-mnist", tmp_path, base_url=server.url)
            refused.append(caught)

    get("fashion-mnist", tmp_path, base_url=server.url, progress=fetch_too)
    assert refused and {state for _, state in check("fashion-mnist", Source(tmp_path))} == {"ok"}


def test_a_folder_that_cannot_be_written_is_named(fashion, server, tmp_path):
    (tmp_path / "dest").write_text("a file, not a folder")
    with pytest.raises(ValueError, match=r"dest.* cannot be written"):
        get("fashion-mnist", tmp_path / "dest", base_url=server.url)
    with pytest.raises(ValueError, match=r"dest.* cannot be written"):
        get_from("fashion-mnist", fashion, tmp_path / "dest")


def test_check_tells_the_state_of_each_file(fashion, tmp_path):
    source = Source(data=fashion)
    assert {state for _, state in check("fashion-mnist", source)} == {"ok"}
    (fashion / IMAGES).write_bytes(b"spoilt")
    (fashion / "train-labels-idx1-ubyte.gz").unlink()
    states = {Path(file).name: state for file, state in check("fashion-mnist", source)}
    assert states[IMAGES] == "damaged"
    assert states["train-labels-idx1-ubyte.gz"] == "missing"
    assert states["t10k-images-idx3-ubyte.gz"] == "ok"
    assert check("fashion-mnist-mini", source) == [("fashion-mnist-mini.npz", "ok")]
    with pytest.raises(ValueError, match="mnist is not in"):
        check("mnist", Source(data=tmp_path))


def test_check_reads_files_without_a_published_checksum(tmp_path):
    write_cifar100(tmp_path, binary=True)
    assert [state for _, state in check("cifar100", Source(data=tmp_path))] == ["readable"] * 2
    (tmp_path / "test.bin").write_bytes(b"spoilt")
    assert check("cifar100", Source(data=tmp_path))[1] == (str(tmp_path / "test.bin"), "damaged")


def test_the_list_says_what_is_here(fashion):
    rows = {row.name: row for row in named_sets(Source(data=fashion))}
    assert list(rows)[:5] == ["fashion-mnist-mini", "fashion-mnist", "mnist", "cifar10", "cifar100"]
    assert rows["fashion-mnist"].where == str(fashion)
    assert rows["fashion-mnist-mini"].where
    assert rows["cifar10"].where is None
    assert rows["cifar10"].contents == "50,000 + 10,000 images, 32×32, 10 classes"


@pytest.mark.parametrize(
    ("name", "message"),
    [("fashion-mnits", "did you mean 'fashion-mnist'"), ("fashion-mnist-mini", "nothing to fetch")],
)
def test_only_published_sets_are_fetched(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        get(name, tmp_path)
    with pytest.raises(ValueError, match=message):
        get_from(name, tmp_path, cache())


def test_sets_without_an_address_are_listed_and_checked_but_not_fetched(tmp_path):
    source = Source(tmp_path)
    rows = {row.name: row.where for row in named_sets(source)}
    assert rows["omniglot"] is None and rows["inaturalist-geo-3k"] is None
    (tmp_path / "omniglot").mkdir()
    (tmp_path / "omniglot" / "omniglot.npz").write_bytes(b"anything")
    assert check("omniglot", source) == [(str(tmp_path / "omniglot" / "omniglot.npz"), "damaged")]
    assert {row.name: row.where for row in named_sets(source)}["omniglot"] is not None
    where = r"unpack images_background.zip .* https://.*/omniglot, and put its files \(.*\) into a"
    with pytest.raises(ValueError, match=f"omniglot cannot be fetched: {where}"):
        get("omniglot", tmp_path)
    assert re.search(where, remedy_for("omniglot"))
    with pytest.raises(ValueError, match=r"make it with `fedlens data prepare inaturalist-geo-3k"):
        get("inaturalist-geo-3k", tmp_path)
    with pytest.raises(ValueError, match=r"inaturalist-geo-3k is not in .*: make it with `fedlens"):
        check("inaturalist-geo-3k", source)


def test_what_is_here_in_part_or_damaged_is_checked_too(fashion, tmp_path, capsys):
    source = Source(data=fashion.parent)
    fashion = fashion.rename(fashion.with_name("fashion-mnist"))
    (fashion / IMAGES).unlink()
    begun = fashion.parent / "inaturalist-geo-3k-96"
    begun.mkdir()
    assert here(source) == ["fashion-mnist-mini", "fashion-mnist", "inaturalist-geo-3k"]
    assert here(Source(data=tmp_path / "nowhere")) == ["fashion-mnist-mini"]
    assert (str(fashion / IMAGES), "missing") in check("fashion-mnist", source)
    assert check("inaturalist-geo-3k", source) == [(str(begun), "missing")]
    (begun / "manifest.json").write_text("{")
    assert check("inaturalist-geo-3k", source) == [(str(begun), "damaged")]
    assert remedy_for("inaturalist-geo-3k").startswith("make it with `fedlens data prepare")
    with pytest.raises(ValueError, match="damaged"):
        data_check(data=fashion.parent)
    assert f"missing   {fashion / IMAGES}" in capsys.readouterr().out
