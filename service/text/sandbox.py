"""Takes from a process what it does not need to run tasks: files, the network, and other processes.

By Landlock and seccomp, where the kernel has them. Neither needs a privilege, and neither can be undone, also
not by programs that the process starts. It keeps the descriptors that it has, and can read the code of the
system, what is installed for this Python, and the packages that it has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Iterator

_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4

# Landlock: https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# By version: all rights of files, but for the first one, to execute: a program is confined as well.
_RIGHTS = {1: (1 << 13) - 2, 2: (1 << 14) - 2, 3: (1 << 15) - 2, 5: (1 << 16) - 2}
# To bind and to connect by TCP; and abstract Unix sockets and signals.
_NETWORK, _SCOPES = 3, 3
_NETWORK_VERSION, _SCOPES_VERSION = 4, 6
# The system's programs and libraries, which are loaded when they are first used, and which time it is here.
_SYSTEM = (
    "/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
    "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip
# The list of its own descriptors.
_DESCRIPTORS = "/proc/self/fd"

# seccomp: the architecture as the kernel names it, and the column of the tables below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32_BIT = 0x40000000
# Calls that nothing here needs, by their numbers on the two machines. They make connections (also one of a
# pair sends to any Unix socket whose name it knows), ...
_REFUSED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # ... reach other processes of this user, ...
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # ... change files in ways that Landlock does not know, also those that are open for reading, ...
    "truncate": (76, 45), "fchmod": (91, 52), "fchown": (93, 55), "fsetxattr": (190, 7),
    "fremovexattr": (199, 16), "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
    # ... do any of this without a call of their own, or have had many faults in the kernel.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
# Calls whose first argument is a process: only this one is allowed, and 0 where that means this one.
_OF_THIS_PROCESS = {"kill": (62, 129), "tgkill": (234, 131)}
_OF_THIS_PROCESS_OR_0 = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
# By the second argument: commands that set who gets a descriptor's signals, maybe any process of this user.
_REFUSED_SECOND = {"fcntl": ((72, 25), (8, 15)), "ioctl": ((16, 29), (0x8901, 0x8902))}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
# In what the filter sees: the number of the call, the machine, and the lower halves of two arguments.
_NUMBER, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24
_SECCOMP = (317, 277)
_SET_FILTER, _ALL_THREADS = 1, 1


def hide_memory() -> None:
    """Makes the environment and the memory of this process unreadable for others of this user but root."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine() -> str:
    """Confines this process, for ever. Returns what this system does not have, in words; empty: nothing."""
    if sys.platform != "linux":
        return "Landlock and seccomp, which are Linux's"
    missing = []
    for name, apply in (("no_new_privs", _no_new_privs), ("Landlock", _landlock), ("seccomp", _seccomp)):
        try:
            apply()
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    return ", ".join(missing)


def _no_new_privs() -> None:
    _checked(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _landlock() -> None:
    """Raises OSError."""
    call = _libc().syscall
    version = _checked(call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))
    rights = next(_RIGHTS[first] for first in sorted(_RIGHTS, reverse=True) if first <= version)
    attributes = struct.pack("=Q", rights)
    if version >= _NETWORK_VERSION:
        attributes += struct.pack("=Q", _NETWORK)
    if version >= _SCOPES_VERSION:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = _checked(call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in _readable():
            _allow_reading(ruleset, path)
        _checked(call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    """Allows reading a path and everything below it. Skips it if it does not exist."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        is_directory = os.path.isdir(path)  # noqa: PTH112 - a text
        rights = _READ_FILE | _READ_DIR if is_directory else _READ_FILE
        if path == _DESCRIPTORS:
            rights = _READ_DIR
        rule = struct.pack("=Qi", rights, opened)
        _checked(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _readable() -> Iterator[str]:
    """Code: of the system, the standard library, what is installed, and the packages that are loaded.

    Packages import parts of themselves and others later. A checkout that packages are loaded from has more.
    """
    yield from _SYSTEM
    yield _DESCRIPTORS
    for name in ("stdlib", "platstdlib"):
        yield sysconfig.get_path(name)
    yield from filter(_has_installed, sys.path)
    for name, module in [*sys.modules.items()]:
        if "." not in name:
            yield from (path for path in getattr(module, "__path__", ()) if isinstance(path, str))


def _has_installed(directory: str) -> bool:
    """Whether an installer has put packages there, as into site-packages, or where `pip --target` says."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return any(entry.name.endswith(".dist-info") for entry in entries)
    return False


def _seccomp() -> None:
    """Raises OSError."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"not for {machine}")
    name, column = _MACHINES[machine]
    instructions = [*_filter(name, column)]
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(program, len(program))
    # A struct sock_fprog: the number of instructions, and a pointer to them.
    given = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    _checked(_libc().syscall(_SECCOMP[column], _SET_FILTER, _ALL_THREADS, given))


def _filter(machine: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """The instructions: an operation, how many to skip if it is true and if it is not, and a number."""
    yield from ((_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _REFUSE))
    yield (_LOAD, 0, 0, _NUMBER)
    if column == 0:
        # The same calls by other numbers.
        yield from ((_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _REFUSE))
    own = os.getpid()
    for calls, allowed in ((_OF_THIS_PROCESS, (own,)), (_OF_THIS_PROCESS_OR_0, (own, 0))):
        for numbers in calls.values():
            body = [(_LOAD, 0, 0, _FIRST)]
            for pid in allowed:
                body += [(_EQUAL, 0, 1, pid), (_RETURN, 0, 0, _ALLOW)]
            body.append((_RETURN, 0, 0, _REFUSE))
            yield (_EQUAL, 0, len(body), numbers[column])
            yield from body
    for numbers, values in _REFUSED_SECOND.values():
        body = [(_LOAD, 0, 0, _SECOND)]
        for value in values:
            body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
        body.append((_RETURN, 0, 0, _ALLOW))
        yield (_EQUAL, 0, len(body), numbers[column])
        yield from body
    for refused in _REFUSED.values():
        if (number := refused[column]) is not None:
            yield from ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE))
    yield (_RETURN, 0, 0, _ALLOW)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    """Raises OSError if a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
