"""Weights that a trainer broadcasts: served as if loaded, and the old ones stay whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from service.auth.tokens import Role, new_token
from tests.e2e.test_adapters import Text
from tests.e2e.test_openai import HttpGateway
from tests.e2e.test_replace_weights import described, replace
from tests.e2e.test_upload_weights import kept
from tests.gateway_process import ROOT
from tests.model_factory import hf_greedy

TRAINER = Path(__file__).with_name("broadcasting_trainer.py")
TIMEOUT_S = 120
STEPS = 8
SILENCE_S = 5
MODEL = "model.safetensors"


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def train(gateway: HttpGateway, weights: Path, **options: Any) -> list[dict[str, Any]]:
    """What the calls of a trainer are answered."""
    url = f"http://127.0.0.1:{gateway.port}"
    options = {"url": url, "port": free_port(), "model": str(weights), **options}
    done = subprocess.run(
        [sys.executable, TRAINER, json.dumps(options)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 or "vanishes_after" in options, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def call(gateway: HttpGateway, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    method = "GET" if path in ("/is_paused", "/get_world_size", "/weight_info") else "POST"
    with contextlib.closing(HTTPConnection("127.0.0.1", gateway.port, timeout=TIMEOUT_S)) as connection:
        if body is not None:
            headers["content-type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def server(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HttpGateway, Path]]:
    home = tmp_path_factory.mktemp("data")
    flags = ["--dtype", "float32", "--kv-pages", "128", "--openai-listen", "127.0.0.1:0"]
    flags += ["--openai-weight-transfer", "gloo", "--data-dir", str(home)]
    flags += ["--orphan-grace-s", "0", "--message-timeout-s", str(SILENCE_S)]
    with HttpGateway(model=str(models[0]), workers=2, flags=flags) as gateway:
        yield gateway, home


@pytest.fixture
def gateway(server: tuple[HttpGateway, Path], models: list[Path]) -> Iterator[HttpGateway]:
    """One for all tests, with the first weights, and without an upload. A test leaves no caches behind."""
    gateway, home = server
    replace(gateway, models[0])
    gateway.wait_until(lambda: kept(home) == [])
    yield gateway
    gateway.assert_pools_are_whole()


def assert_serves(gateway: HttpGateway, model: Path) -> None:
    text = Text(gateway)
    assert text.finish() == hf_greedy(model, text.prompt, len(text.tokens))
    text.release()


@pytest.mark.parametrize("options", [{}, {"packed_bytes": 50_000}, {"packed_bytes": 1 << 30}, {"parts": 3}])
def test_they_are_served_as_if_loaded(
    gateway: HttpGateway, models: list[Path], options: dict[str, Any]
) -> None:
    """Tensor by tensor, several at once, and in several calls."""
    before = described(gateway)
    *_, last = train(gateway, models[1] / MODEL, **options, finish={"weight_version": "step 7"})
    assert last["message"] == "Weight update finished", last
    after = described(gateway)
    assert last["fingerprint"] == after.fingerprint != before.fingerprint
    assert after.model_id == before.model_id
    assert_serves(gateway, models[1])
    assert call(gateway, "/weight_info") == (200, {"weight_version": "step 7"})


def test_each_step_of_a_trainer(gateway: HttpGateway, models: list[Path], tmp_path: Path) -> None:
    """The second update does not say once more which tensors there are, as vLLM's trainers do."""
    answers = train(gateway, models[1] / MODEL, updates=2, factor=0.5, pause="keep")
    assert [each.get("status") for each in answers if "status" in each] == ["paused", "resumed"] * 2
    halved = tmp_path / "halved"
    halved.mkdir()
    for file in models[1].iterdir():
        (halved / file.name).write_bytes(file.read_bytes())
    save_file({name: each * 0.5 for name, each in load_file(models[1] / MODEL).items()}, halved / MODEL)
    assert_serves(gateway, halved)


@pytest.mark.parametrize(("mode", "goes_on"), [("keep", True), ("abort", False), (None, True)])
def test_what_becomes_of_samples_in_flight(
    gateway: HttpGateway, models: list[Path], mode: str | None, goes_on: bool
) -> None:
    text = Text(gateway)
    text.decode(3)
    train(gateway, models[1] / MODEL, pause=mode)
    with contextlib.nullcontext() if goes_on else pytest.raises(Exception, match="WEIGHTS_CHANGED|weights"):
        text.decode(3)
    text.release()


