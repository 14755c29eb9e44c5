"""The reasons for which the server cannot listen on an address."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from service.auth.unix_socket import LockedUnixSocket
from service.extensions.gateways.parent import reserved
from service.listening import CannotListen, binding, listening_socket


def test_one_server_at_a_time_has_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = LockedUnixSocket(str(path))
    with pytest.raises(OSError, match="another process has this address"):
        LockedUnixSocket(str(path))
    first.close()
    assert not any(tmp_path.iterdir()), "nothing is left behind"
    LockedUnixSocket(str(path)).close()


def test_the_unix_socket_of_a_dead_program_is_replaced_but_not_of_a_live_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another process has this address"):
            LockedUnixSocket(str(path))
    assert list(tmp_path.iterdir()) == [path], "it is still there, and no lock file is left"
    LockedUnixSocket(str(path)).close()


async def test_whatever_binds_an_address_says_which_one_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        server = grpc.aio.server()
        for bind in (
            lambda: listening_socket(taken),
            lambda: reserved(taken).__enter__(),
            lambda: server.add_insecure_port(taken),
        ):
            with pytest.raises(CannotListen) as caught, binding(taken):
                bind()
            assert caught.value.listen == taken
            assert caught.value.why.startswith("another process has this address")
