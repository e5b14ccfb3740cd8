"""The gate passes on what sites need, and nothing else."""

import base64
import contextlib
import http.client
import http.server
import socket
import ssl
import threading
from pathlib import Path

import pytest

from fedlens.fleet.flower import free_port
from fedlens.fleet.gate import PATHS, Gate
from fedlens.fleet.keys import (
    CA,
    CA_KEY,
    NODE_KEY,
    SERVER,
    SERVER_KEY,
    make_server_keys,
    make_site_key,
    public_keys,
)
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
        self.send_response(401 if self.path.endswith("get-fab") else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return


@contextlib.contextmanager
def opened(folder: Path):
    keys, told = folder / "keys", list[str]()
    make_server_keys(keys, ["127.0.0.1"])
    inner = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inner)
    inner.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / SERVER, keys / SERVER_KEY)
    inner.socket = context.wrap_socket(inner.socket, server_side=True)
    thread = threading.Thread(target=inner.serve_forever)
    thread.start()
    port = free_port()
    Inner.seen.clear()
    try:
        address = f"127.0.0.1:{inner.server_port}"
        with Gate("127.0.0.1", port, address, keys, told.append, {b"ann's key": "ann"}):
            yield port, keys, told
    finally:
        inner.shutdown()
        thread.join()
        inner.server_close()


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
        assert ask(port, keys, "/v1/fleet/push-object", body=large) == (200, large)
        own = {"x-own": "signature"}
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
            assert ask(port, keys, path)[0] == 404, path
        assert ask(port, keys, "/v1/fleet/pull-messages", method="GET")[0] == 404
        assert len(Inner.seen) == passed
        assert ask(port, keys, "/v1/fleet/get-fab")[0] == 401
        assert any("key (none) is not registered" in line for line in told)
        for key, word in (
            (b"ann's key", "ann counts as connected"),
            (b"eve's", "is not registered"),
        ):
            shown = {"flwr-public-key": base64.b64encode(key).decode()}
            assert ask(port, keys, "/v1/fleet/get-fab", headers=shown)[0] == 401
            assert word in told[-1]
        assert any("'/v1/control/start-run'" in line for line in told)
    assert len(PATHS) == 12


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
        with (
            socket.create_connection(("127.0.0.1", port), timeout=300) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(raw)
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


def test_a_port_that_is_taken_is_a_mistake(tmp_path):
    with opened(tmp_path) as (port, keys, _):
        taken = Gate("127.0.0.1", port, "127.0.0.1:1", keys, print, {})
        with pytest.raises(ValueError, match="cannot be listened on"):
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
    with pytest.raises(ValueError, match=r"copy of ann\.pub has the same key as ann\.pub: remove"):
        public_keys(tmp_path)
    of_a_login = Ed25519PrivateKey.generate().public_key()
    for content in (b"no key", of_a_login.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)):
        copy.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"is not the public key of a site \(.*\): get it from the"
        ):
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
