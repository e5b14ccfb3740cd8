"""Weights from a file or an address: what loads, what is refused, and what is said."""

import contextlib
import functools
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedlens as fl
from fedlens.models import MODELS, weights
from fedlens.models.weights import load_weights
from fedlens.setup import build
from fedlens.storage import download


def model(num_classes=4, seed=0, **options):
    torch.default_generator.manual_seed(seed)
    return MODELS["mobilenetv2"]((3, 32, 32), num_classes, **options)


def write(path, tensors):
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refusal(module, source, sha256=None):
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(ValueError) as refused:
        load_weights(module, str(source), sha256)
    assert "\n" not in str(refused.value)
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    return str(refused.value)


@pytest.fixture(scope="module")
def published():
    return model(4, seed=1).state_dict()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_a_file_of_the_same_model_is_read_whole(tmp_path, published, suffix):
    path = write(tmp_path / f"weights{suffix}", published)
    module = model(4)
    assert load_weights(module, str(path), digest(path)) == (str(path), digest(path), [], None)
    assert all(torch.equal(published[name], t) for name, t in module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "new"),
    [({}, ["classifier.1"]), ({"bottleneck": 8}, ["classifier.1", "classifier.2"])],
)
def test_a_head_of_another_size_stays_new_and_is_said_to(tmp_path, published, options, new):
    path = write(tmp_path / "weights.pth", published)
    module = model(7, **options)
    fresh = module.classifier[-1].weight.clone()
    assert load_weights(module, str(path)).new_layers == new
    assert torch.equal(module.classifier[-1].weight, fresh)
    assert torch.equal(module.features[18][0].weight, published["features.18.0.weight"])


def test_files_from_before_batches_were_counted_load(tmp_path, published):
    old = {name: t for name, t in published.items() if not name.endswith("num_batches_tracked")}
    module = model(4)
    assert load_weights(module, str(write(tmp_path / "old.pth", old))).new_layers == []
    assert module.features[0][1].num_batches_tracked == 0


def test_half_precision_files_are_widened(tmp_path, published):
    half = {n: t.half() if t.is_floating_point() else t for n, t in published.items()}
    module = model(4)
    load_weights(module, str(write(tmp_path / "half.safetensors", half)))
    assert module.features[0][0].weight.dtype == torch.float32


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(tmp_path, published):
    def trying(change, module=None):
        changed = dict(published)
        change(changed)
        return refusal(module or model(4), write(tmp_path / "weights.pth", changed))

    remedy = "choose the model and options that it was saved from"
    said = trying(lambda t: t.pop("features.0.0.weight"))
    assert "it lacks features.0.0.weight" in said and remedy in said
    assert "it lacks classifier.1.bias" in trying(lambda t: t.pop("classifier.1.bias"))
    said = trying(lambda t: t.update({f"{n}.weight": torch.zeros(1) for n in "abc"}))
    assert "the model has no a.weight, b.weight and 1 more" in said
    said = trying(lambda t: t.update({"features.0.0.weight": torch.zeros(32, 1, 3, 3)}))
    assert "features.0.0.weight is of shape (32, 1, 3, 3), not (32, 3, 3, 3)" in said
    said = trying(lambda _: None, MODELS["linear"]((3, 4, 4), 4))
    assert "none of its tensors has a place in the model" in said


def test_batch_norm_weights_do_not_go_into_group_norm(tmp_path, published):
    said = refusal(model(4, norm="group"), write(tmp_path / "weights.pth", published))
    assert "make no trained GroupNorm" in said and 'norm = "frozen"' in said
    own = model(4, seed=1, norm="group").state_dict()
    module = model(4, norm="group")
    assert load_weights(module, str(write(tmp_path / "own.pth", own))).new_layers == []
    assert "it lacks features.0.1.running_mean" in refusal(model(4), tmp_path / "own.pth")


class Harmful:
    def __reduce__(self):
        return (print, ("harm",))


def test_files_that_are_no_weights_are_refused(tmp_path, capsys, published):
    module = model(4)
    assert "there is no" in refusal(module, tmp_path / "none.pth")
    assert "give .safetensors, .pt or .pth" in refusal(module, write(tmp_path / "a.bin", published))
    assert "cannot be read (" in refusal(module, write(tmp_path / "b.pth", Harmful()))
    assert capsys.readouterr().out == ""
    assert "more than tensors by name" in refusal(module, write(tmp_path / "c.pth", {"epoch": 3}))
    for name in ("d.pth", "d.safetensors"):
        (tmp_path / name).write_bytes(b"nonsense")
        assert "cannot be read (" in refusal(module, tmp_path / name)
    path = write(tmp_path / "e.pth", published)
    said = refusal(module, path, "0" * 64)
    assert digest(path) in said and "correct weights_sha256" in said


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves files by name, and counts what is asked of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            file = tmp_path / self.path.partition("?")[0].lstrip("/")
            if not file.is_file():
                self.send_error(404)
                return
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2 if "cut" in self.path else None])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=functools.partial(serving.serve_forever, 0.01))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", asked
        serving.shutdown()
        thread.join()


def test_an_address_is_fetched_once(tmp_path, server, published):
    home, asked = server
    path = write(tmp_path / "weights.pth", published)
    address = f"{home}/weights.pth?download=true"
    for _ in range(2):
        module = model(4)
        assert load_weights(module, address, digest(path)) == (address, digest(path), [], None)
        assert torch.equal(module.classifier[1].weight, published["classifier.1.weight"])
    assert asked == ["/weights.pth?download=true"]


