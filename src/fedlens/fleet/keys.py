"""Certificates and keys of a fleet: a CA, a server certificate, a key for each site."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedlens.config.options import check
from fedlens.fleet import CA, CA_KEY, NODE_KEY, SERVER, SERVER_KEY
from fedlens.storage.files import write_atomically
from fedlens.storage.reading import argument

YEARS = 5
INVITED = ".invited"  # the ending of what a server keeps of an invitation


def make_server_keys(folder: Path, hosts: Sequence[str]) -> None:
    """Make ca.pem for all machines, and server.pem and server.key for a server at `hosts`."""
    _refuse_existing([folder / name for name in (CA, CA_KEY, SERVER, SERVER_KEY)])
    ca = ec.generate_private_key(ec.SECP256R1())
    _write(folder / CA_KEY, _private(ca, ssh=False))
    _write_signed(folder, ca, hosts)


def renew_server_keys(folder: Path, hosts: Sequence[str]) -> None:
    """New certificates by the key of the CA that is there.

    Sites that have the older ca.pem accept them until that one expires: the CA is the same.
    """
    if not (folder / CA_KEY).is_file():
        raise ValueError(f"{folder} has no {CA_KEY}, which signs: renew where the keys were made")
    ca: Any = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    for name in (CA, SERVER, SERVER_KEY):
        (folder / name).unlink(missing_ok=True)
    _write_signed(folder, ca, hosts)


def _write_signed(folder: Path, ca: Any, hosts: Sequence[str]) -> None:
    server = ec.generate_private_key(ec.SECP256R1())
    _write(folder / CA, _signed("Fedlens fleet CA", ca, ca, []))
    _write(folder / SERVER, _signed(hosts[0], server, ca, [*hosts, "127.0.0.1", "localhost"]))
    _write(folder / SERVER_KEY, _private(server, ssh=False))


def make_site_key(folder: Path, name: str, renew: bool = False) -> None:
    """Make node.key, which never leaves the site, and NAME.pub, which the server needs.

    With `renew` they replace those that are there: a site keeps its number, and its approvals.
    """
    check_name(name)
    paths = [folder / NODE_KEY, folder / f"{name}.pub"]
    if renew:
        check_site_keys(folder, name)
        for path in paths:
            path.unlink(missing_ok=True)
    _refuse_existing(paths)
    key = ec.generate_private_key(ec.SECP384R1())
    _write(folder / NODE_KEY, _private(key, ssh=True))
    _write(folder / f"{name}.pub", as_text(key.public_key()).encode())


def check_name(name: str) -> None:
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{name!r} is not the name of a site: use letters, digits, - and _")


def public_keys(folder: Path) -> dict[str, bytes]:
    """The public keys of a server's sites, by name, in the form that Flower takes."""
    found, owners = dict[str, bytes](), dict[bytes, str]()
    for path in sorted(folder.glob("*.pub")):
        try:
            content = _content(site_key(path.read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{path} is not the public key of a site ({error}): get it from the site again"
            ) from error
        owner = owners.setdefault(content, path.stem)
        if owner != path.stem:  # only one of them could ever connect
            raise ValueError(f"{path} has the same key as {owner}.pub: remove one of them")
        found[path.stem] = content
    if not found and not invited(folder):
        raise ValueError(f"{folder} has no *.pub: put the public keys of the sites there")
    return found


def invite(folder: Path, name: str, server: str, days: float, to: Path) -> None:
    """Write the file with which a site makes itself known to a server, once."""
    check_name(name)
    if (folder / f"{name}.pub").exists():
        raise ValueError(f"{folder} has {name}.pub: {name} is known already, and joins without")
    _refuse_existing([to])
    token, until = secrets.token_urlsafe(32), time.time() + 86400 * days
    mark = {"sha256": hashlib.sha256(token.encode()).hexdigest(), "until": until}
    path = folder / f"{name}{INVITED}"
    path.unlink(missing_ok=True)
    _write(path, json.dumps(mark).encode(), secret=True)
    ca = (folder / CA).read_text()
    told = {"server": server, "name": name, "token": token, "ca": ca}
    _write(to, json.dumps(told, indent=2).encode(), secret=True)


@dataclass(frozen=True)
class Invitation:
    """What `fedlens fleet invite` writes for a site."""

    server: str
    name: str
    token: str
    ca: str

    @classmethod
    def read(cls, path: Path) -> Invitation:
        try:
            found: Invitation = check(json.loads(path.read_bytes()), cls, str(path))
        except ValueError as error:
            raise ValueError(f"{path} is no invitation ({error}): get another") from error
        return found

    def accept(self, home: Path) -> None:
        """Make the site's key, unless it is there, and put down the server's ca.pem."""
        if not (home / NODE_KEY).is_file():
            make_site_key(home, self.name)
        write_atomically(home / CA, self.ca.encode())


def invited(folder: Path) -> list[str]:
    """The sites that were invited and did not come yet."""
    return sorted(path.name.removesuffix(INVITED) for path in folder.glob(f"*{INVITED}"))


def enrol(folder: Path, name: Any, token: Any, public: Any) -> bytes:
    """Take the public key of a site that was invited, and return it in the form of `public_keys`.

    A ValueError if it was not invited. One that is asked for again by the same site is taken again.
    """
    if not all(isinstance(one, str) for one in (name, token, public)):
        raise ValueError("it names no site")
    check_name(name)
    mark, path = folder / f"{name}{INVITED}", folder / f"{name}.pub"
    if path.is_file():
        if path.read_bytes() != public.encode():
            raise ValueError(f"{name} is known already, by another key")
        return public_keys(folder)[name]
    if not mark.is_file():
        raise ValueError(f"{name} was not invited")
    known = json.loads(mark.read_bytes())
    if not hmac.compare_digest(known["sha256"], hashlib.sha256(token.encode()).hexdigest()):
        raise ValueError(f"{name} was invited by another file")
    if time.time() > known["until"]:
        raise ValueError(f"the invitation of {name} is too old: ask for another")
    try:
        key = _content(site_key(public))
    except ValueError as error:
        raise ValueError(f"it sent no public key of a site: {error}") from error
    if key in public_keys(folder).values():
        raise ValueError("another site has this key")
    _write(path, public.encode())
    mark.unlink()
    return key


def withdraw(folder: Path, name: str) -> None:
    """Let a site take part no more; its key is kept aside."""
    check_name(name)
    path, mark = folder / f"{name}.pub", folder / f"{name}{INVITED}"
    if not path.is_file() and not mark.is_file():
        raise ValueError(f"{folder} has no {name}.pub: it is not a site of this server")
    mark.unlink(missing_ok=True)
    if path.is_file():
        path.replace(folder / f"{name}.withdrawn")


def site_key(text: str | bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a site; a ValueError if the text is none."""
    try:
        key = load_ssh_public_key(text.encode() if isinstance(text, str) else text)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):  # Flower accepts no other kind
        raise ValueError("`fedlens fleet keys --site` makes others")
    return key


def as_text(key: ec.EllipticCurvePublicKey) -> str:
    content: bytes = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return content.decode()


def texts(paths: Iterable[Path]) -> dict[str, str]:
    """The public keys of sites in these files, by name, as one line each."""
    return {path.stem: as_text(site_key(path.read_bytes())) for path in sorted(paths)}


def fingerprint(text: str) -> str:
    """What `ssh-keygen -l` prints for a public key."""
    if as_text(site_key(text)) != text:
        raise ValueError("the key of a site is not written as Fedlens writes it")
    found = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return f"SHA256:{base64.b64encode(found).decode().rstrip('=')}"


def check_server_keys(folder: Path) -> None:
    """Raise ValueError if a server's keys are missing, or its certificates invalid or expired."""
    for name in (CA, SERVER, SERVER_KEY):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: make keys with `fedlens fleet keys`")
    for name in (CA, SERVER):
        try:
            last = x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
        except ValueError as error:
            raise ValueError(f"{folder / name} is not a certificate: {error}") from error
        if last < datetime.datetime.now(datetime.UTC):
            raise ValueError(
                f"{folder / name} has expired, on {last:%Y-%m-%d}: renew it with `fedlens fleet "
                f"keys {argument(folder)} --host ADDRESS --renew`, and give ca.pem to all sites"
            )


def check_site_keys(home: Path, name: str) -> None:
    """Raise ValueError unless this is the name of a site, and its folder has what it needs."""
    check_name(name)
    for needed, remedy in (
        (NODE_KEY, f"make it with `fedlens fleet keys {argument(home)} --site {name}`"),
        (CA, "get it from the server"),
    ):
        if not (home / needed).is_file():
            raise ValueError(f"{home / needed} is missing: {remedy}")


def _content(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form that Flower takes."""
    content: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def _private(key: Any, ssh: bool) -> bytes:
    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    content: bytes = key.private_bytes(Encoding.PEM, form, NoEncryption())
    return content


def _signed(name: str, key: Any, ca: Any, hosts: Sequence[str]) -> bytes:
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        for text in (name, "Fedlens fleet CA")
    )
    # Python 3.13 accepts no CA without the permitted uses of its key.
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key is ca,
        crl_sign=key is ca,
        encipher_only=False,
        decipher_only=False,
    )
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=key is ca, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key()), critical=False
        )
    )
    if hosts:
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    content: bytes = made.sign(ca, hashes.SHA256()).public_bytes(Encoding.PEM)
    return content


def _general_name(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} exists, and is not overwritten: choose another folder")


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if secret or path.suffix == ".key" else 0o644
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
