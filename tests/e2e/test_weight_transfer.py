"""Weights that a trainer broadcasts: served as if loaded, and the old ones stay whatever becomes of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.v1 import admin_pb2
from safetensors.torch import load_file, save_file

from service.auth.tokens import Role, new_token
from tests import quire_command
from tests.adapter_factory import make_adapter, merge
from tests.client.pages import blocks
from tests.e2e import broadcasting_trainer
from tests.e2e.broadcasting_trainer import TIMEOUT_S, Trainer, joined
from tests.e2e.greedy import Text, assert_serves
from tests.e2e.test_auth import Guarded
from tests.e2e.test_replace_weights import replace
from tests.e2e.test_upload_weights import kept
from tests.error_details import refused
from tests.gateway_process import ROOT
from tests.http_gateway import HttpGateway
from tests.ports import free_port
from tests.programs import output_of

# For tests that wait so long. With the default of half a minute, which others wait for no time at all.
SILENCE_S = 3
FILE = "model.safetensors"
DONE = "Weight update finished"
FLAGS = ["--dtype", "float32", "--kv-pages", "128"]
TRANSFER = ["--openai-weight-transfer", "gloo"]


def address_of(gateway: HttpGateway) -> str:
    return f"127.0.0.1:{gateway.http_port}"


def call(gateway: HttpGateway, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    return broadcasting_trainer.call(address_of(gateway), path, body, **headers)


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / FILE)


@contextlib.contextmanager
def serving(model: Path, home: Path, *flags: str) -> Iterator[HttpGateway]:
    flags = (*FLAGS, *TRANSFER, "--data-dir", str(home), "--orphan-grace-s", "0", *flags)
    with HttpGateway(model=str(model), workers=2, flags=flags) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def server(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HttpGateway, Path]]:
    home = tmp_path_factory.mktemp("data")
    with serving(models[0], home) as gateway:
        yield gateway, home


@pytest.fixture
def gateway(server: tuple[HttpGateway, Path], models: list[Path]) -> Iterator[HttpGateway]:
    """One for all tests, with the first weights, and without an upload. A test leaves no caches behind."""
    gateway, home = server
    replace(gateway, models[0])
    gateway.wait_until(lambda: kept(home) == [])
    yield gateway
    gateway.assert_pools_are_whole()


@pytest.mark.parametrize("packed_bytes", [0, 50_000])
def test_they_are_served_as_if_loaded(gateway: HttpGateway, models: list[Path], packed_bytes: int) -> None:
    """Tensor by tensor, or several at once; in several calls."""
    weights = weights_of(models[1])
    first = dict(list(weights.items())[::2])
    before = gateway.model()
    with joined(address_of(gateway), packed_bytes=packed_bytes) as trainer:
        trainer.call("/start_weight_update")
        for part in (first, {name: each for name, each in weights.items() if name not in first}):
            assert trainer.update(part) == {"message": "Weights updated"}
        assert gateway.model() == before
        answer = trainer.call("/finish_weight_update", {"weight_version": "step 7"})
    assert answer["message"] == DONE, answer
    after = gateway.model()
    assert answer["fingerprint"] == after.fingerprint != before.fingerprint
    assert after.model_id == before.model_id
    assert_serves(gateway, models[1])
    assert call(gateway, "/weight_info") == (200, {"weight_version": "step 7"})


def test_weights_that_an_operator_loads_have_no_name_of_the_trainer(
    gateway: HttpGateway, models: list[Path]
) -> None:
    with joined(address_of(gateway)) as trainer:
        trainer.call("/start_weight_update")
        trainer.update(weights_of(models[1]))
        served = trainer.call("/finish_weight_update", {"weight_version": "step 8"})["weights_version"]
    replace(gateway, models[2])
    assert call(gateway, "/weight_info") == (200, {"weight_version": str(served + 1)})


def test_the_steps_of_a_trainer(gateway: HttpGateway, models: list[Path], tmp_path: Path) -> None:
    """Later ones do not say once more which tensors there are, as those of vLLM's trainers."""
    halved = tmp_path / "halved"
    shutil.copytree(models[2], halved)
    save_file({name: each * 0.5 for name, each in weights_of(models[2]).items()}, halved / FILE)
    with joined(address_of(gateway)) as trainer:
        for step, (model, mode) in enumerate([(models[1], "keep"), (halved, "abort"), (models[2], "")]):
            text = Text(gateway)
            text.decode(3)
            if mode:
                assert trainer.call(f"/pause?mode={mode}&clear_cache=false") == {"status": "paused"}
                assert call(gateway, "/is_paused") == (200, {"is_paused": True})
            assert trainer.push(weights_of(model), announce=not step)["message"] == DONE
            assert trainer.call("/resume") == {"status": "resumed"}
            assert_serves(gateway, model)
            if mode == "abort":
                assert refused(lambda text=text: text.decode(1)) == "WEIGHTS_CHANGED"  # type: ignore[misc]
            else:
                text.decode(3)
            text.release()