@pytest.mark.parametrize("options", [{"vanishes_after": 5}, {"vanishes_before_the_end": True}])
def test_a_trainer_that_vanishes_changes_nothing(
    server: tuple[HttpGateway, Path], gateway: HttpGateway, models: list[Path], options: dict[str, Any]
) -> None:
    before = described(gateway)
    train(gateway, models[1] / MODEL, **options)
    gateway.wait_until(lambda: kept(server[1]) == [])
    assert described(gateway) == before
    assert_serves(gateway, models[0])
    # The next one is served.
    assert train(gateway, models[1] / MODEL)[-1]["message"] == "Weight update finished"


def test_a_trainer_that_never_comes_is_waited_for_so_long(gateway: HttpGateway) -> None:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    status, answer = call(gateway, "/init_weight_transfer_engine", {"init_info": info})
    assert (status, answer["error"]["code"]) == (400, "load_failed")


def test_weights_that_do_not_fit_are_refused(
    gateway: HttpGateway, models: list[Path], tmp_path: Path
) -> None:
    before = described(gateway)
    weights = load_file(models[1] / MODEL)
    first = next(iter(weights))
    for name, changed in {
        "missing": {key: value for key, value in weights.items() if key != first},
        "other": load_file(models[3] / MODEL),
        "large": {**weights, "more": weights["model.embed_tokens.weight"].repeat(9, 1)},
    }.items():
        save_file(changed, tmp_path / name)
        *_, update, last = train(gateway, tmp_path / name)
        refused = update if name == "large" else last
        assert refused["code"] == ("bad_weights" if name == "large" else "load_failed"), refused
    assert described(gateway) == before


def test_calls_out_of_order_and_bad_fields(gateway: HttpGateway) -> None:
    for path in ("/start_weight_update", "/finish_weight_update"):
        assert call(gateway, path)[1]["error"]["code"] == "load_failed"
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for name, value in {
        "master_port": 0, "world_size": 1, "rank_offset": 2, "master_address": "", "packed": 1,
        "nccl_unique_id_b64": "AAAA",
    }.items():  # fmt: skip
        body = {"init_info": {**info, name: value}}
        status, answer = call(gateway, "/init_weight_transfer_engine", body)
        assert (status, answer["error"]["param"]) == (400, f"init_info.{name}")
    assert call(gateway, "/pause?mode=wait")[1]["error"]["param"] == "mode"
    assert call(gateway, "/pause", origin="https://example.org")[0] == 415
    assert call(gateway, "/is_paused") == (200, {"is_paused": False})
    assert call(gateway, "/get_world_size") == (200, {"world_size": 1})


def test_only_operators_push_weights(models: list[Path], tmp_path: Path) -> None:
    tokens = {role: new_token(role.value, [role]) for role in (Role.CALL, Role.ADMINISTER)}
    file = tmp_path / "tokens"
    file.write_text("\n".join(["[tokens]", *(line for _, line in tokens.values())]))
    flags = [
        "--dtype",
        "float32",
        "--kv-pages",
        "64",
        "--openai-listen",
        "127.0.0.1:0",
        "--tokens",
        str(file),
    ]
    with HttpGateway(
        model=str(models[0]),
        flags=[*flags, "--openai-weight-transfer", "gloo"],
        token=tokens[Role.ADMINISTER][0],
    ) as gateway:
        for path in ("/pause", "/start_weight_update", "/is_paused"):
            assert call(gateway, path)[0] == 401
            status, answer = call(gateway, path, authorization=f"Bearer {tokens[Role.CALL][0]}")
            assert (status, answer["error"]["code"]) == (403, "role_missing")
        answers = train(gateway, models[1] / MODEL, token=tokens[Role.ADMINISTER][0])
        assert answers[-1]["message"] == "Weight update finished"


def test_a_server_without_the_setting_has_none(models: list[Path]) -> None:
    with HttpGateway(model=str(models[0]), flags=["--openai-listen", "127.0.0.1:0"]) as gateway:
        assert call(gateway, "/pause")[0] == 404
