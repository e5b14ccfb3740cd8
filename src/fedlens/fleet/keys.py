"""Certificates and keys of a fleet: a CA, a server certificate, a key for each site."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Iterable, Sequence
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
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedlens.fleet import CA, CA_KEY, NODE_KEY, SERVER, SERVER_KEY
from fedlens.storage.reading import argument

YEARS = 5


def make_server_keys(folder: Path, hosts: Sequence[str]) -> None:
    """Make ca.pem for all machines, and server.pem and server.key for a server at `hosts`."""
    _refuse_existing([folder / name for name in (CA, CA_KEY, SERVER, SERVER_KEY)])
    ca, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    _write(folder / CA, _signed("Fedlens fleet CA", ca, ca, []))
    _write(folder / CA_KEY, _private(ca, ssh=False))
    _write(folder / SERVER, _signed(hosts[0], server, ca, [*hosts, "127.0.0.1", "localhost"]))
    _write(folder / SERVER_KEY, _private(server, ssh=False))


def make_site_key(folder: Path, name: str) -> None:
    """Make node.key, which never leaves the site, and NAME.pub, which the server needs."""
    check_name(name)
    _refuse_existing([folder / NODE_KEY, folder / f"{name}.pub"])
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
            key = site_key(path.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"{path} is not the public key of a site ({error}): get it from the site again"
            ) from error
        content = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        owner = owners.setdefault(content, path.stem)
        if owner != path.stem:  # only one of them could ever connect
            raise ValueError(f"{path} has the same key as {owner}.pub: remove one of them")
        found[path.stem] = content
    if not found:
        raise ValueError(f"{folder} has no *.pub: put the public keys of the sites there")
    return found


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
    return {path.stem: as_text(site_key(path.read_bytes())) for path in paths}


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
                f"{folder / name} has expired, on {last:%Y-%m-%d}: make keys in another folder "
                "with `fedlens fleet keys`, copy the *.pub there, and give its ca.pem to all sites"
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


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if path.suffix == ".key" else 0o644
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
