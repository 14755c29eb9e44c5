"""Whether only this user and root can change what a process trusts: its state, keys and tokens.

Any user can make a directory in one that all may write to, such as the system's temporary directory, before
this user does. Whoever can rename a directory can put another one in its place. So all directories above a
file are looked at, too. In a directory that others write to, a pipe or a device may be in the place of a file
(`open_regular`).
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections import deque
from io import BufferedReader
from pathlib import Path

_MAX_LINKS = 40
_UID_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_ALL_UIDS = ["0", "0", "4294967295"]


def require_trusted(path: Path) -> None:
    """Raises PermissionError if another user than root can change what is at this path, or put it there.

    What does not exist yet can be made: only what is above it is looked at. Raises OSError if that fails.
    """
    here, rest, links = Path("/"), deque(path.absolute().parts[1:]), 0
    _require(here, here.lstat())
    while rest:
        part = rest.popleft()
        if part == os.pardir:
            here = here.parent
            continue
        above, here = here, here / part
        try:
            status = here.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode) or not rest:
            _require(here, status)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = here.readlink()
            here = Path("/") if target.is_absolute() else above
            rest.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        elif rest and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))


def make_private(directory: Path) -> None:
    """Makes a directory, and those above it that are missing, for this user alone. Raises OSError.

    `Path.mkdir` leaves those above it to the umask: if that lets others write, the next start refuses them.
    """
    if not directory.parent.exists():
        make_private(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)


def _require(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in _trusted_uids():
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))
    # The mode of a link means nothing, and what is written to a device is not in it. Nobody can replace what
    # another user has in a sticky directory.
    mode = status.st_mode
    is_safe = stat.S_ISLNK(mode) or stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)
    by_all = mode & stat.S_IWOTH
    by_group = mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if not is_safe and (by_all or by_group) and not _is_mounted_for_this_user(path, status):
        raise PermissionError(errno.EPERM, "other users can write to it", str(path))


@functools.cache
def _trusted_uids() -> frozenset[int]:
    """This user, and root; in a user namespace also those outside, whose files it cannot change."""
    trusted = {0, os.geteuid()}
    try:
        if _UID_MAP.read_text(encoding="ascii").split() != _ALL_UIDS:
            trusted.add(int(_OVERFLOW_UID.read_text(encoding="ascii")))
    except OSError:
        pass  # Not Linux.
    return frozenset(trusted)


@functools.cache
def _is_own_group(gid: int) -> bool:
    """Whether nobody else is in a group: that of this user's name, or one of a container without a name."""
    if gid not in {os.getegid(), *os.getgroups()}:
        return False
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return True
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = ""
    return (gid == 0 or group.gr_name == name) and {*group.gr_mem} <= {name, "root"}


def _is_mounted_for_this_user(path: Path, status: os.stat_result) -> bool:
    """Whether it is of a read-only mount, or a volume that Kubernetes has given to this user's group.

    The directories of such volumes often allow all to write; other users do not see them.
    """
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    return bool(status.st_mode & stat.S_ISGID) and _is_own_group(status.st_gid) and path.is_mount()


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Opens a regular file, or with `follow` the one that it links to, for reading. The caller closes it.

    Raises OSError, also for a directory, pipe, socket or device; ValueError for a name with a NUL character.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        # `fdopen` would leave that of a directory open.
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