def test_directories_of_prime_rl(gateway: HttpGateway, models: list[Path], tmp_path: Path) -> None:
    """The calls of its prime_rl/utils/client.py at 559b447. A directory has weights alone, for a while."""
    step = tmp_path / "step_1"
    step.mkdir()
    shutil.copy(models[1] / FILE, step)
    (step / "STABLE").touch()
    text = Text(gateway)
    text.decode(3)
    assert call(gateway, "/pause?mode=keep&clear_cache=false")[0] == 200
    assert call(gateway, "/update_weights", {"weight_dir": str(step)})[0] == 200
    assert call(gateway, "/resume")[0] == 200
    shutil.rmtree(step)
    assert_serves(gateway, models[1])
    text.decode(3)
    text.release()
    before = gateway.model()
    for weight_dir, code in (
        (str(step), "bad_source"), ("step_1", "bad_field"), (str(models[3]), "load_failed"),
    ):  # fmt: skip
        status, answer = call(gateway, "/update_weights", {"weight_dir": weight_dir})
        assert (status, answer["error"]["code"]) == (400, code), answer
    # Its broadcasts are pickles.
    nccl = {"host": "127.0.0.1", "port": 1, "rank_offset": 0, "inference_world_size": 1, "timeout": 1}
    assert call(gateway, "/init_broadcaster", nccl)[1]["error"]["code"] == "unsupported_field"
    assert gateway.model() == before


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def test_files_that_are_no_weights(gateway: HttpGateway, models: list[Path], tmp_path: Path) -> None:
    """A trainer removes, or replaces, what is being copied. The server's disk is not at fault, nor filled."""
    before = gateway.model()
    weights = (models[1] / FILE).read_bytes()
    makers: dict[str, Callable[[Path], object]] = {
        "a directory": Path.mkdir,
        "a pipe": os.mkfifo,
        "gone": lambda file: file.symlink_to("nowhere"),
        "without an end": lambda file: file.symlink_to("/dev/zero"),
        "too large": lambda file: file.write_bytes(bytes(4 << 20)),
        "sparse": sparse,
    }
    for name, make in makers.items():
        (step := tmp_path / name).mkdir()
        make(step / FILE)
        status, answer = call(gateway, "/update_weights", {"weight_dir": str(step)})
        assert (status, answer["error"]["code"]) == (400, "bad_weights"), (name, answer)
        assert str(tmp_path) not in answer["error"]["message"]
    (torn := tmp_path / "torn").mkdir()
    (torn / FILE).write_bytes(weights[:-1])
    assert call(gateway, "/update_weights", {"weight_dir": str(torn)})[1]["error"]["code"] == "load_failed"
    for weight_dir in ("/" + "a" * 300, "/a\0b", str(models[1] / FILE)):
        status, answer = call(gateway, "/update_weights", {"weight_dir": weight_dir})
        assert (status, answer["error"]["code"]) == (400, "bad_source"), answer
    assert gateway.model() == before


