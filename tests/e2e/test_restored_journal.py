"""A journal that loses frames under a running gateway: nothing is acknowledged that would be lost, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from quire.v1 import executor_pb2, runner_pb2

from service.journal.segments import JOURNAL
from tests.e2e import greedy
from tests.e2e.test_remote_workers import Pool, pool
from tests.error_details import info_of
from tests.gateway_process import GatewayProcess
from tests.ports import free_address
from tests.postgres_server import PostgresServer
from tests.service.test_leases import expire

__all__ = ["pool"]

FLAGS = ("--kv-pages", "64")


class Text(greedy.Text):
    """A cache, and what was acknowledged of it."""

    def decode_refused(self) -> None:
        """Nothing is acknowledged until the gateway has ended, and who is refused learns why."""
        reasons = []
        while self.gateway.process.poll() is None:
            with pytest.raises(grpc.RpcError) as refused:
                self.decode()
            reasons.append(info_of(refused.value).reason or "none")
        # Of those that meet a gateway that ends: as with any other failure.
        reasons = [reason for reason in reasons if reason != "none"]
        assert set(reasons) <= {"JOURNAL_UNAVAILABLE", "DRAINING"}, reasons
        assert reasons[0] == "JOURNAL_UNAVAILABLE"
        assert self.gateway.process.wait() == 1

    def decode_again(self, gateway: GatewayProcess, known: int) -> None:
        """From the tokens of the copy on, with the same result."""
        self.gateway = gateway
        expected, self.tokens = self.tokens, self.tokens[: known + 1]
        assert self.decode(len(expected) - len(self.tokens)) == expected


def test_an_older_copy_of_the_database_is_noticed_by_the_next_commit(
    pool: Pool,
) -> None:
    """Before, 20 more tokens were acknowledged, and the next gateway found a gap and ended."""
    pool.add_worker()
    with PostgresServer() as database:
        flags = ("--journal", database.url, "--peer-listen", free_address())
        with pool.gateway(*flags) as gateway:
            text = Text(gateway)
            text.decode(10)
            database.copy()
            for _ in range(20):
                _until_acknowledged(text.decode)
            database.restore()
            text.decode_refused()
            (said,) = [one for one in gateway.records() if "lost rows" in str(one.get("error"))][-1:]
            assert "stop all gateways" in str(said["error"]), said
        # Of the copy there is a lease of the first one, which gave back another.
        asyncio.run(expire(database))
        with pool.gateway(*flags) as gateway:
            gateway.wait_until_ready()
            text.decode_again(gateway, known=10)


def _until_acknowledged(decode: Callable[[], object]) -> None:
    while True:
        with contextlib.suppress(grpc.RpcError):
            decode()
            return


# Other losses: tests/service/test_journal_files.py.
def test_an_older_copy_of_the_files_is_noticed_by_the_next_commit(tmp_path: Path) -> None:
    """What is there can be served again, once the operator has decided so."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    flags = (*FLAGS, "--data-dir", str(data_dir), "--journal", "disk")
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        text = Text(gateway)
        text.decode(10)
        shutil.copytree(data_dir, copy, ignore=shutil.ignore_patterns("*.sock"))
        text.decode(20)
        for path in (copy / JOURNAL).iterdir():
            shutil.copyfile(path, data_dir / JOURNAL / path.name)
        text.decode_refused()
        assert any(one["event"] == "the journal has lost frames" for one in gateway.records())
    shutil.rmtree(data_dir / JOURNAL)
    shutil.copytree(copy / JOURNAL, data_dir / JOURNAL)
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        gateway.wait_until_ready()
        text.decode_again(gateway, known=10)


def test_calls_in_flight_are_told_that_the_gateway_ends(tmp_path: Path) -> None:
    """Before, gRPC dropped them with CANCELLED, which clients do not repeat."""
    flags = [*FLAGS, "--data-dir", str(tmp_path)]
    with GatewayProcess(model="paged-attention", workers=1, flags=flags) as gateway:
        text, other = Text(gateway), Text(gateway)
        workers = gateway.worker_processes()
        for worker in workers:
            worker.suspend()
        request = executor_pb2.DecodeRequest(cache_id=text.cache_id, token_id=1, position=len(text.prompt))
        decode = gateway.stub.Decode.future(request, timeout=60)
        prompt = runner_pb2.TokenPrompt(token_ids=[1, 2])
        item = runner_pb2.ExecuteItem(item_id="a", tokens=prompt, max_tokens=2)
        keep = duration_pb2.Duration(seconds=60)
        execution = gateway.runner.Execute(
            runner_pb2.ExecuteRequest(request_id="kept", items=[item], keep=keep), timeout=60
        )
        gateway.wait_until_in_flight(2)
        (segment,) = (tmp_path / JOURNAL).glob("*.log")
        os.truncate(segment, segment.stat().st_size - 1)
        with pytest.raises(grpc.RpcError):
            other.release()
        with pytest.raises(grpc.RpcError) as refused:
            decode.result()
        expected = grpc.StatusCode.UNAVAILABLE, "DRAINING"
        assert (refused.value.code(), info_of(refused.value).reason) == expected
        # The stream ends, and not its sample: the next gateway can go on with it.
        with pytest.raises(grpc.RpcError) as broken:
            assert not [chunk for response in execution for chunk in response.chunks]
        assert (broken.value.code(), info_of(broken.value).reason) == expected
        assert gateway.process.wait(60) == 1
