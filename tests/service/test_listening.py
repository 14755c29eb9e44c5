"""What is said of an address that cannot be listened on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from service.doors.unix_socket import IN_USE, OwnSocket
from service.server import why_not_listening


def test_a_port_that_another_server_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        _, port = other.getsockname()
        assert why_not_listening(f"127.0.0.1:{port}") == IN_USE


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        # 192.0.2.0/24 is for documentation: no machine has such an address.
        ("192.0.2.1:50051", "Cannot assign requested address"),
        ("unix:/nowhere/to/be/found.sock", "No such file or directory"),
    ],
)
def test_an_address_that_is_not_here(listen: str, said: str) -> None:
    assert why_not_listening(listen) == said


def test_a_path_that_is_taken_and_one_that_is_free(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    assert why_not_listening(f"unix:{path}") == "the address is free by now"
    assert not path.exists(), "it is not left behind"
    path.write_text("a file")
    assert why_not_listening(f"unix:{path}") == "something is at this path"
    assert why_not_listening(f"unix:{tmp_path}") == "it is a directory: name a file in it"


def test_a_unix_socket_is_one_servers_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = OwnSocket(str(path))
    with pytest.raises(OSError, match="another process has this address"):
        OwnSocket(str(path))
    first.close()
    assert not any(tmp_path.iterdir()), "nothing is left behind"
    OwnSocket(str(path)).close()


def test_a_unix_socket_of_another_program_is_not_taken_but_a_dead_ones_is(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another process has this address"):
            OwnSocket(str(path))
    assert list(tmp_path.iterdir()) == [path], "nobody has removed it, and nothing is left beside it"
    OwnSocket(str(path)).close()
