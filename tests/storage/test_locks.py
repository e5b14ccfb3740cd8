"""One writer at a time, and never one that is dead."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from fedlens.storage.files import remove_leftovers, replacing, write_atomically
from fedlens.storage.locks import LOCK, FolderLock, is_locked, one_writer
from tests.children import fork


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A process that has done some work, and then waits to be killed."""
    ours, theirs = os.pipe()
    pid = fork()
    if not pid:
        try:
            work()
            os.write(theirs, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_writer_is_refused_and_told_of_the_first_and_the_dead_do_not_bind(tmp_path):
    with child(lambda: FolderLock(tmp_path)) as pid:
        assert is_locked(tmp_path)
        who = rf"{tmp_path} is being written by process {pid} on \S+ since 20\d\d-.*: wait"
        with pytest.raises(ValueError, match=who):
            FolderLock(tmp_path)
    assert (tmp_path / LOCK).exists(), "it was killed"
    assert not is_locked(tmp_path)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    lock = FolderLock(tmp_path)
    with child(lambda: None):
        os.close(lock._handle)  # as when the parent is killed
        assert not is_locked(tmp_path)
        lock._handle = os.open(tmp_path / LOCK, os.O_RDWR)
        lock.release()


def test_a_lock_moves_with_its_folder(tmp_path):
    (tmp_path / "a").mkdir()
    lock = FolderLock(tmp_path / "a")
    lock.folder = (tmp_path / "a").rename(tmp_path / "b")
    assert is_locked(tmp_path / "b")
    lock.release()
    lock.release()
    assert list((tmp_path / "b").iterdir()) == []


def test_who_lets_go_of_a_folder_that_was_moved_leaves_the_lock_of_another(tmp_path):
    (tmp_path / "a").mkdir()
    first = FolderLock(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    with FolderLock(tmp_path / "a"):
        first.release()
        assert is_locked(tmp_path / "a")


def test_several_folders_are_taken_in_one_order_whatever_theirs(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    for order in ([one, two], [two, one]):
        with (
            FolderLock(one),
            pytest.raises(ValueError, match="one is being written"),
            one_writer(*order),
        ):
            pass
        assert not two.exists(), "the other is the first to be taken"
    with one_writer(two, one):
        assert is_locked(one) and is_locked(two)
    assert not is_locked(one) and not is_locked(two)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="cannot be written"),
        one_writer(tmp_path / "file" / "run"),
    ):
        pass
    with pytest.raises(ValueError, match="cannot be written"):
        FolderLock(tmp_path / "nowhere")


def test_what_a_killed_process_left_of_a_file_goes_and_what_is_being_written_stays(
    tmp_path, monkeypatch
):
    path, other = tmp_path / "file", tmp_path / "other"
    (tmp_path / ".profile").write_text("somebody's own")

    def begin() -> None:
        stack.enter_context(replacing(path))

    stack = ExitStack()
    for _ in range(2):
        with child(begin):
            assert len(list(tmp_path.glob(".file.*"))) == 1, "that of the one before is gone"
    with child(lambda: stack.enter_context(replacing(other))):
        write_atomically(path, b"whole")
        remove_leftovers(tmp_path)
        assert {p.name[:7] for p in tmp_path.iterdir()} == {"file", ".profil", ".other."}
    remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"file", ".profile"}
