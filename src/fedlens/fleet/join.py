"""`fedlens fleet join`: run the node of a site, and restart it when it ends."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import torch

from fedlens.fleet import CA, CONNECTED, ENROL, Notify
from fedlens.fleet.final import place_of
from fedlens.fleet.flower import Tail, end, start_node
from fedlens.fleet.keys import Invitation, check_site_keys
from fedlens.fleet.log import LOG
from fedlens.fleet.policy import DEFAULT, FILE, Policy
from fedlens.fleet.site import MISTAKE
from fedlens.fleet.site_data import identity
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer
from fedlens.storage.reading import argument, printable, shortened

PATIENCE = 100.0  # seconds, at least: Flower refuses a node for 60 after it died, as if connected
PAUSE = 5.0
LOOK = 0.5  # seconds between two reads of the logs
ANSWER = 10.0  # seconds to wait for a server to answer
REMEDIES = {  # by OpenSSL's error code for a certificate
    10: "it has expired, so make new keys for the server, and get its ca.pem",
    **dict.fromkeys((62, 64), "check that the server's keys were made with this --host"),
}
REFUSED = re.compile(r"\[code: 2004\] *(.*)")  # in Flower's log: what the gate said


def join(
    home: Path,
    name: str,
    data: Path,
    server: str,
    device: str,
    wait: float,
    notify: Notify,
    cache: bool = True,
    invitation: Invitation | None = None,
) -> None:
    """Take part until interrupted; a ValueError if the server never answers or refuses the site.

    The server must answer within `wait` seconds, and accept the site within `wait` seconds or
    PATIENCE, whichever is longer. After the first answer it may go offline and come back.
    """
    check_site_keys(home, name)
    identity(data)  # or a ValueError
    check_device(device)
    if not (home / FILE).is_file():
        write_atomically(home / FILE, DEFAULT.encode())
    Policy.read(home)
    say = Changes(notify)
    refused_since: float | None = None
    patience = max(wait, PATIENCE)
    with one_writer(home):  # otherwise two processes would be refused in turn
        answers = Tail(home / LOG)
        while True:
            find_server(server, home / CA, wait, say)
            wait = float("inf")
            if invitation is not None:
                try:
                    show(invitation, home, server)
                except (OSError, HTTPException) as error:  # it is stopping
                    say.state(f"{server} does not answer ({error}); trying again")
                    time.sleep(PAUSE)
                    continue
                invitation = None
            log = Tail(home / "node.log")
            process = start_node(home, data, server, device, log.path, cache=cache)
            begun = time.monotonic()
            try:
                said = _follow(process, log, answers, home, server, say)
            finally:
                end(process)
            now, refusals = time.monotonic(), REFUSED.findall(said)
            if not refusals:
                refused_since = None
            elif refused_since is None or now - begun > PATIENCE:  # it was accepted for a while
                refused_since = now
            elif now - refused_since > patience:
                raise ValueError(
                    f"{server} did not let {name} in for {patience:g} s ({refusals[-1]}): give "
                    f"{name}.pub to the person who runs it, and check that no other process uses "
                    "the key"
                )
            why = f"the server says: {refusals[-1]}" if refusals else f"see {log.path}"
            say.state(f"not connected ({why}); trying again")
            time.sleep(PAUSE)


def show(invitation: Invitation, home: Path, server: str) -> None:
    """Make the site's public key known to the server; a ValueError if it is not taken."""
    host, _, port = server.rpartition(":")
    public = (home / f"{invitation.name}.pub").read_text()
    body = json.dumps({"name": invitation.name, "token": invitation.token, "public": public})
    trust = ssl.create_default_context(cafile=str(home / CA))
    asked = HTTPSConnection(host.strip("[]"), int(port), timeout=3 * ANSWER, context=trust)
    try:
        asked.request("POST", ENROL, body)
        answer = asked.getresponse()
        if answer.status != 200:
            why = printable(shortened(answer.read(2000).decode(errors="replace")))
            raise ValueError(f"{server} did not take the invitation of {invitation.name}: {why}")
    finally:
        asked.close()


