"""What a site tells the person who started it, and how processes end with those they serve."""

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedlens.cli import fleet
from fedlens.cli.main import app_of
from fedlens.config.experiment import Experiment
from fedlens.fleet import CA, CONNECTED, SERVER, SERVER_KEY, keys
from fedlens.fleet.flower import Tail, end, free_port, start_node
from fedlens.fleet.gate import Gate
from fedlens.fleet.join import (
    Changes,
    answer_by,
    check_device,
    find_server,
    join,
    state_by,
)
from fedlens.fleet.keys import make_server_keys, make_site_key
from fedlens.fleet.log import LOG
from fedlens.fleet.policy import FILE
from fedlens.fleet.terms import Terms, check_possible, for_fleet
from fedlens.fleet.trial import part_of
from fedlens.setup.data import load_dataset
from fedlens.storage.locks import one_writer
from tests.data.test_layouts import write
from tests.fleet.real import wait_until
from tests.fleet.sites import write_experiment
from tests.fleet.test_serve import made_keys


def test_how_a_site_stands_is_the_last_word_of_its_log():
    failed, there = "Connection attempt failed, retrying", CONNECTED
    assert state_by("something else", "a:1") is None
    assert state_by(failed, "a:1") == "nobody answers at a:1; trying again"
    assert state_by(f"{failed}\n{there}", "a:1") == "connected"
    assert state_by(f"{there}\n{failed}", "a:1") == "nobody answers at a:1; trying again"
    assert state_by(f"{there}\n{failed}\nConnection successful after 3", "a:1") == "connected"


def test_a_state_is_told_when_it_changes_and_a_refusal_once():
    told = list[str]()
    say = Changes(told.append)
    for state in ("connected", "connected", "lost", "connected"):
        say.state(state)
    for answer in ("refused: no", "refused: no", "trained", "trained", "refused: no"):
        say.answer(answer)
    assert told == [
        *("connected", "lost", "connected"),
        *("refused: no", "trained", "trained", "refused: no"),
    ]


def test_what_a_site_answered_is_told_in_words(tmp_path):
    path = write_experiment(tmp_path)
    experiment = Experiment.read(path)
    site = part_of(path, tmp_path / "sites", 0, 4)
    answers = Tail(site.home / LOG)
    terms = Terms.of(experiment, load_dataset(experiment.dataset, None))
    site.answer("sizes", {"experiment": terms.hash, "terms": terms.text, "client": 0}, {})
    line = answers.new().splitlines()[-1]
    refused = f"refused: experiment {terms.hash[:12]} is not approved here"
    assert str(answer_by(line, site.home)).startswith(refused)
    trained = {"event": "answered", "asked": "train", "sent": {"bytes": 1500}, "seconds": 2.0}
    assert answer_by(json.dumps(trained), site.home) == "trained for 2.0 s, and sent 1.5 kB"
    assert answer_by('{"event": "approved"}', site.home) is None


def test_refusals_that_are_repeated_are_one_line_of_the_log_that_counts_them(tmp_path):
    path = write_experiment(tmp_path)
    terms = Terms.of(Experiment.read(path), load_dataset(Experiment.read(path).dataset, None))
    site = part_of(path, tmp_path / "sites", 0, 4)
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    answers, other = Tail(site.home / LOG), {**order, "experiment": "0" * 64}
    seen = [
        len(answers.new().splitlines())
        for asked in (*(order for _ in range(12)), other, order)
        if site.answer("sizes", asked, {})
    ]
    assert seen == [1, *[0] * 11, 1, 1]
    lines = [json.loads(line) for line in (site.home / LOG).read_text().splitlines()]
    assert [line.get("again") for line in lines[-3:]] == [None, 11, None]


