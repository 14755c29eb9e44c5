"""What other users can change, or put in its place, is not trusted."""

from __future__ import annotations

import errno
import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.common import trusted
from workers.common.trusted import require_trusted

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
ANOTHER = 4_321


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found out about another user."""
    yield
    trusted._trusted_uids.cache_clear()
    trusted._is_own_group.cache_clear()


def refused(path: Path, of: Path, why: str) -> None:
    with pytest.raises(PermissionError, match=why) as error:
        require_trusted(path)
    assert (error.value.errno, error.value.filename) == (errno.EPERM, str(of))


def test_own_files_are_trusted_and_what_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("b")
    for name in ("", "a", "a/b", "a/c", "c/d/e", "a/../a/b"):
        require_trusted(tmp_path / name)


def test_a_relative_path_is_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir(mode=0o777)
    (tmp_path / "a").chmod(0o777)
    monkeypatch.chdir(tmp_path)
    refused(Path("a/b"), tmp_path / "a", "other users can write")


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o702])
@pytest.mark.parametrize("below", ["", "b", "b/c"])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, below: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(mode)
    refused(tmp_path / "a" / below, tmp_path / "a", "other users can write")


def test_what_is_ours_in_a_sticky_directory_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "ours").mkdir(parents=True)
    (tmp_path / "tmp").chmod(0o1777)
    require_trusted(tmp_path / "tmp" / "ours")
    require_trusted(tmp_path / "tmp" / "later")


@pytest.mark.parametrize("mode", [0o606, 0o602])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(mode)
    refused(tmp_path / "f", tmp_path / "f", "other users can write")


@needs_root
@pytest.mark.parametrize("below", ["", "b"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "tmp" / "a").mkdir(parents=True)
    (tmp_path / "tmp").chmod(0o1777)
    os.chown(tmp_path / "tmp" / "a", ANOTHER, ANOTHER)
    refused(tmp_path / "tmp" / "a" / below, tmp_path / "tmp" / "a", f"uid {ANOTHER}")


@needs_root
def test_a_link_is_its_owners(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ours").symlink_to("a")
    require_trusted(tmp_path / "ours" / "f")
    (tmp_path / "theirs").symlink_to(tmp_path / "a")
    os.chown(tmp_path / "theirs", ANOTHER, ANOTHER, follow_symlinks=False)
    refused(tmp_path / "theirs" / "f", tmp_path / "theirs", f"uid {ANOTHER}")


@pytest.mark.parametrize("is_relative", [False, True])
def test_where_a_link_leads_is_looked_at(tmp_path: Path, is_relative: bool) -> None:
    (tmp_path / "open" / "x").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open/x" if is_relative else tmp_path / "open" / "x")
    refused(tmp_path / "link" / "f", tmp_path / "open", "other users can write")


def test_links_in_a_circle_and_files_above_are_errors(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError) as error:
        require_trusted(tmp_path / "circle")
    assert error.value.errno == errno.ELOOP
    for above in (Path("/dev/null"), tmp_path / "file"):
        if above.parent == tmp_path:
            above.touch()
        with pytest.raises(NotADirectoryError):
            require_trusted(above / "x")


@pytest.mark.parametrize(
    ("name", "members", "is_own"),
    [
        ("me", [], True),
        ("me", ["me"], True),
        ("me", ["me", "you"], False),
        ("users", [], False),
        (None, [], True),
    ],
)
def test_a_group_of_one_is_not_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, members: list[str], is_own: bool
) -> None:
    def group(_: int) -> SimpleNamespace:
        if name is None:
            raise KeyError
        return SimpleNamespace(gr_name=name, gr_mem=members)

    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o770)
    gid = (tmp_path / "a").stat().st_gid
    monkeypatch.setattr(os, "getgroups", lambda: [gid])
    monkeypatch.setattr(grp, "getgrgid", group)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    if gid == 0:
        # All are root's.
        is_own = set(members) <= {"me"}
    if is_own:
        require_trusted(tmp_path / "a")
    else:
        refused(tmp_path / "a", tmp_path / "a", "other users can write")
    trusted._is_own_group.cache_clear()
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(os, "getegid", lambda: gid + 1)
    refused(tmp_path / "a", tmp_path / "a", "other users can write")


def test_a_volume_of_kubernetes_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory can be written to by all, belongs to the group of the pod (fsGroup), and is a mount."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o2777)
    monkeypatch.setattr(trusted, "_is_own_group", lambda _: True)
    refused(tmp_path / "a", tmp_path / "a", "other users can write")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "a")
    require_trusted(tmp_path / "a" / "data")
    (tmp_path / "a").chmod(0o777)
    refused(tmp_path / "a", tmp_path / "a", "other users can write")
    status = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    require_trusted(tmp_path / "a" / "data")
