"""What code in a helper process can reach: nothing of this user, no network, and no other process."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.checkout import ROOT, environment
from service.text.task_process import TaskProcess
from service.text.tasks import COMPILE, ENCODE, MASK, RENDER, TaskKind

HOSTILE = TaskKind(
    "tests.service.text.hostile_code", max_cpu_s=10, max_memory_bytes=1 << 30, max_result_bytes=1 << 20
)
DENIED = {f"PermissionError {errno.EPERM}", f"PermissionError {errno.EACCES}"}


def has_landlock() -> bool:
    found: int = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    return found > 0


needs_landlock = pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], str]]:
    """Runs code in a process of all these tests; what one of them does there hinders no other."""
    process = TaskProcess(HOSTILE)
    yield lambda code: asyncio.run(process.run(code.encode())).decode()
    process.close()


@needs_landlock
def test_it_reads_no_file_of_this_user(run: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_text("a secret")
    assert run(f"result = open({str(tmp_path / 'journal.db')!r}).read()") in DENIED
    assert run(f"import os; result = os.listdir({str(tmp_path)!r})") in DENIED
    for path in ("/etc/hosts", "/proc/self/environ", str(ROOT / "pyproject.toml"), "/"):
        assert run(f"result = open({path!r}, 'rb').read()") in DENIED | {f"IsADirectoryError {errno.EISDIR}"}


@needs_landlock
@pytest.mark.parametrize("name", ["environ", "mem", "maps", "cmdline", "fd/0", "root/etc/hosts"])
def test_it_reads_nothing_of_its_parent(run: Callable[[str], str], name: str) -> None:
    assert run(f"result = open('/proc/{os.getpid()}/{name}', 'rb').read(10)") in DENIED | {
        f"FileNotFoundError {errno.ENOENT}"
    }


@needs_landlock
@pytest.mark.parametrize(
    "code",
    [
        "open({!r}, 'w')",
        "os.mkdir({!r})",
        "os.symlink('x', {!r})",
        "os.mkfifo({!r})",
        "os.link(__file__, {!r})",
    ],
)
def test_it_makes_no_file(run: Callable[[str], str], tmp_path: Path, code: str) -> None:
    code = code.replace("__file__", repr(os.__file__))
    assert run(f"import os; {code.format(str(tmp_path / 'x'))}") in DENIED | {f"OSError {errno.EXDEV}"}
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "code",
    ["os.chmod({!r}, 0o777)", "os.chown({!r}, 1, 1)", "os.utime({!r})", "os.setxattr({!r}, 'user.a', b'')"],
)
def test_it_changes_no_file(run: Callable[[str], str], tmp_path: Path, code: str) -> None:
    (tmp_path / "x").touch(mode=0o600)
    before = (tmp_path / "x").stat()
    assert run(f"import os; {code.format(str(tmp_path / 'x'))}") in DENIED
    assert (tmp_path / "x").stat() == before


def test_it_connects_to_nothing(run: Callable[[str], str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        for family, address in (("INET", tcp.getsockname()), ("UNIX", str(tmp_path / "s")), ("UNIX", "\0a")):
            code = f"import socket; socket.socket(socket.AF_{family}).connect({address!r})"
            assert run(code) in DENIED
    for code in ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "socket.create_server(('', 0))"):
        assert run(f"import socket; {code}") in DENIED
    # That of the tasks is one of a pair.
    connected = "import socket, os; [s] = [int(n) for n in os.listdir('/proc/self/fd') if n.isdigit() and"
    connected += " os.path.lexists(f'/proc/self/fd/{n}') and 'socket' in os.readlink(f'/proc/self/fd/{n}')];"
    if has_landlock():
        assert run(connected + " result = socket.socket(fileno=os.dup(s)).connect('/x')") in DENIED


@pytest.mark.parametrize("code", ["fchmod(f, 0o700)", "fchown(f, 0, 0)", "setxattr(f, 'user.a', b'')"])
def test_it_changes_no_code_that_it_can_read(run: Callable[[str], str], code: str) -> None:
    assert run(f"import os; f = os.open(os.__file__, os.O_RDONLY); os.{code}") in DENIED


def test_it_reaches_no_other_process(run: Callable[[str], str]) -> None:
    # Ends with its input, also where an assertion fails.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        for pid in (other.pid, os.getpid(), 0, -1):
            assert run(f"import os; os.kill({pid}, 0)") in DENIED, pid
        assert run(f"import os; os.pidfd_open({other.pid})") in DENIED
        assert run(f"import os; os.sched_setaffinity({other.pid}, [0])") in DENIED
        assert run(f"import resource as r; r.prlimit({other.pid}, r.RLIMIT_CPU, (1, 1))") in DENIED
        assert run(f"import os; os.setpriority(os.PRIO_PROCESS, {other.pid}, 19)") in DENIED
        assert other.poll() is None
    # With itself it can do these.
    assert (
        run("import os; os.kill(os.getpid(), 0); os.sched_setaffinity(0, os.sched_getaffinity(0))") == "done"
    )


def test_it_gets_no_rights(run: Callable[[str], str]) -> None:
    with_ctypes = "import ctypes; c = ctypes.CDLL(None, use_errno=True);"
    assert run(f"{with_ctypes} result = c.prctl(39, 0, 0, 0, 0)") == "1", "no_new_privs"
    for call in ("unshare(0x10000000)", "ptrace(16, 1, 0, 0)", "syscall(425, 1, 0)"):
        assert run(f"{with_ctypes} result = c.{call}, ctypes.get_errno()") == f"(-1, {errno.EPERM})"


@needs_landlock
def test_a_program_that_it_starts_is_confined_too(run: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    code = f"import subprocess; result = subprocess.run(['/bin/cat', {str(tmp_path / 'secret')!r}],"
    assert "a secret" not in run(f"{code} capture_output=True).stdout")


@needs_landlock
def test_what_it_has_loaded_can_import_more(run: Callable[[str], str]) -> None:
    code = "import xml.dom.minidom, sqlite3, encodings.idna, service.text.stops, datetime; result = 7"
    assert run(code) == "7"


@needs_landlock
def test_it_imports_what_is_installed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `pip install --target`, or for all users: not below the directory of the standard library."""
    (tmp_path / "late-1.dist-info").mkdir()
    (tmp_path / "late.py").write_text("answer = 'imported'")
    monkeypatch.syspath_prepend(tmp_path)
    process = TaskProcess(HOSTILE)
    assert asyncio.run(process.run(b"import late; result = late.answer")) == b"imported"
    process.close()