def find_server(server: str, ca: Path, wait: float, say: Changes) -> None:
    """Return once a server with a certificate of this CA answers; a ValueError if none can.

    Flower retries as well, but less and less often, and does not report what is wrong.
    """
    host, _, port = server.rpartition(":")
    host, last = host.strip("[]"), time.monotonic() + wait
    try:
        trust = ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as error:
        raise ValueError(f"{ca} is not a certificate: get it from the server") from error
    while True:
        try:
            with (
                socket.create_connection((host, int(port)), ANSWER) as connection,
                trust.wrap_socket(connection, server_hostname=host),
            ):
                return
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"the certificate of {server} is not valid by {ca} ({error.verify_message}): "
                + REMEDIES.get(error.verify_code, "get the server's ca.pem")
            ) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # it is stopping, or full
            why = str(error.strerror)
        except ssl.SSLError as error:
            raise ValueError(f"{server} is not the server of a fleet: set --server") from error
        except OSError as error:
            why = error.strerror or "it does not answer"
        if time.monotonic() >= last:
            raise ValueError(
                f"nobody answered at {server} for {wait:g} s ({why}): check that --server is the "
                "address of `fedlens fleet serve`, start that, or wait for it with --wait"
            )
        say.state(f"nobody answers at {server}; trying again")
        time.sleep(LOOK)


def check_device(name: str) -> None:
    """Raise ValueError for a device on which this site cannot train."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f"--device is {name!r}: choose cpu or cuda")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name!r}, but torch sees no such GPU: choose cpu")


def _follow(
    process: subprocess.Popen[bytes],
    log: Tail,
    answers: Tail,
    home: Path,
    server: str,
    say: Changes,
) -> str:
    """Report the state and the answers until the process ends; return all that it logged."""
    said, ended = "", False
    while not ended:
        ended = process.poll() is not None
        said += log.new()
        state = state_by(said, server)
        if state is not None:
            say.state(state)
        for line in answers.new().splitlines():
            if said_by := answer_by(line, home):
                say.answer(said_by)
        time.sleep(0 if ended else LOOK)
    return said


def state_by(said: str, server: str) -> str | None:
    """The state of a node, from the last message about it in its log, or None."""
    signs = {
        CONNECTED: "connected",
        "Connection successful": "connected",
        "Connection attempt failed": f"nobody answers at {server}; trying again",
    }
    at, state = max((said.rfind(sign), state) for sign, state in signs.items())
    return state if at >= 0 else None


def answer_by(line: str, home: Path) -> str | None:
    """A sentence for the user about a line of the site's own log; None if it is no answer."""
    answer = json.loads(line)
    if answer["event"] != "answered":
        return None
    why, own = answer.get("refused") or answer.get("raised"), home / MISTAKE
    if why is not None:
        known = "mistake" in answer and own.is_file()
        how = "refused" if "refused" in answer else "failed"
        return f"{how}: {own.read_text() if known else why}"
    if answer["asked"] == "train":
        sent = f"{answer['sent']['bytes'] / 1e3:.1f} kB"
        return f"trained for {answer['seconds']:.1f} s, and sent {sent}"
    told = {"sizes": "reported how much it holds", "test": "tested the model"}
    if answer["asked"] == "keep":
        place = argument(place_of(home, answer["experiment"]))
        return f"has the final model: try `fedlens predict {place} PHOTOS`"
    return {**told, "open": "opened the sum of the round"}.get(answer["asked"])


@dataclass
class Changes:
    """Reports a site's state when it changes, and its answers; a repeated refusal only once."""

    notify: Notify
    last_state: str = ""
    last_refusal: str = ""

    def state(self, state: str) -> None:
        if state != self.last_state:
            self.last_state = state
            self.notify(state)

    def answer(self, answer: str) -> None:
        refusal = answer if answer.startswith("refused") else ""
        if not refusal or refusal != self.last_refusal:
            self.notify(answer)
        self.last_refusal = refusal
