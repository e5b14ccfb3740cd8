"""The audit log: what stands in it, and that nobody changes it unseen."""

import json
import os
import threading

import pytest
from typer.testing import CliRunner

from fedlens.fleet import log as logs
from fedlens.fleet.log import HEAD, LOG, MARK, Log, verify
from tests.fleet.sites import make_sites, run_nearby, write_experiment
from tests.fleet.test_site import fails_to_read


@pytest.fixture
def five(tmp_path):
    log = Log(tmp_path / "home")
    for number in range(4):  # and the line that begins it
        log.add("answered", asked="train", round=number)
    return log


def content(home):
    return (home / LOG).read_bytes().splitlines(keepends=True)


def test_a_log_that_nobody_changed_is_whole(five):
    found = verify(five.home)
    assert (found.wrong, found.head.line, found.head.mark) == ([], 5, five.mark)
    assert MARK.fullmatch(five.mark)


@pytest.mark.parametrize("number", range(5))
def test_every_changed_line_is_found(five, number):
    lines = content(five.home)
    changed = json.loads(lines[number]) | {"round": 77}
    lines[number] = json.dumps(changed).encode() + b"\n"
    (five.home / LOG).write_bytes(b"".join(lines))
    assert f"line {number + 1} was changed" in verify(five.home).wrong[0]


@pytest.mark.parametrize("number", range(5))
def test_every_line_that_was_taken_out_is_found(five, number):
    lines = content(five.home)
    (five.home / LOG).write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    assert f"lines {number + 1} to {number + 1} are missing" in " ".join(verify(five.home).wrong)


def test_lines_that_were_turned_or_doubled_are_found(five):
    lines = content(five.home)
    for other in ([*lines[:2], lines[1], *lines[2:]], [lines[1], lines[0], *lines[2:]]):
        (five.home / LOG).write_bytes(b"".join(other))
        assert verify(five.home).wrong


@pytest.mark.parametrize("kept", range(5))
def test_a_tail_that_was_cut_off_is_found_also_after_more_was_written(five, kept):
    (five.home / LOG).write_bytes(b"".join(content(five.home)[:kept]))
    assert "missing at the end" in verify(five.home).wrong[-1]
    five.add("answered", asked="train", round=9)
    assert f"lines {kept + 1} to 5 are missing" in " ".join(verify(five.home).wrong)


def test_a_log_that_is_gone_altogether_is_not_begun_again(five):
    (five.home / LOG).unlink()
    five.add("answered", asked="test")
    assert "lines 1 to 5 are missing" in verify(five.home).wrong[0]


@pytest.mark.parametrize("head", [None, b"", b"{}", b"[1]"])
def test_without_its_head_the_end_is_not_known(five, head):
    (five.home / HEAD).unlink() if head is None else (five.home / HEAD).write_bytes(head)
    assert verify(five.home).wrong
    five.add("answered", asked="test")  # goes on where the lines end, and says so
    (found,) = verify(five.home).wrong
    assert "was missing before line 6" in found


def test_a_line_whose_writer_was_killed_is_no_tampering(five):
    whole = (five.home / HEAD).read_bytes()
    five.add("answered", asked="test")
    (five.home / HEAD).write_bytes(whole)  # killed after the line, before its head
    assert verify(five.home).wrong == []
    with (five.home / LOG).open("ab") as file:
        file.write(b'{"line": 7, "ti')  # killed within a line
    five.add("answered", asked="test")
    assert verify(five.home).wrong == []
    assert verify(five.home).head.line == 7


def test_files_are_rotated_and_none_may_go(five, monkeypatch):
    monkeypatch.setattr(logs, "MOST_BYTES", 300)
    for number in range(4, 12):
        five.add("answered", asked="train", round=number)
    older = five.files()[:-1]
    assert len(older) > 2
    assert verify(five.home).wrong == []
    assert [one["line"] for one in five.events()] == [*range(1, 14)]
    older[1].unlink()
    assert "are missing" in verify(five.home).wrong[0]