def test_what_the_policy_does_not_allow_is_not_approved(tmp_path):
    path = write_experiment(tmp_path)
    experiment = Experiment.read(path)
    terms = Terms.of(experiment, load_dataset(experiment.dataset, None))
    site = part_of(path, tmp_path / "sites", 0, 2)
    site.answer("sizes", {"experiment": terms.hash, "terms": terms.text, "client": 0}, {})
    words = ["fleet", "approve", str(site.home), terms.hash[:6], "--yes"]
    (site.home / FILE).write_text('algorithms = ["fedprox"]\n')
    error = CliRunner().invoke(app_of(), words).exception
    assert isinstance(error, ValueError)
    assert "is not approved: its policy does not allow fedavg: see algorithms in its" in str(error)
    assert [offer.terms for offer in site.approvals.offers()] == [terms]
    (site.home / FILE).write_text('algorithms = ["fedavg"]\n')
    assert CliRunner().invoke(app_of(), words).exit_code == 0
    assert not site.approvals.offers()


def test_the_folder_of_no_site_has_nothing_to_approve(tmp_path):
    error = CliRunner().invoke(app_of(), ["fleet", "approve", str(tmp_path / "nowhere")]).exception
    assert isinstance(error, ValueError)
    assert "nowhere is not a folder: give the --home" in str(error)


