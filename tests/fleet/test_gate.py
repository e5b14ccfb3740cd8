"""The gate passes on what sites need, and nothing else."""

import asyncio
import base64
import contextlib
import http.client
import http.server
import re
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedlens.fleet import CA, CA_KEY, NODE_KEY, SERVER, SERVER_KEY
from fedlens.fleet.flower import free_port
from fedlens.fleet.gate import PATHS, Gate
from fedlens.fleet.keys import make_server_keys, make_site_key, public_keys
from tests.fleet.real import wait_until
from tests.fleet.sites import write_experiment

for needed in ("h11", "httpx", "cryptography"):
    pytest.importorskip(needed, reason="a fleet needs flwr: pip install 'fedlens[fleet]'")


class Inner(http.server.BaseHTTPRequestHandler):
    """In the place of a SuperLink: it says what it was asked."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, bytes, str | None]] = []  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, body, self.headers.get("x-own")))
        self.send_response(400 if self.path.endswith("activate-node") else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return


@contextlib.contextmanager
def behind(folder: Path):
    """The keys of a server that knows ann, and the address of what is behind its gate."""
    keys = folder / "keys"
    make_server_keys(keys, ["127.0.0.1"])
    make_site_key(keys, "ann")
    inner = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inner)
    inner.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / SERVER, keys / SERVER_KEY)
    inner.socket = context.wrap_socket(inner.socket, server_side=True)
    thread = threading.Thread(target=inner.serve_forever)
    thread.start()
    Inner.seen.clear()
    try:
        yield keys, f"127.0.0.1:{inner.server_port}"
    finally:
        inner.shutdown()
        thread.join()
        inner.server_close()


def names_of(keys):
    return {key: name for name, key in public_keys(keys).items()}


@contextlib.contextmanager
def opened(folder: Path):
    port, told = free_port(), list[str]()
    with (
        behind(folder) as (keys, address),
        Gate("127.0.0.1", port, address, keys, told.append, names_of(keys)),
    ):
        yield port, keys, told


IN_A_PROCESS = """
import resource, sys
from pathlib import Path
from fedlens.fleet.gate import Gate
from fedlens.fleet.keys import public_keys

_, port, address, keys, handles, spare = sys.argv
resource.setrlimit(resource.RLIMIT_NOFILE, (int(handles), int(handles)))
tell = lambda line: print(line, flush=True)
names = {key: name for name, key in public_keys(Path(keys)).items()}
with Gate("127.0.0.1", int(port), address, Path(keys), tell, names):
    tell("open")
    input()
    taken = []
    try:
        while True:
            taken.append(open("/dev/null"))
    except OSError:
        del taken[: int(spare)]
    tell(f"{len(taken)} handles taken")
    input()
"""


@contextlib.contextmanager
def in_a_process(folder: Path, handles=1024, spare=None):
    """A gate in a process with so many handles, of which others leave only `spare`."""
    port = free_port()
    with behind(folder) as (keys, address):
        words = [*map(str, (port, address, keys, handles, spare or 0))]
        with subprocess.Popen(
            [sys.executable, "-c", IN_A_PROCESS, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process:
            try:
                assert process.stdout and process.stdin
                assert process.stdout.readline() == "open\n"
                if spare is not None:
                    process.stdin.write("\n")
                    process.stdin.flush()
                    assert "taken" in process.stdout.readline()
                yield port, keys, process
            finally:
                process.kill()


def signed(keys, late=0.0, key=NODE_KEY):
    """The headers of a request by a site, as Flower makes them, on a clock that is late."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    private = load_ssh_private_key((keys / key).read_bytes(), None)
    stamp = (datetime.now(UTC) - timedelta(seconds=late)).isoformat()
    signature = private.sign(stamp.encode(), ECDSA(SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public_keys(keys)["ann"]).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


def ask(port, keys, path, method="POST", body=b"", headers=None):
    trust = ssl.create_default_context(cafile=keys / CA)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=300)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_fleet_api_is_passed_on_and_nothing_else(tmp_path):
    with opened(tmp_path) as (port, keys, told):
        large = bytes(range(256)) * 40_000
        own = signed(keys)
        assert ask(port, keys, "/v1/fleet/push-object", body=large, headers=own) == (200, large)
        own["x-own"] = "signature"
        assert ask(port, keys, "/v1/fleet/pull-messages", body=b"1", headers=own) == (200, b"1")
        assert Inner.seen[-1] == ("/v1/fleet/pull-messages", b"1", "signature")
        passed = len(Inner.seen)
        for path in (
            *("/v1/control/start-run", "/v1/runtime/pull-messages", "/health", "/", "*"),
            *("/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run"),
            *("/v1/fleet/pull-messages/../../control/start-run", "//v1/fleet/pull-messages"),
            *(
                "/v1/fleet/pull-messages?x=1",
                "/v1/fleet/",
                "https://127.0.0.1/v1/control/start-run",
            ),
        ):
            assert ask(port, keys, path, headers=own)[0] == 404, path
        assert ask(port, keys, "/v1/fleet/pull-messages", method="GET", headers=own)[0] == 404
        assert len(Inner.seen) == passed
        assert any("'/v1/control/start-run'" in line for line in told)
    assert len(PATHS) == 12


