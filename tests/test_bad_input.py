"""Bad input: each kind is refused in one line that says what to do, before anything is written."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedlens as fl
from fedlens.core.federation import Holdings
from fedlens.data import DATASETS, Source, published
from fedlens.setup import build
from fedlens.storage import free_memory
from fedlens.storage.reading import BadFile, expanded, printable, reading
from fedlens.storage.tables import read_tables
from tests.command_line import everything

COMMAND_LINE = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")


def some_images(height: int = 5) -> fl.Examples:
    return fl.Examples(torch.zeros(8, 1, height, 5, dtype=torch.uint8), torch.arange(8) % 2)


def fuzz(cases: int, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing", str(cases)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "16 of 16 readers held" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for its limits")
def test_no_file_makes_a_reader_raise_anything_but_one_line():
    fuzz(2_000, seconds=900)


@pytest.mark.long
def test_no_file_of_very_many_makes_a_reader_raise_anything_but_one_line():
    fuzz(50_000, seconds=7200)


def lying_npz() -> None:
    member = io.BytesIO()
    np.save(member, np.zeros((2, 3), np.uint8))
    content = member.getvalue().replace(b"(2, 3)", b"(9**9)".replace(b"9**9", b"9999"))
    with zipfile.ZipFile("lying.npz", "w") as archive:
        archive.writestr("x_train.npy", content)


def objects() -> None:
    np.savez("objects.npz", x_train=np.array([{}], object))


def other_sizes() -> None:
    images, labels = np.zeros((4, 5, 5), np.uint8), np.zeros(4, np.int64)
    np.savez("sizes.npz", x_train=images, y_train=labels, x_test=images[:, :4], y_test=labels)


def many_classes() -> None:
    images, labels = np.zeros((4, 5, 5), np.uint8), np.full(4, 10**6)
    np.savez("classes.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)


def many_columns() -> None:
    columns = ",".join(f"c{i}" for i in range(100_000))
    Path("wide.csv").write_text(f"path,label,{columns}\n", encoding="utf-8")
    Path("long.csv").write_text(f"path,label\n{'x' * 200_000},1\n", encoding="utf-8")


def integer_keys() -> None:
    torch.save({7: torch.zeros(3)}, "keys.pth")
    torch.save({"1.bias": torch.zeros(3).to_sparse()}, "sparse.pth")
    torch.save({"1.bias": torch.nn.Linear(2, 3)}, "program.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are deprecated, which is said once
        quantised = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
        torch.save({"1.bias": quantised}, "quantised.pth")


def deep() -> None:
    Path("deep.toml").write_text("x = " + "[" * 100_000, encoding="utf-8")
    Path("dotted.toml").write_text("a." * 100_000 + "b = 1", encoding="utf-8")
    Path("deep.json").write_text('{"a":' * 100_000, encoding="utf-8")
    Path("digits.toml").write_text("rounds = 1" + "0" * 5000, encoding="utf-8")
    Path("digits.json").write_text('{"rounds": 1' + "0" * 5000 + "}", encoding="utf-8")
    Path("half.json").write_text(json.dumps({"dataset": "\ud800"}), encoding="utf-8")


@COMMAND_LINE
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dataset={name='npz', path='lying.npz'}"], "lying.npz cannot be read ("),
        (["dataset={name='npz', path='objects.npz'}"], "x_train holds Python objects"),
        (["dataset={name='npz', path='sizes.npz'}"], "x_train and x_test differ in shape: resize"),
        (["dataset={name='npz', path='/dev/zero'}"], "/dev/zero cannot be read (it is a device or"),
        (["dataset={name='npz', path='classes.npz'}", "clients.count=4"], "a round needs about"),
        (["dataset={name='npz', path='~nobody-here/x'}"], "a home that is not known here: write"),
        (["dataset={name='csv', path='wide.csv'}"], "100,002 columns in line 1, above 1,000"),
        (["dataset={name='csv', path='long.csv'}"], "field larger than field limit"),
        ([f"dataset={{name='npz', path='{'n' * 300}'}}"], "File name too long"),
        (
            ["weights=keys.pth"],
            "keys.pth cannot be read (it holds more than tensors by name): save",
        ),
        (["weights=sparse.pth"], "1.bias is not a plain tensor of numbers"),
        (["weights=quantised.pth"], "1.bias is not a plain tensor of numbers"),
        (["weights=program.pth"], "it is damaged, or holds more than tensors by name): save"),
        (["local.lr=1e308"], "local.lr is a number of 309 digits: models compute with up to 1e+38"),
        (["algorithm={name='fedprox', mu=1e308}"], "mu is a number of 309 digits: models compute"),
        (["algorithm={name='fedbuff', buffer=1099511627776}"], "a round needs about"),
        (["evaluate.fine_tune=1000000000"], "evaluate.fine_tune is 1000000000: choose 0 to 10000"),
        (["evaluate.bootstrap=1000000000"], "evaluate.bootstrap is 1000000000: choose 0 to 1000"),
        (["augment.crop=9223372036854775808"], "augment.crop is 9223372036854775808: choose a"),
        (["augment.crop=4611686018427387904"], "a round needs about"),
        (["local.epochs=1099511627776"], "a round needs about"),
        (["outputs=1000000000000"], "a round needs about"),
        (["a." * 100_000 + "b=1"], "has more than 32 parts: write key=value"),
        (["local.lr=" + "[" * 100_000], "it is nested too deeply"),
        (["local.lr=" + "[" * 40 + "]" * 40], "]]: it is nested more than 32 deep"),
        (["rounds=1" + "0" * 5000], "0 ...: it has a whole number of more than 4,300 digits"),
        (["clients.holdout=1e-320"], "clients.holdout is 1e-320: choose"),
        (["weights=http://127.0.0.1:1/x.pt"], "x.pt cannot be fetched ("),
        (["local=5"], "local is 5: expected a table"),
        (["--out", "x" * 300], "file name too long"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_status_2(fedlens, words, message):
    for write in (lying_npz, objects, other_sizes, many_classes, many_columns, integer_keys):
        write()
    before = everything()
    status, out, err = fedlens("run", "a.toml", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert len(err) < 1000
    assert everything() == before


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.json", '{"rounds": 1, "model": "linear", "rounds": 2}', "'rounds'"),
        ("a.json", '{"local": {"lr": 1, "lr": 2}}', "'lr'"),
        ("a.toml", "seed = 1\nrounds = 1\nrounds = 2", "rounds"),
        ("a.toml", "[local]\nlr = 1\n[clients]\n[local]\n", "local"),
    ],
)
def test_a_key_that_is_given_twice_is_named(tmp_path, name, text, key):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{key} is given twice"):
        read_tables(tmp_path / name)


def test_a_pipe_in_place_of_an_experiment_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    # Whoever opens the pipe gets an experiment, so that this test ends also where it is opened.
    writing = threading.Thread(target=pipe.write_text, args=["rounds = 1"])
    writing.start()
    try:
        with pytest.raises(ValueError, match="pipe"):
            read_tables(pipe)
    finally:
        handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # lets a writer go on that still waits
        writing.join()
        os.close(handle)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")
def test_a_machine_without_memory_for_pytorch_is_one_line(tmp_path):
    described = 'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\n'
    (tmp_path / "a.toml").write_text(described)
    command = "import resource as r; r.setrlimit(r.RLIMIT_AS, (400_000_000,) * 2)\n"
    command += "import sys; sys.argv = ['fedlens', 'run', 'a.toml']\n"
    command += "from fedlens.__main__ import command; command()"
    line = [sys.executable, "-c", command]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert "fedlens: there is not enough memory" in ended.stderr
    assert "mistake in Fedlens" not in ended.stderr


@COMMAND_LINE
@pytest.mark.usefixtures("here")
def test_files_that_are_nested_or_numbers_that_are_long_beyond_measure_are_refused_at_once(fedlens):
    deep()
    for name, message in (
        ("deep.toml", "is not valid TOML: it is nested too deeply"),
        ("dotted.toml", "is not valid TOML: a key has more than 32 parts"),
        ("deep.json", "is not valid JSON: it is nested too deeply"),
        ("digits.toml", "valid TOML: it has a whole number of more than 4,300 digits\n"),
        ("digits.json", "valid JSON: it has a whole number of more than 4,300 digits\n"),
        ("half.json", "is not UTF-8: write it with other letters"),
    ):
        status, out, err = fedlens("run", name)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_sizes_that_a_file_announces_are_compared_with_its_own(tmp_path):
    file, zipped = tmp_path / "a", tmp_path / "a.gz"
    head = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 28)
    file.write_bytes(head + bytes(100))
    zipped.write_bytes(gzip.compress(head + bytes(100)))
    for path in (file, zipped):
        with pytest.raises(BadFile, match="shorter"):
            published.read_idx(path, 3)


def test_a_bomb_is_not_unpacked_beyond_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "available", lambda: 1_000_000)
    zipped = tmp_path / "a.gz"
    zipped.write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + struct.pack(">I", 10**7) + bytes(10**7)))
    with pytest.raises(ValueError, match="free"):
        published.read_idx(zipped, 1)
    np.savez_compressed(tmp_path / "b.npz", x_train=np.zeros(10**7, np.uint8))
    with pytest.raises(ValueError, match="free"):
        DATASETS["npz"](Source(), path=str(tmp_path / "b.npz"))


@pytest.mark.parametrize("labels", [5, [[1], [2]], ["a"], None])
def test_labels_that_are_no_list_of_numbers_are_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        published._numbers(labels, "labels")


def test_a_memo_that_would_fill_all_memory_is_only_a_number(tmp_path):
    file = tmp_path / "batch"
    file.write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")  # {}, kept as number 2,147,483,647
    with pytest.raises(BadFile, match="called data"):
        published.read_pickle(file, ["labels"])


def test_test_images_of_another_size_are_refused():
    train, test = some_images(), some_images(4)
    with pytest.raises(ValueError, match=r"\(1, 4, 5\)"):
        fl.Dataset("mine", train, test, ("a", "b"))


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    images = some_images()
    dataset = fl.Dataset("toy", images, images, ("a", "b"))
    monkeypatch.setattr(free_memory, "available", lambda: 50_000_000)
    two = fl.Clients(count=2)
    plain = fl.Experiment(
        dataset=dataset, model="linear", rounds=1, engine="sequential", clients=two
    )
    build(plain)
    for change, part in (
        ({"outputs": 1_000_000}, "2 models 624.0 MB"),
        ({"local": {"epochs": 10**7}}, "who sees which examples"),
        ({"augment": {"crop": 10_000}}, "a batch"),
    ):
        wrong = fl.Experiment(
            dataset=dataset,
            model="linear",
            rounds=1,
            engine="sequential",
            clients=two,
            **change,
        )
        with pytest.raises(ValueError, match=rf"a round needs .*{part}.*, but 50.0 MB are free"):
            build(wrong)


def test_what_a_reader_raises_names_the_file_once(tmp_path):
    for error, why in (
        (KeyError("x"), "it has no 'x'"),
        (MemoryError(), "it asks for more memory than there is"),
        (RecursionError("deep"), "it is nested too deeply"),
        (AssertionError(), "it is damaged"),
        (OSError(13, "Permission denied"), "Permission denied"),
        (TypeError("two\nlines"), "two"),
    ):
        with pytest.raises(BadFile) as refused, reading(tmp_path, "fix it"):
            raise error
        assert str(refused.value) == f"{tmp_path} cannot be read ({why}): fix it"
    with pytest.raises(ValueError, match=rf"^{tmp_path}:3: wrong$"), reading(tmp_path):
        raise ValueError(f"{tmp_path}:3: wrong")


def test_a_home_that_is_not_known_is_a_mistake():
    with pytest.raises(ValueError, match="~nobody-here"):
        expanded("~nobody-here/x")


def test_text_reaches_a_terminal_without_its_escapes():
    assert printable("\x1b[2Jgone\n\x07é") == r"\x1b[2Jgone\n\x07é"


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "median"])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_cohort_that_holds_nothing_leaves_the_model_as_it_was(engine, algorithm, monkeypatch):
    images = some_images()
    nothing = torch.zeros(0, dtype=torch.int64)

    def one_has_all(pool):
        return Holdings.of([torch.arange(8), *[nothing] * (pool.num_clients - 1)])

    monkeypatch.setitem(sys.modules, "holders", type(sys)("holders"))
    monkeypatch.setattr(sys.modules["holders"], "one_has_all", one_has_all, raising=False)
    experiment = fl.Experiment(
        dataset=fl.Dataset("toy", images, images, ("a", "b")),
        model="linear",
        rounds=2,
        engine=engine,
        algorithm=algorithm,
        clients={"count": 20, "per_round": 2, "partition": "holders:one_has_all"},
    )
    result = fl.run(experiment)
    assert [record["examples"] for record in result.records] == [0, 0]
    start = build(experiment).network.params
    for name, tensor in start.items():
        assert torch.equal(result.model[name], tensor)


def photos(place: Path, broken: list[str]) -> Path:
    for name in ("cat", "dog"):
        (place / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (6, 6), (40 * i, 0, 0)).save(place / name / f"{i}.png")
    for name in broken:
        (place / name).write_bytes((place / name).read_bytes()[:40])
    return place


def test_all_broken_images_are_named_at_once_or_left_out(tmp_path):
    broken = ["cat/0.png", "cat/3.png", "dog/0.png"]
    place = photos(tmp_path / "photos", broken)
    with pytest.raises(ValueError, match="3 images") as refused:
        DATASETS["folder"](Source(), path=str(place))
    assert all(str(place / name) in str(refused.value) for name in broken)
    assert 'on_error = "skip"' in str(refused.value)
    made = DATASETS["folder"](Source(), path=str(place), on_error="skip")
    assert len(made.train) + len(made.test) == 7
    assert sorted(one.file for one in made.left_out) == [str(place / name) for name in broken]
    listed = "path,label\n" + "".join(
        f"photos/{name}/{i}.png,{name}\n" for name in ("cat", "dog") for i in range(5)
    )
    (tmp_path / "a.csv").write_text(listed, encoding="utf-8")
    by_csv = DATASETS["csv"](Source(), path=str(tmp_path / "a.csv"), on_error="skip")
    assert len(by_csv.left_out) == 3
    whole = photos(tmp_path / "whole", [])
    sound = DATASETS["folder"](Source(), path=str(whole))
    assert sound.left_out == ()


@COMMAND_LINE
@pytest.mark.usefixtures("here")
def test_what_was_left_out_is_counted_and_listed(fedlens):
    photos(Path("photos"), ["dog/4.png"])
    dataset = "dataset={name='folder', path='photos', on_error='skip'}"
    words = ("run", "a.toml", dataset, "clients.count=2", "clients.per_round=2", "--out", "run")
    status, _, err = fedlens(*words, "-q", "clients.partition=iid")
    assert status == 0
    assert "fedlens: 1 image was left out, listed in run/manifest.json" in err
    (left,) = json.loads(Path("run/manifest.json").read_text(encoding="utf-8"))["left_out"]
    assert left["file"].endswith("photos/dog/4.png")


def test_no_image_left_is_a_mistake_even_if_broken_ones_are_skipped(tmp_path):
    names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(5)]
    place = photos(tmp_path / "photos", names)
    with pytest.raises(ValueError, match="no training image"):
        DATASETS["folder"](Source(), path=str(place), on_error="skip")


@COMMAND_LINE
@pytest.mark.usefixtures("here")
def test_names_of_files_and_folders_write_nothing_else_on_a_terminal(fedlens):
    photos(Path("photos"), ["cat/0.png"])
    Path("photos/cat").rename("photos/c\x1b[2Jat")
    dataset = "dataset={name='folder', path='photos', on_error='skip'}"
    few = ("clients.count=2", "clients.per_round=2", "clients.partition=iid")
    told = ""
    for words in (
        ("import", "photos", "--out", "b.toml"),
        ("partition", "a.toml", dataset, *few),
        ("run", "a.toml", dataset, *few, "--out", "r\x1b[2Jun"),
        ("resume", "r\x1b[2Jun"),
        ("report", "r\x1b[2Jun"),
        ("sweep", "a.toml", dataset, *few, "--seeds", 1, "--out", "s\x1b[2Jweep"),
    ):
        ended = fedlens(*words)
        assert ended.status == 0, ended.err
        told += ended.out + ended.err
    assert "\x1b" not in told
    assert told.count(r"c\x1b[2Jat") >= 2