def test_adapters_of_a_trainer(gateway: HttpGateway, models: list[Path], tmp_path: Path) -> None:
    """The name stays, and each step has another directory."""
    for seed in (1, 2):
        adapter = tmp_path / f"step_{seed}"
        make_adapter(adapter, models[0], seed)
        merged = merge(tmp_path / f"merged_{seed}", models[0], adapter)
        path = "/load_lora_adapter" if seed == 1 else "/v1/load_lora_adapter"
        status, answer = call(gateway, path, {"lora_name": "policy", "lora_path": str(adapter)})
        assert status == 200, answer
        shutil.rmtree(adapter)
        assert_serves(gateway, merged, "policy")
    gone = {"lora_name": "policy"}
    assert [call(gateway, "/v1/unload_lora_adapter", gone)[0] for _ in range(2)] == [200, 404]
    status, answer = call(gateway, "/load_lora_adapter", {**gone, "lora_path": str(tmp_path / "none")})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "lora_path", "bad_adapter")
    for path, body in {
        "/load_lora_adapter": {"lora_name": "-", "lora_path": "/x"},
        "/v1/unload_lora_adapter": {"lora_name": "-"},
    }.items():
        error = call(gateway, path, body)[1]["error"]
        assert (error["param"], error["code"]) == ("lora_name", "bad_adapter")


def test_a_trainer_that_is_silent_changes_nothing(models: list[Path], tmp_path: Path) -> None:
    with serving(models[0], tmp_path, "--message-timeout-s", str(SILENCE_S)) as gateway:
        before = gateway.model()
        # One vanishes in the middle of its tensors, the next before the last call, and one never comes.
        arguments = (address_of(gateway), str(models[1] / FILE), "5")
        program = quire_command.module("tests.e2e.broadcasting_trainer", *arguments)
        subprocess.run(program, timeout=TIMEOUT_S, check=True, cwd=ROOT)
        gateway.wait_until(lambda: kept(tmp_path) == [])
        with joined(address_of(gateway)) as trainer:
            trainer.call("/start_weight_update")
            trainer.update(weights_of(models[1]))
            gateway.wait_until(lambda: kept(tmp_path) == [])
            assert trainer.call("/finish_weight_update")["code"] == "load_failed"
        info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        status, answer = call(gateway, "/init_weight_transfer_engine", {"init_info": info})
        assert (status, answer["error"]["code"]) == (400, "load_failed")
        assert gateway.model() == before
        assert_serves(gateway, models[0])
        # One does not try again although it is told to.
        with joined(address_of(gateway)) as trainer:
            trainer.call("/start_weight_update")
            trainer.update(weights_of(models[1]))
            assert finish_during_a_load(gateway, trainer, models[2])["code"] == "loading"
            gateway.wait_until(lambda: kept(tmp_path) == [])
            assert trainer.call("/finish_weight_update")["code"] == "load_failed"
        assert_serves(gateway, models[2])


def finish_during_a_load(gateway: HttpGateway, trainer: Trainer, model: Path) -> Any:
    """The answer to a trainer while another load runs, which ends before this returns."""
    workers = gateway.worker_processes()
    for worker in workers:
        worker.suspend()
    loading = gateway.admin.LoadWeights(admin_pb2.LoadWeightsRequest(source=str(model)), timeout=TIMEOUT_S)
    assert next(loading).phase == admin_pb2.LOAD_WEIGHTS_PHASE_LOADING
    answer = trainer.call("/finish_weight_update")
    for worker in workers:
        worker.resume()
    assert next(loading).phase == admin_pb2.LOAD_WEIGHTS_PHASE_SERVING
    return answer


