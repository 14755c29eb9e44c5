"""Weights on a stream: served like those of a directory, found again after kills, gone when not needed."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from quire import Aborted, Client, InvalidRequest
from quire.v1 import admin_pb2
from safetensors import safe_open
from safetensors.torch import save

from tests.e2e.greedy import Text, assert_serves
from tests.e2e.test_replace_weights import replace, serve
from tests.error_details import refused
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy

PATIENCE_S = 60
STEPS = 8
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
BAD = "BAD_WEIGHTS"
Part = admin_pb2.UploadWeightsRequest


def shards(model: Path, count: int = 3) -> Iterator[bytes]:
    """The tensors of a model in files, as a trainer makes them: one after the other."""
    with safe_open(model / MODEL, "pt") as file:
        for first in range(count):
            yield save({name: file.get_tensor(name) for name in list(file.keys())[first::count]})


def upload(gateway: GatewayProcess, files: Iterable[bytes] | Path) -> str:
    """By the client; after another one that was cancelled, whose end the server may not know yet."""
    contents = files if isinstance(files, Path) else list(files)
    with Client(gateway.address, timeout_s=PATIENCE_S) as client:
        while True:
            try:
                return client.upload_weights(contents)
            except Aborted as error:
                time.sleep(error.retry_delay_s or 0)


def file(name: str, data: bytes, *, size: int | None = None, part: int = 100_000) -> Iterator[Part]:
    """The messages of one file, as any client may send them. `size`: what is declared."""
    yield Part(name=name, size_bytes=len(data) if size is None else size, data=data[:part])
    for at in range(part, len(data), part):
        yield Part(data=data[at : at + part])
    yield Part(sha256=hashlib.sha256(data).digest())


def send(gateway: GatewayProcess, messages: Iterable[Part]) -> str:
    return gateway.admin.UploadWeights(iter(messages), timeout=PATIENCE_S).source


def kept(home: Path) -> list[str]:
    """The sources of all uploads in a data directory."""
    return [f"upload:{path.name}" for path in (home / "weight-uploads").glob("*")]


def at_home(home: Path) -> tuple[str, ...]:
    return "--data-dir", str(home), "--orphan-grace-s", "0"


@pytest.fixture(scope="module")
def server(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, Path]]:
    data = tmp_path_factory.mktemp("data")
    with serve(models[0], *at_home(data)) as gateway:
        yield gateway, data


@pytest.fixture
def served(server: tuple[GatewayProcess, Path], models: list[Path]) -> tuple[GatewayProcess, Path]:
    """One for several tests, with the first weights, and its data directory, without an upload."""
    gateway, data = server
    replace(gateway, models[0])
    gateway.wait_until(lambda: kept(data) == [])
    return server


def test_they_are_served_as_if_from_a_directory(
    models: list[Path], served: tuple[GatewayProcess, Path]
) -> None:
    gateway, home = served
    text = Text(gateway)
    source = upload(gateway, shards(models[1]))
    assert gateway.model().model_id == "0" and kept(home) == [source]
    with Client(gateway.address, timeout_s=PATIENCE_S) as client:
        loaded = client.load_weights(source, recompute=True)
        assert loaded.phase == admin_pb2.LOAD_WEIGHTS_PHASE_SERVING
        assert gateway.model().model_id == "0", "a name does not change with the weights"
        with pytest.raises(InvalidRequest, match="BAD_SOURCE"):
            client.load_weights("upload:none")
    text.decode(STEPS)
    assert text.tokens[1:] == hf_greedy(models[1], [*text.prompt, text.tokens[0]], STEPS)
    assert_serves(gateway, models[1])
    assert kept(home) == [source]
    assert replace(gateway, models[1]) == loaded.fingerprint
    gateway.wait_until(lambda: kept(home) == [])
    assert refused(lambda: replace(gateway, Path(source))) == "BAD_SOURCE"


def test_kills_bring_them_back(models: list[Path], home: Path) -> None:
    with serve(models[0], *at_home(home), workers=2) as gateway:
        text, other = Text(gateway), Text(gateway)
        replace(gateway, models[2])
        source = upload(gateway, shards(models[1]))
        replace(gateway, Path(source))
        for worker in gateway.status().workers:
            os.kill(worker.pid, signal.SIGKILL)
        text.decode(2)
        waiting = upload(gateway, shards(models[2]))
        assert sorted(kept(home)) == sorted([source, waiting])
        gateway.kill()
    with serve(models[0], *at_home(home), workers=2) as gateway:
        assert kept(home) == [source], "what nobody has loaded does not outlive the server"
        text.gateway = other.gateway = gateway
        text.decode(STEPS - 2)
        other.decode(STEPS)
        for each in (text, other):
            assert each.tokens[1:] == hf_greedy(models[1], [*each.prompt, each.tokens[0]], STEPS)
            assert each.weights == 2
        assert refused(lambda: replace(gateway, Path(waiting))) == "BAD_SOURCE"


def test_what_is_refused_leaves_nothing(models: list[Path], served: tuple[GatewayProcess, Path]) -> None:
    """Nor does it change what is served, or hinder the next upload."""
    gateway, home = served
    data = (models[1] / MODEL).read_bytes()
    whole = [*file(MODEL, data)]
    wrong, cut = [*whole[:-1], Part(sha256=bytes(32))], whole[:-1]
    # Twice the size is allowed, as of float32 in place of bfloat16, and what names need.
    large = 2 * len(data) + (1 << 20) + 1
    bad = [
        [],
        wrong,
        cut,
        cut + whole,
        whole + whole,
        [*file(MODEL, data, size=large)],
        [*whole, *file("b.safetensors", b"", size=large - len(data))],
        *([*file(MODEL, data, size=size)] for size in (0, len(data) - 1, len(data) + 1)),
        [*file("a.safetensors", data)],
        *(
            [*whole, *file(name, b"{}")]
            for name in ("", "config.json", "../b.safetensors", f"{home}/b.safetensors", "b/c.safetensors")
        ),
    ]
    text = Text(gateway)
    before = gateway.model()
    for messages in bad:
        assert refused(lambda: send(gateway, messages)) == BAD  # noqa: B023
        assert kept(home) == []
    for files in (shards(models[3]), [save({})]):
        source = upload(gateway, files)
        assert refused(lambda: replace(gateway, Path(source))) == "LOAD_FAILED"  # noqa: B023
        gateway.wait_until(lambda: kept(home) == [])
    with pytest.raises(ValueError, match="safetensors"):
        upload(gateway, [b"no header"])
    with pytest.raises(ValueError, match="is in two files"):
        upload(gateway, [data, data])
    with pytest.raises(FileNotFoundError):
        upload(gateway, home)
    gateway.wait_until(lambda: kept(home) == [])
    assert gateway.model() == before
    assert text.finish() == hf_greedy(models[0], text.prompt, len(text.tokens))
    assert kept(home) == [] and (home / "weight-uploads").is_dir()
    replace(gateway, Path(send(gateway, whole)))


def test_one_at_a_time_and_the_latest_is_kept(models: list[Path], home: Path) -> None:
    data = (models[1] / MODEL).read_bytes()
    with serve(models[0], *at_home(home), "--message-timeout-s", "1") as gateway:
        ended = threading.Event()

        def stalling() -> Iterator[Part]:
            yield Part(name=MODEL, size_bytes=len(data), data=data[:100])
            ended.wait(PATIENCE_S)

        stalled = gateway.admin.UploadWeights.future(stalling(), timeout=PATIENCE_S)
        gateway.wait_until(lambda: len(kept(home)) == 1)
        assert refused(lambda: send(gateway, file(MODEL, data))) == "LOADING"
        assert refused(stalled.result) == "MESSAGE_TIMEOUT"
        assert kept(home) == []
        first = upload(gateway, shards(models[1]))
        cancelled = gateway.admin.UploadWeights.future(stalling(), timeout=PATIENCE_S)
        gateway.wait_until(lambda: len(kept(home)) == 2)
        cancelled.cancel()
        gateway.wait_until(lambda: kept(home) == [first])
        second = upload(gateway, shards(models[2]))
        gateway.wait_until(lambda: kept(home) == [second])
        assert refused(lambda: replace(gateway, Path(first))) == "BAD_SOURCE"
        ended.set()
        replace(gateway, Path(second))
        assert_serves(gateway, models[2])


def test_a_model_without_weights_takes_none(weightless_gateway: GatewayProcess) -> None:
    assert refused(lambda: send(weightless_gateway, file(MODEL, save({})))) == "LOAD_FAILED"
