"""The reasons for which the server cannot listen on an address."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from service.extensions.gateways.parent import reserved
from service.listening import CannotListen, binding, listening_socket
from workers.common.addresses import is_listening


def test_the_unix_socket_of_a_dead_program_is_replaced_but_not_of_a_live_one(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    assert not is_listening(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen(0)
        assert is_listening(path)
        assert is_listening(path), "also while its queue is full"
    assert not is_listening(path)


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