@pytest.mark.parametrize("kind", [HOSTILE, RENDER, ENCODE, COMPILE, MASK], ids=lambda kind: kind.module)
def test_each_helper_is_confined(kind: TaskKind) -> None:
    process = TaskProcess(kind)
    asyncio.run(process._start())
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.close()
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    # A filter is for all threads that there are, Landlock for those that come.
    assert "Threads:\t1" in status


def test_without_landlock_the_rest_is_done() -> None:
    code = (
        "from service.text import sandbox; import errno, socket\n"
        "def lacking(): raise OSError(errno.ENOSYS, 'no')\n"
        "sandbox._landlock = lacking\n"
        "print(sandbox.confine())\n"
        "try: socket.socket()\n"
        "except PermissionError: print('refused')\n"
        # A pipe sends the signal of choice to whom it is said to belong to.
        "import fcntl, os\n"
        "try: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())\n"
        "except PermissionError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(ROOT), capture_output=True, text=True)
    assert done.stdout == "Landlock (no)\nrefused\nrefused\n", done.stderr


def test_a_gateway_hides_its_memory() -> None:
    """From helper processes on kernels without Landlock, which run as the same user."""
    code = "from service.text.sandbox import hide_memory; hide_memory(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(ROOT)
    ) as hidden:
        assert hidden.stdout is not None
        hidden.stdout.readline()
        owner = Path(f"/proc/{hidden.pid}/environ").stat()
        assert (owner.st_uid, psutil.Process(hidden.pid).is_running()) == (0, True)
        read = "import os, sys; os.setgroups([]); os.setgid(4321); os.setuid(4321); open(sys.argv[1]).read()"
        if os.geteuid() == 0:
            path = f"/proc/{hidden.pid}/environ"
            done = subprocess.run([sys.executable, "-c", read, path], capture_output=True, check=False)
            assert b"PermissionError" in done.stderr
        hidden.kill()