def test_a_line_is_told_when_it_is_whole(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.new() == ""
    path.write_text("one\ntw")
    assert tail.new() == "one\n"
    path.write_text("one\ntwo\n")
    assert tail.new() == "two\n"


@pytest.mark.parametrize(
    "server", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:99999", ":9092", "https://a:1"]
)
def test_an_address_needs_a_host_and_a_port(server, tmp_path):
    pytest.importorskip("flwr")
    words = ["fleet", "join", "--server", server, "--name", "ann", "--data", str(tmp_path)]
    error = CliRunner().invoke(app_of(), words).exception
    assert isinstance(error, ValueError)
    assert "--server" in str(error)


@pytest.mark.parametrize("missing", ["node.key", CA, "photos"])
def test_what_a_site_needs_is_named(missing, tmp_path):
    home, data = tmp_path / "ann", tmp_path / "photos"
    make_site_key(home, "ann")
    (home / CA).touch()
    data.mkdir()
    for path in (home / missing, tmp_path / missing):
        if path.is_file():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
    with pytest.raises(ValueError, match=f"{missing} (is missing|does not exist)"):
        join(home, "ann", data, "127.0.0.1:1", "cpu", 0.0, print)


def test_a_site_is_started_once(tmp_path):
    home, data = tmp_path / "ann", write(tmp_path / "photos", ("cat",))
    make_site_key(home, "ann")
    (home / CA).touch()
    with one_writer(home), pytest.raises(ValueError, match="ann is being written by process"):
        join(home, "ann", data, "127.0.0.1:1", "cpu", 0.0, print)


def found_at(server, ca, wait=60.0, told=print):
    find_server(server, ca, wait, Changes(told))


def test_a_server_that_does_not_come_is_told_after_a_while(tmp_path):
    make_server_keys(tmp_path, ["127.0.0.1"])
    server, told = f"127.0.0.1:{free_port()}", list[str]()
    with pytest.raises(ValueError, match=f"nobody answered at {server} for 0 s .*--wait"):
        found_at(server, tmp_path / CA, 0.0)
    with pytest.raises(ValueError, match=r"0\.1 s"):
        found_at(server, tmp_path / CA, 0.1, told.append)
    assert told == [f"nobody answers at {server}; trying again"]


def gate(keys, port, told):
    pytest.importorskip("flwr")
    return Gate("127.0.0.1", port, "127.0.0.1:1", keys, told.append, {})


def test_a_site_may_be_started_before_its_server(tmp_path):
    make_server_keys(tmp_path, ["127.0.0.1"])
    port, told, refused = free_port(), list[str](), list[str]()
    waits = threading.Event()

    def notify(line):
        told.append(line)
        waits.set()

    site = threading.Thread(target=found_at, args=(f"127.0.0.1:{port}", tmp_path / CA, 600, notify))
    site.start()
    assert waits.wait(600)
    with gate(tmp_path, port, refused):
        site.join(600)
    assert told == [f"nobody answers at 127.0.0.1:{port}; trying again"]
    assert not refused


def test_what_is_wrong_with_a_certificate_is_told(tmp_path, monkeypatch):
    right, other, named, old = (tmp_path / name for name in ("right", "other", "named", "old"))
    for folder in (right, other):
        make_server_keys(folder, ["127.0.0.1"])
    make_server_keys(named, ["10.0.0.1"])
    monkeypatch.setattr(keys, "YEARS", -4 / (365 * 24 * 60))  # it begins five minutes ago
    make_server_keys(old, ["127.0.0.1"])
    port = free_port()
    for used, ca, host, word in (
        (right, other, "127.0.0.1", "get the server's ca.pem"),
        (old, old, "127.0.0.1", "has expired.*make new keys for the server"),
        (named, named, "localhost.localdomain", "made with this --host"),
    ):
        monkeypatch.setattr(socket, "create_connection", to_loopback)
        with gate(used, port, []), pytest.raises(ValueError, match=word):
            found_at(f"{host}:{port}", ca / CA)


def to_loopback(address, seconds):
    """A connection as if the name were known here."""
    found = socket.socket()
    found.settimeout(seconds)
    found.connect(("127.0.0.1", address[1]))
    return found


def test_another_service_is_no_server(tmp_path):
    make_server_keys(tmp_path, ["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]

        def greet():
            connection, _ = service.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(4096)

        serving = threading.Thread(target=greet)
        serving.start()
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} is not the server of a fleet"):
            found_at(f"127.0.0.1:{port}", tmp_path / CA)
        serving.join()


def test_a_file_that_is_no_certificate_is_named(tmp_path):
    (tmp_path / CA).write_text("none")
    with pytest.raises(ValueError, match=r"ca\.pem"):
        found_at("127.0.0.1:1", tmp_path / CA)


def test_certificates_hold_by_the_strict_rules(tmp_path):
    """Those of Python 3.13, whatever this one is."""
    make_server_keys(tmp_path, ["10.0.0.1"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / SERVER, tmp_path / SERVER_KEY)
    site = ssl.create_default_context(cafile=str(tmp_path / CA))
    site.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()
    wrapped: list[ssl.SSLSocket] = []
    handshake = threading.Thread(
        target=lambda: wrapped.append(server.wrap_socket(there, server_side=True))
    )
    handshake.start()
    with site.wrap_socket(here, server_hostname="10.0.0.1") as trusted:
        handshake.join()
        assert trusted.getpeercert()
    wrapped[0].close()


@pytest.mark.parametrize("device", ["cud", "cuda:x", "mps", "cuda:99"])
def test_a_device_that_is_not_there_is_told_at_once(device):
    with pytest.raises(ValueError, match=f"--device is '{device}'.*choose cpu"):
        check_device(device)


def test_a_process_ends_with_the_one_it_serves():
    code = "import sys, time; from fedlens.fleet.flower import end_with; end_with(int(sys.argv[1]))"
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    words = [sys.executable, "-c", f"{code}; time.sleep(600)", str(server.pid)]
    serving = subprocess.Popen(words)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            serving.wait(2)
        server.kill()
        server.communicate()
        assert serving.wait(300) == 1
    finally:
        serving.kill()
        serving.wait()


def test_a_site_takes_no_orders_but_those_that_it_knows(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))  # as for every process of a site
    from fedlens.fleet import messages, node

    class Asked:
        def __init__(self, kind, content):
            self.metadata, self.content = SimpleNamespace(message_type=kind), content

    class Worker(node.Worker):
        def ask(self, what, facts, content):
            raise AssertionError

    monkeypatch.setattr(node, "Message", lambda content, **_: content)
    order = messages.packed("{}", b"")
    for kind, content in (("train", order), ("system", order), ("train.train", {})):
        assert node.answer(Asked(kind, content), Worker()).code == messages.RAISED


def test_an_order_whose_process_dies_is_answered_and_the_next_has_another_process(
    tmp_path, monkeypatch
):
    pytest.importorskip("flwr")
    from flwr.app.error import Error

    from fedlens.fleet import messages, node

    (tmp_path / "data.npz").touch()
    worker = node.Worker(str(tmp_path), str(tmp_path / "data.npz"), "cpu", "true")
    for _ in range(2):
        found = worker.ask("test", '{"experiment": "none"}', [b""])
        assert not isinstance(found, Error)
        assert "refused" in found[0]
    worker.process.kill()
    found = worker.ask("test", "{}", [b""])
    assert isinstance(found, Error)
    assert found.code == messages.ENDED
    assert "refused" in worker.ask("test", "{}", [b""])[0]
    assert isinstance(worker.ask("no such thing", "{}", [b""]), Error)
    worker.process.kill()
    worker.process.wait()


def test_programs_of_the_same_names_that_stand_first_on_the_path_are_not_run(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    others, home, told = tmp_path / "bin", tmp_path / "ann", list[str]()
    others.mkdir()
    for name in ("flower-superexec", "flower-supernode", "flwr-clientapp", "python", "python3"):
        (others / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (others / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{others}{os.pathsep}{os.environ['PATH']}")
    make_server_keys(tmp_path / "keys", ["127.0.0.1"])
    make_site_key(home, "ann")
    (home / CA).write_bytes((tmp_path / "keys" / CA).read_bytes())
    port, log = free_port(), home / "node.log"
    names = {key: name for name, key in keys.public_keys(home).items()}
    # A gate without a SuperLink hears when it connects.
    with Gate("127.0.0.1", port, "127.0.0.1:1", tmp_path / "keys", told.append, names) as gate:
        reached = threading.Event()
        monkeypatch.setattr(gate, "_refusal", lambda *_: reached.set())
        process = start_node(home, home, f"127.0.0.1:{port}", "cpu", log)
        try:
            wait_until(lambda: reached.is_set() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            assert not (tmp_path / "ran").exists()
            assert log.stat().st_mode & 0o077 == 0
        finally:
            end(process)


@pytest.mark.parametrize("found", [None, "1.40.0", "1.43.0", "2.0.0"])
def test_another_version_of_flower_is_refused_before_anything_is_started(found, monkeypatch):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=r"1\.41"):
        fleet._check_installed()


@pytest.mark.parametrize("command", ["serve", "app"])
def test_what_a_fleet_cannot_do_is_refused_before_anything_is_started(command, tmp_path):
    pytest.importorskip("flwr")
    path, made = write_experiment(tmp_path, '{ name = "fedbuff" }'), tmp_path / "made"
    keys = made_keys(tmp_path / "keys")
    where = ["--to", str(made)] if command == "app" else ["--keys", str(keys), "--out", str(made)]
    error = CliRunner().invoke(app_of(), ["fleet", command, str(path), *where]).exception
    assert isinstance(error, ValueError)
    assert "leave asynchronous algorithms out" in str(error)
    assert not made.exists()


@pytest.mark.parametrize("key", ['evaluate.on=["test", "validation"]', "evaluate.twin=true"])
def test_what_the_server_has_no_examples_for_is_refused(key, tmp_path):
    described = Experiment.read(write_experiment(tmp_path), [key])
    with pytest.raises(ValueError, match="training examples"):
        check_possible(for_fleet(described))


def test_the_sites_of_an_app_have_approved_what_its_server_asks(tmp_path):
    """In Flower's simulation, where sites hold parts of the experiment's own data."""
    path, made = write_experiment(tmp_path, per_round=4), tmp_path / "app"
    words = ["fleet", "app", str(path), "--to", str(made), "--sites", "2"]
    assert CliRunner().invoke(app_of(), words).exit_code == 0
    path = made / "fedlens_fleet" / "experiment.toml"
    experiment = Experiment.read(path)
    terms = Terms.of(experiment, load_dataset(experiment.dataset, None))
    site = part_of(path, tmp_path / "sites", 0, 2)
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    assert site.answer("sizes", order, {}).facts["size"] > 0


@pytest.mark.parametrize("partition", [0, 1])
def test_a_simulated_node_holds_the_part_of_the_client_that_it_is(partition, tmp_path, monkeypatch):
    """Whatever number Flower has given it, by chance: so models have the bytes of `fedlens run`."""
    pytest.importorskip("flwr")
    from fedlens.fleet.apps import _site

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path, config = write_experiment(tmp_path), {"partition-id": partition, "num-partitions": 2}
    homes = [_site(config, {"client": client}, path).home.name for client in range(2)]
    assert homes == ["site-0000", "site-0001"]
