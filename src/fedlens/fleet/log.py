"""The audit log of a site or a server: what was asked, approved, refused and sent.

Lines are chained (`storage.chained`), and numbered over all files of the log. `log.head`, in a file
of its own, says where they end. Each message quotes the `mark` of its sender's log, and its
receiver writes that down: then neither can change what was before, or cut off what came after,
without contradicting the log of the other one.

It has names, hashes and numbers of bytes, and never what was in a message or in a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.fleet.status import Status
from fedlens.storage.chained import append, chained, parsed, written
from fedlens.storage.reading import printable, shortened

if TYPE_CHECKING:
    from fedlens.core import Tree
    from fedlens.fleet.payload import Reply

LOG, HEAD = "log.jsonl", "log.head"
BEGINNING = "a log of a fleet"
LOST = "went on without log.head"
MOST_BYTES = 8 * 2**20  # of a file: the next line begins another
LONGEST = 2**16  # bytes of a line, at most
MARK = re.compile(r"([0-9a-f]{16}):([0-9]{1,12}):([0-9a-f]{64})")
NOT_COMPARED = ("time", "seconds", "noted")  # of a refusal that is repeated


@dataclass(frozen=True)
class Head:
    """Where a log ends."""

    log: str  # drawn when it was begun
    line: int = 0
    chain: str = BEGINNING
    refusal: str = ""  # the last line, if it is a refusal
    again: int = 0  # how often that was repeated since
    ledger: str = ""  # the mark of the site's ledger when a line last had one

    @property
    def mark(self) -> str:
        return f"{self.log}:{self.line}:{self.chain}"


@dataclass(frozen=True)
class Log:
    """The log in a folder. Several processes may append to it in turns."""

    home: Path

    def add(self, event: str, **facts: Any) -> str:
        """Append a line that is on the disk when this returns; return the mark of the log.

        A refusal that is repeated is counted, and the next line says how often `again`.
        """
        with self._head() as (head, handle):
            what = {key: part for key, part in facts.items() if key not in NOT_COMPARED}
            failed = "refused" in facts or "raised" in facts
            refusal = chained(event, what) if failed else ""
            if refusal and refusal == head.refusal:
                head = replace(head, again=head.again + 1)
            else:
                if not head.line or head.refusal == LOST:
                    begins = {"event": "begun", "log": head.log}
                    head = self._append(head, {"event": LOST} if head.line else begins)
                more = {"again": head.again} if head.again else {}
                head = replace(self._append(head, {"event": event, **facts, **more}), again=0)
                head = replace(head, refusal=refusal, ledger=facts.get("ledger", head.ledger))
            append(handle, 0, json.dumps(asdict(head)).encode())
        return head.mark

    @property
    def mark(self) -> str:
        return self.head.mark

    @property
    def head(self) -> Head:
        with self._head() as (head, _):
            return head

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """All whole lines, the oldest first, each with the name of its file."""
        for path in self.files():
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield path.name, line

    def files(self) -> list[Path]:
        return [*sorted(self.home.glob("log.*.jsonl")), *self.home.glob(LOG)]

    def events(self) -> Iterator[dict[str, Any]]:
        """The contents of the lines; those that cannot be read are left out."""
        for _, line in self.lines():
            with suppress(ValueError):
                yield parsed(line)[0]

    @contextmanager
    def _head(self) -> Iterator[tuple[Head, int]]:
        """The end of the log, and the file that says so, while no other process appends."""
        self.home.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        handle = os.open(self.home / HEAD, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # ends when it is closed
            head = _read_head(handle)
            if head is None:
                lines = list(self.events())
                name = lines[0].get("log") if lines else None
                marks = [one["ledger"] for one in lines if "ledger" in one]
                ledger = marks[-1] if marks else ""
                head = Head(name or secrets.token_hex(8), refusal=LOST, ledger=ledger)
            with suppress(LookupError, ValueError):  # no line yet, or one that was changed
                content, chain = parsed(self._last())
                if content["line"] > head.line:  # killed after a line, and before the head
                    was = LOST if head.refusal == LOST else ""
                    head = Head(head.log, content["line"], chain, was, ledger=head.ledger)
            yield head, handle
        finally:
            os.close(handle)

    def _last(self) -> bytes:
        """The last whole line of the last file."""
        with self.files()[-1].open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST))
            return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]

    def _append(self, head: Head, content: dict[str, Any]) -> Head:
        path, number = self.home / LOG, head.line + 1
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            path.replace(self.home / f"log.{head.line:012}.jsonl")  # where it ends
        content = {"line": number, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **content}
        line, chain = written(head.chain, content)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = os.fstat(handle).st_size
            torn = os.pread(handle, LONGEST, max(0, end - LONGEST)).rpartition(b"\n")[2]
            append(handle, end - len(torn), line)
        finally:
            os.close(handle)
        return replace(head, line=number, chain=chain)


@dataclass(frozen=True)
class Verified:
    """What was found in a log."""

    head: Head
    wrong: list[str]
    known: dict[int, str]  # the chains of its lines, by number

    def against(self, other: Path) -> list[str]:
        """How this log contradicts the marks of it that another log has noted."""
        noted = [one["noted"] for one in Log(other).events() if isinstance(one.get("noted"), dict)]
        marks = [(one.get("of"), found) for one in noted if (found := _mark(one.get("mark")))]
        names = {name for name, (log, _, _) in marks if log == self.head.log}
        if not names:
            return [f"{other} has noted nothing of this log"]
        others = {name for name, (log, _, _) in marks if log != self.head.log} & names
        return [f"{other} has noted another log of {name}, too" for name in sorted(others)] + [
            f"line {line} is not as {other} has noted it"
            for _, (log, line, chain) in marks
            if log == self.head.log and self.known.get(line) != chain
        ]


def verify(home: Path) -> Verified:
    """Read a whole log; each line that was changed, taken out or cut off is found."""
    wrong, known = list[str](), dict[int, str]()
    number, chain, log = 0, BEGINNING, ""
    for name, line in Log(home).lines():
        try:
            content, stated = parsed(line)
            at = int(content["line"])
        except (ValueError, LookupError, TypeError):
            wrong.append(f"{name}: the line after line {number} cannot be read")
            continue
        if at == 1 and isinstance(content.get("log"), str):
            log = content["log"]
        if content.get("event") == LOST:
            wrong.append(f"{name}: {HEAD} was missing before line {at}: other lines may be, too")
        if at != number + 1:
            missing = f"lines {number + 1} to {at - 1} are missing"
            wrong.append(f"{name}: {missing if at > number else f'line {at} is there again'}")
        elif stated != chained(chain, content):
            wrong.append(f"{name}: line {at} was changed")
        number, chain = at, stated
        known[at] = stated
    head = None
    with suppress(OSError):
        handle = os.open(home / HEAD, os.O_RDONLY | os.O_CLOEXEC)
        head = _read_head(handle)
        os.close(handle)
    if head is None:
        wrong.append(f"{HEAD} is missing or damaged: lines at the end may be, too")
    elif head.line > number:
        wrong.append(f"lines {number + 1} to {head.line} are missing at the end")
    elif head.line and known.get(head.line) != head.chain:
        wrong.append(f"line {head.line} is not that of {HEAD}")
    elif head.log != log:
        wrong.append(f"{HEAD} is that of another log")
    return Verified(Head(log, number, chain), wrong, known)


def in_words(line: Mapping[str, Any]) -> str:
    """A sentence about a line."""
    facts = {key: part for key, part in line.items() if key not in ("line", "time", "event")}
    again = f" (and {times} times more before)" if (times := facts.pop("again", 0)) else ""
    facts.pop("noted", None)
    told = [f"{key} {_brief(part)}" for key, part in facts.items()]
    return f"{line.get('time', '')} {line.get('event', '')}: {', '.join(told)}{again}"


def _brief(part: Any) -> str:
    if isinstance(part, dict):
        return f"({', '.join(f'{key} {_brief(one)}' for key, one in part.items())})"
    if isinstance(part, list):
        return " ".join(map(_brief, part)) or "none"
    text = str(part)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


def noted(of: str, mark: Any) -> dict[str, Any]:
    """What is written down of another log; nothing, if it is no mark."""
    return {"noted": {"of": of, "mark": mark}} if _mark(mark) else {}


def about(tensors: Tree) -> dict[str, Any]:
    """What identifies the tensors of a message, and how large they are."""
    from fedlens.fleet import payload  # needs PyTorch; to read a log needs none

    size = sum(t.nbytes for t in tensors.values())
    return {"sha256": payload.digest(tensors), "bytes": size} if tensors else {"bytes": 0}


def _mark(text: Any) -> tuple[str, int, str] | None:
    found = MARK.fullmatch(text) if isinstance(text, str) else None
    return (found[1], int(found[2]), found[3]) if found else None


def _read_head(handle: int) -> Head | None:
    with suppress(ValueError, TypeError):
        return Head(**json.loads(os.pread(handle, LONGEST, 0)))
    return None


@dataclass
class Logged:
    """Sites (`engine.Sites`), with their status, and a line in the server's log for each message.

    The server asks every few seconds until a site has approved: what is repeated then is one line.
    """

    sites: Any
    log: Log
    status: Status
    names: Sequence[str]
    last: dict[object, object] = field(default_factory=dict)

    def online(self) -> set[int]:
        found: set[int] = self.sites.online()
        self.status.seen([self.names[client] for client in sorted(found)])
        return found

    def send(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree, seconds: float
    ) -> None:
        one = next(iter(orders.values()))
        facts = {key: one[key] for key in ("experiment", "round") if key in one}
        names, sent = [self.names[client] for client in orders], about(tensors)
        facts |= {"asked": what, "sites": names}
        if what != "sizes" or self._is_new(what, facts):
            self.log.add("asked", **facts, sent=sent)
        self.status.asks(what, names, sent["bytes"])
        mark = self.log.mark
        with_mark = {client: {**order, "log": mark} for client, order in orders.items()}
        self.sites.send(what, with_mark, tensors, seconds)

    def arrived(self) -> list[tuple[int, Reply]]:
        found: list[tuple[int, Reply]] = self.sites.arrived()
        for client, reply in found:
            why, got = reply.failed or reply.facts.get("refused"), about(reply.tensors)
            self.status.answered(self.names[client], bool(why), got["bytes"])
            if not self._is_new(client, why) and why:
                continue
            names = [printable(shortened(name, 20)) for name in sorted(reply.facts)[:10]]
            facts = {"refused": printable(shortened(str(why)))} if why else {"facts": names}
            mark = noted(self.names[client], reply.facts.get("log"))
            self.log.add("arrived", site=self.names[client], **facts, got=got, **mark)
        return found

    def gone(self) -> set[int]:
        found: set[int] = self.sites.gone()
        return found

    def forget(self) -> None:
        self.sites.forget()

    def _is_new(self, about: object, what: object) -> bool:
        before, self.last[about] = self.last.get(about), what
        return before != what