def test_whoever_has_not_signed_as_a_site_is_refused_with_the_reason(tmp_path):
    with opened(tmp_path) as (port, keys, told):
        make_site_key(tmp_path / "eve", "ann")
        good, other = signed(keys), signed(tmp_path / "eve")
        for headers, word in (
            ({}, "key (none) is not registered"),
            (other, "is not registered"),
            (good | {"flwr-signature": other["flwr-signature"]}, "did not sign"),
            (good | {"flwr-timestamp": "now"}, "did not sign"),
            (signed(keys, late=400), "the clock of ann is 400 s behind this server's"),
            (signed(keys, late=-60), "s ahead of this server's"),
        ):
            status, text = ask(port, keys, "/v1/fleet/get-run", headers=headers)
            assert status == 400 and word in text.decode() and word in told[-1]
        assert not Inner.seen
        assert ask(port, keys, "/v1/fleet/get-run", headers=signed(keys, late=200))[0] == 200
        status, text = ask(port, keys, "/v1/fleet/activate-node", headers=good)
        assert status == 400 and b"ann counts as connected" in text  # the SuperLink refuses it


def knock(port, count):
    return [socket.create_connection(("127.0.0.1", port), timeout=300) for _ in range(count)]


@pytest.mark.parametrize(("handles", "spare"), [(256, None), (1024, 20)])
def test_a_site_gets_in_though_strangers_hold_all_connections(handles, spare, tmp_path):
    """As many as the gate has handles, or as what others in its process have left of them."""
    with in_a_process(tmp_path, handles, spare) as (port, keys, process):
        flood = knock(port, 300)
        try:
            for _ in range(3):
                assert ask(port, keys, "/v1/fleet/get-run", headers=signed(keys))[0] == 200
        finally:
            for one in flood:
                one.close()
        assert ask(port, keys, "/v1/fleet/get-run", headers=signed(keys))[0] == 200
        process.kill()
        said = process.stdout.read().splitlines()
        assert sum("connections are taken" in line for line in said) == 1
        assert sum("Too many open files" in line for line in said) == (1 if spare else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("framing", ["content-length: 20000000", "transfer-encoding: chunked"])
def test_what_strangers_send_is_not_kept(framing, tmp_path):
    """24 connections that would send 20 MB each, all open at once."""
    piece = bytes(10_000)
    if "chunked" in framing:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode()
    with in_a_process(tmp_path) as (port, keys, process):
        assert ask(port, keys, "/v1/fleet/get-run", headers=signed(keys))[0] == 200

        def most():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]

        before, trust = most(), ssl.create_default_context(cafile=keys / CA)
        with contextlib.ExitStack() as stack:
            for plain in knock(port, 24):
                one = stack.enter_context(trust.wrap_socket(plain, server_hostname="127.0.0.1"))
                with contextlib.suppress(OSError):  # it is cut off
                    one.sendall(head)
                    for _ in range(2000):
                        one.sendall(piece)
            assert ask(port, keys, "/v1/fleet/get-run", headers=signed(keys))[0] == 200
            assert most() - before < 24 * 20_000_000 / 4


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nPOST /v1/control/start-run HTTP/1.1\r\n\r\n",
        b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\n"
        b"content-length: 0\r\ncontent-length: 9\r\n\r\n",
        b"POST /v1/fleet/get-run\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
    ],
)
def test_no_request_hides_in_another(raw, tmp_path):
    with opened(tmp_path) as (port, keys, _):
        trust = ssl.create_default_context(cafile=keys / CA)
        own = "".join(f"{name}: {value}\r\n" for name, value in signed(keys).items())
        with (
            socket.create_connection(("127.0.0.1", port), timeout=300) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(raw.replace(b"host: x\r\n", f"host: x\r\n{own}".encode()))
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass
        assert all(path == "/v1/fleet/get-run" for path, _, _ in Inner.seen)


def test_who_speaks_no_tls_or_trusts_another_ca_is_named(tmp_path):
    with opened(tmp_path) as (port, _, told):
        with socket.create_connection(("127.0.0.1", port), timeout=300) as plain:
            plain.sendall(b"POST /v1/control/start-run HTTP/1.1\r\n\r\n")
            with contextlib.suppress(OSError):
                assert b"200" not in plain.recv(100)
        make_server_keys(tmp_path / "other", ["127.0.0.1"])
        with pytest.raises(ssl.SSLError):
            ask(port, tmp_path / "other", "/v1/fleet/get-run")
        wait_until(lambda: "http request" in str(told) and "unknown ca" in str(told))


def test_a_connection_that_is_given_up_before_it_is_served_is_closed(tmp_path):
    made, (ours, theirs) = Gate("127.0.0.1", 0, "", tmp_path, print, {}), socket.socketpair()
    trust = ssl.create_default_context()
    task = made._loop.create_task(made._connection(ours, "10.0.0.7", trust, None))
    made._open.add(task)
    made._strangers[task] = ours
    task.add_done_callback(made._left)
    task.cancel()
    made._loop.run_until_complete(asyncio.wait([task]))
    assert (ours.fileno(), made._open, made._strangers) == (-1, set(), {})
    theirs.close()
    made._loop.close()


def test_a_port_that_is_taken_is_a_mistake(tmp_path):
    with opened(tmp_path) as (port, keys, _):
        taken = Gate("127.0.0.1", port, "127.0.0.1:1", keys, print, {})
        with pytest.raises(ValueError, match="listened"):
            taken.__enter__()


def test_keys_are_not_overwritten_and_not_for_others_to_read(tmp_path):
    make_server_keys(tmp_path, ["fleet.example", "10.0.0.1"])
    make_site_key(tmp_path, "ann")
    for name in (CA_KEY, SERVER_KEY, NODE_KEY):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    before = (tmp_path / NODE_KEY).read_bytes()
    with pytest.raises(ValueError, match="not overwritten"):
        make_site_key(tmp_path, "ann")
    with pytest.raises(ValueError, match="not overwritten"):
        make_server_keys(tmp_path, ["fleet.example"])
    assert (tmp_path / NODE_KEY).read_bytes() == before
    assert list(public_keys(tmp_path)) == ["ann"]
    with pytest.raises(ValueError, match="not the name of a site"):
        make_site_key(tmp_path / "x", "../ann")


def test_a_key_that_stands_there_twice_or_is_none_is_named(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    make_site_key(tmp_path, "ann")
    copy = tmp_path / "copy of ann.pub"
    copy.write_bytes((tmp_path / "ann.pub").read_bytes())
    with pytest.raises(ValueError, match="same key"):
        public_keys(tmp_path)
    of_a_login = Ed25519PrivateKey.generate().public_key()
    for content in (b"no key", of_a_login.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)):
        copy.write_bytes(content)
        with pytest.raises(ValueError, match="public key"):
            public_keys(tmp_path)


@pytest.mark.parametrize(
    ("per_round", "at_least", "said"),
    [
        (1, 0, "0 is not in the range x>=1"),
        (1, 2, "--at-least is 2, but"),
        (2, 1, "clients.per_round is 2, but"),
    ],
)
def test_no_more_sites_are_waited_for_than_there_are(per_round, at_least, said, tmp_path, fedlens):
    make_server_keys(tmp_path, ["127.0.0.1"])
    make_site_key(tmp_path, "ann")
    words = ["--keys", tmp_path, "--at-least", at_least]
    ended = fedlens("fleet", "serve", write_experiment(tmp_path, per_round=per_round), *words)
    assert ended.status == 2 and said in ended.err