def test_what_an_address_gives_is_kept_only_if_it_is_whole_and_right(tmp_path, server, published):
    home, _ = server
    write(tmp_path / "weights.pth", published)
    module = model(4)
    assert "has the sha256" in refusal(module, f"{home}/weights.pth", "0" * 64)
    (tmp_path / "page.pth").write_text("<html>Please log in</html>")
    line = refusal(module, f"{home}/page.pth")
    assert line.startswith(f"{home}/page.pth cannot be read (") and "cache" not in line
    assert "(the connection was cut)" in refusal(module, f"{home}/weights.pth?cut")
    assert "cannot be fetched (404 Not Found): try again" in refusal(module, f"{home}/none.pth")
    assert list((tmp_path / "cache" / "fedlens" / "weights").iterdir()) == []
    assert "cannot be fetched" in refusal(module, "http://127.0.0.1:1/weights.pth")


def test_a_wrong_file_in_the_cache_is_fetched_again(tmp_path, server, published):
    home, asked = server
    address = f"{home}/weights.pth"
    (tmp_path / "weights.pth").write_text("<html>Come back later</html>")
    refusal(model(4), address)
    write(tmp_path / "weights.pth", published)
    load_weights(model(4), address)
    assert len(asked) == 2


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, published, number):
    changed = {name: tensor.clone() for name, tensor in published.items()}
    changed["classifier.1.bias"][2] = number
    said = refusal(model(4), write(tmp_path / "a.pth", changed))
    assert "has numbers that are not finite in classifier.1.bias: no model can start" in said


class Endless(BaseHTTPRequestHandler):
    """Sends as much as anyone takes; or drop by drop, for ever."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(b"x" if "drip" in self.path else bytes(2**16))
                time.sleep(0.01 if "drip" in self.path else 0)

    def log_message(self, *_):
        pass


def test_an_address_that_never_ends_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "ROOM", 2**20)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=functools.partial(serving.serve_forever, 0.01))
        thread.start()
        home = f"http://127.0.0.1:{serving.server_port}"
        try:
            with pytest.raises(ValueError, match="1 MB"):
                load_weights(module, f"{home}/endless.pth")
            monkeypatch.setattr(download, "TIMEOUT", 0.3)  # on a busy machine it is silence
            with pytest.raises(ValueError, match=r"less than 1000 bytes a second|timed out"):
                load_weights(module, f"{home}/drip.pth")
        finally:
            serving.shutdown()
            thread.join()
    assert list((tmp_path / "cache" / "fedlens" / "weights").iterdir()) == []


def pictures(num_classes=3):
    labels = torch.arange(12) % num_classes
    images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    part = fl.Examples(images, labels)
    return fl.Dataset("pictures", part, part, tuple("abcdef"[:num_classes]))


def test_an_experiment_starts_from_the_file_it_names(tmp_path):
    torch.default_generator.manual_seed(1)
    given = MODELS["linear"]((1, 28, 28), 10).state_dict()
    path = write(tmp_path / "start.safetensors", given)
    file = tmp_path / "experiment.toml"
    text = 'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\n'
    file.write_text(f'{text}weights = "start.safetensors"\nweights_sha256 = "{digest(path)}"\n')
    experiment = fl.Experiment.read(file)
    assert experiment.weights == str(path)
    assert fl.Experiment.of(experiment.plain()) == experiment
    setup = build(experiment)
    assert torch.equal(setup.network.params["fc.weight"], given["fc.weight"])
    assert setup.weights == (str(path), digest(path), [], None)
    address = fl.Experiment.read(file, ["weights=https://example.org/a.pth"])
    assert address.weights == "https://example.org/a.pth"


def test_a_module_given_from_python_is_left_as_it_was(tmp_path):
    body, head = nn.Conv2d(3, 2, 8), nn.Linear(2, 3)
    module = nn.Sequential(body, nn.Flatten(), head)
    before = body.weight.clone()
    start = {name: torch.ones_like(t) for name, t in module.state_dict().items()}
    path = write(tmp_path / "start.pt", start)
    plain = {"dataset": pictures(), "model": module, "rounds": 1, "engine": "sequential"}
    clients = fl.Clients(count=2)
    setup = build(fl.Experiment(**plain, clients=clients, weights=str(path), train=1))
    assert bool((setup.network.frozen["0.weight"] == 1).all())
    assert torch.equal(body.weight, before) and body.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_sha256": "0" * 64}, "weights is None: name the file that has this sum"),
        ({"weights": "a.pth", "weights_sha256": "12"}, "weights_sha256 is '12': give 64 digits"),
        ({"train": 0}, "train is 0: choose 1 or more"),
    ],
)
def test_keys_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError) as refused:
        fl.Experiment(fl.Named("fashion-mnist-mini"), fl.Named("linear"), 1, **changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_weights_in_a_checkpoint_of_a_wrapped_module_are_read(tmp_path, key):
    module = nn.Linear(3, 2)
    wrapped = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"epoch": 3, key: wrapped}, tmp_path / "a.pt")
    other = nn.Linear(3, 2)
    assert load_weights(other, str(tmp_path / "a.pt")).new_layers == []
    assert torch.equal(other.weight, module.weight)