def test_an_update_is_served_after_a_load_that_was_first(gateway: HttpGateway, models: list[Path]) -> None:
    """Before, the trainer was told to try again, and then that nothing was received."""
    with joined(address_of(gateway)) as trainer:
        trainer.call("/start_weight_update")
        trainer.update(weights_of(models[1]))
        assert finish_during_a_load(gateway, trainer, models[2])["code"] == "loading"
        assert trainer.call("/finish_weight_update")["message"] == DONE
        assert trainer.call("/finish_weight_update")["code"] == "load_failed"
    assert_serves(gateway, models[1])


def test_a_disk_that_fails_at_the_end_is_said(
    server: tuple[HttpGateway, Path], gateway: HttpGateway, models: list[Path]
) -> None:
    """Before, it was an internal error."""
    before = gateway.model()
    with joined(address_of(gateway)) as trainer:
        trainer.call("/start_weight_update")
        trainer.update(weights_of(models[1]))
        (written,) = server[1].glob("weight-uploads/**/0.safetensors")
        (written.parent / "model.safetensors.index.json").mkdir()
        assert trainer.call("/finish_weight_update")["code"] == "storage_unavailable"
    assert kept(server[1]) == []
    assert gateway.model() == before


@pytest.mark.parametrize("kind", ["missing", "other", "large", "shorter than announced"])
def test_weights_that_cannot_be_served_are_refused(
    gateway: HttpGateway, models: list[Path], kind: str
) -> None:
    before = gateway.model()
    weights = weights_of(models[3] if kind == "other" else models[1])
    if kind == "missing":
        del weights["model.norm.weight"]
    elif kind == "large":
        # Twice the bytes of the served ones are allowed, and a megabyte.
        weights["more"] = torch.zeros(sum(each.nbytes for each in weights.values()) // 2 + (1 << 18))
    with joined(address_of(gateway)) as trainer:
        if kind == "shorter than announced":
            trainer.cut = 4
        answer = trainer.push(weights)
    assert answer["code"] == ("bad_weights" if kind == "large" else "load_failed")
    assert gateway.model() == before


def test_calls_out_of_order_and_bad_fields(gateway: HttpGateway) -> None:
    for path in ("/shutdown_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"):
        status, answer = call(gateway, path)
        assert status == (200 if path.startswith("/shutdown") else 400), answer
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
    operator, line = new_token("boss", [Role.ADMINISTER])
    flags = [*FLAGS, *TRANSFER, "--openai-listen", "127.0.0.1:0"]
    with Guarded(tmp_path, *flags, model=str(models[0]), quotas=[line]) as gateway:
        address = f"127.0.0.1:{gateway.http_port}"
        for path in ("/pause", "/start_weight_update", "/is_paused", "/load_lora_adapter"):
            assert broadcasting_trainer.call(address, path)[0] == 401
            own = f"Bearer {gateway.tokens['alice']}"
            status, answer = broadcasting_trainer.call(address, path, authorization=own)
            assert (status, answer["error"]["code"]) == (403, "role_missing")
        with joined(address, operator) as trainer:
            assert trainer.push(weights_of(models[1]))["message"] == DONE


def test_the_trainer_of_the_manual(tmp_path: Path) -> None:
    (program,) = [each.text for each in blocks("docs/training.md", "python") if "dist.broadcast" in each.text]
    with HttpGateway(model="adder", flags=[*FLAGS, *TRANSFER]) as gateway:
        for old, new in {
            "http://127.0.0.1:8000": f"http://{address_of(gateway)}",
            "29511": str(free_port()),
            '"workers/': f'"{ROOT}/workers/',
        }.items():
            assert old in program
            program = program.replace(old, new)
        (tmp_path / "trainer_of_the_manual.py").write_text(program)
        path = os.environ | {"PYTHONPATH": str(tmp_path)}
        printed = output_of(*quire_command.module("trainer_of_the_manual"), env=path)
        assert printed.strip() == gateway.model().fingerprint