def test_a_log_that_was_written_anew_contradicts_the_marks_that_others_noted(five, tmp_path):
    other = Log(tmp_path / "other")
    other.add("arrived", **logs.noted("ann", five.mark))
    five.add("answered", asked="test")
    assert verify(five.home).against(other.home) == []
    events = [*five.events()]
    log = events[0]["log"]
    for path in (*five.files(), five.home / HEAD):
        path.unlink()
    forged = Log(five.home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlens.fleet.log.secrets.token_hex", lambda _: log)
        for one in events[1:4]:  # without what came last, each chain and the head as they must be
            forged.add("answered", asked="train", round=one["round"] + 1)
    assert verify(five.home).wrong == []
    assert "line 5 is not as" in verify(five.home).against(other.home)[0]
    for path in (*five.files(), five.home / HEAD):
        path.unlink()
    Log(five.home).add("answered", asked="train")  # begun again, under another name
    assert "has noted nothing of this log" in verify(five.home).against(other.home)[0]
    other.add("arrived", **logs.noted("ann", Log(five.home).mark))
    assert "another log of ann" in verify(five.home).against(other.home)[0]


@pytest.mark.parametrize("mark", [None, 1, "", "a:1:b", "x" * 10_000, "../..:1:" + "0" * 64])
def test_what_is_no_mark_is_not_noted(mark):
    assert logs.noted("ann", mark) == {}


def test_those_who_write_at_once_wait_for_each_other(tmp_path):
    def write():
        for _ in range(20):
            Log(tmp_path).add("answered", asked="train")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = verify(tmp_path)
    assert (found.wrong, found.head.line) == ([], 81)


def test_a_refusal_that_is_repeated_is_counted(tmp_path):
    log = Log(tmp_path)
    marks = [log.add("answered", asked="sizes", refused="no", seconds=n) for n in range(3)]
    assert len({*marks}) == 1
    log.add("answered", asked="sizes")
    assert [one.get("again") for one in log.events()] == [None, None, 2]
    assert [one["event"] for one in log.events()] == ["begun", "answered", "answered"]


def run(tmp_path, more=""):
    path = write_experiment(tmp_path, '{ name = "fedns" }', per_round=4, holdout=0.2, more=more)
    sites, home = make_sites(path, tmp_path / "sites"), tmp_path / "server"
    run_nearby(path, tmp_path / "run", sites, home=str(home))
    return sites, home


def test_both_sides_write_down_the_same_messages_and_bear_each_other_out(tmp_path):
    sites, home = run(tmp_path)
    server = verify(home)
    assert server.wrong == []
    events = [*Log(home).events()]
    rounds = [one for one in events if one["event"] == "round"]
    assert [sorted(one["used"]) for one in rounds] == [["ann", "bob", "cat", "dan"]] * 2
    for site in sites:
        found = verify(site.home)
        assert found.wrong == found.against(home) == server.against(site.home) == []
        answers = [one for one in Log(site.home).events() if one["event"] == "answered"]
        arrived = [one["got"] for one in events if one.get("site") == site.home.name]
        assert [one["sent"]["bytes"] for one in answers] == [one["bytes"] for one in arrived]
        sent = [one["sent"].get("sha256") for one in answers]
        assert sent == [one.get("sha256") for one in arrived]
        assert any(sent)
        got = [one["got"]["sha256"] for one in answers if one["got"]["bytes"]]
        assert {*got} <= {one["sent"].get("sha256") for one in events if one["event"] == "asked"}
        assert all(one["sent"]["guarantee"].startswith("none") for one in answers)
        (approval,) = (one for one in Log(site.home).events() if one["event"] == "approved")
        assert approval["experiment"] == answers[0]["experiment"]


def test_neither_data_nor_secrets_stand_in_a_log(tmp_path, monkeypatch):
    sites, home = run(tmp_path)
    fails_to_read(monkeypatch)  # a mistake of its own, that names files
    with pytest.raises(RuntimeError):
        sites[0].answer("sizes", {"experiment": "0", "client": 0} | _order(sites[0]), {})
    assert str(sites[0].home) in (sites[0].home / "mistake.txt").read_text()
    known = {"line", "time", "event", "chain", "log", "experiment", "asked", "round", "got", "sent"}
    known |= {"seconds", "noted", "again", "client", "by", "refused", "raised", "mistake"}
    known |= {"site", "sites", "facts", "used", "failed", "status", "resumed"}
    for folder in (home, *(site.home for site in sites)):
        for line in Log(folder).events():
            assert line.keys() <= known
            for part in (line.get("got"), line.get("sent")):
                assert part is None or part.keys() <= {"sha256", "bytes", "facts", "guarantee"}
            assert str(folder) not in json.dumps(line)
        assert (folder / LOG).stat().st_mode & 0o077 == 0


def _order(site):
    terms = site.approvals.of(site.approvals.approved()[0]).offer.terms
    return {"experiment": terms.hash, "terms": terms.text}


def test_nothing_leaves_a_site_that_cannot_write_it_down(tmp_path):
    path = write_experiment(tmp_path)
    site = make_sites(path, tmp_path / "sites")[0]
    for name in (LOG, HEAD):
        (site.home / name).unlink(missing_ok=True)
        os.mkfifo(site.home / name) if name == LOG else (site.home / name).mkdir()
    with pytest.raises(OSError):
        site.answer("sizes", {"client": 0} | _order(site), {})


def test_the_command_verifies_and_shows(five):
    from fedlens.cli.main import app_of

    words = ["fleet", "log", str(five.home)]
    shown = CliRunner().invoke(app_of(), words)
    assert shown.stdout.count("answered: asked train, round") == 4
    whole = CliRunner().invoke(app_of(), [*words, "--verify"])
    assert (whole.exit_code, five.mark in whole.stdout) == (0, True)
    (five.home / LOG).write_bytes(b"".join(content(five.home)[:3]))
    cut = CliRunner().invoke(app_of(), [*words, "--verify", "--json"])
    assert cut.exit_code == 1
    assert json.loads(cut.stdout)["wrong"] == ["lines 4 to 5 are missing at the end"]
