"""`quire plan`: the sizes of a plan are those of the model when it is loaded, and its roofs are roofs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from quire.cli.main import main
from transformers import Qwen3MoeConfig

from benchmarks.shapes import SHAPES, Shape
from tests.bad_directories import setting
from tests.forks import WORKERS, asked, fork_server
from tests.model_factory import TinyModel, hf_config, make_model
from workers.executors.llm import LlmExecutor
from workers.executors.memory import StepLimits
from workers.kv.sizing import KvSizingError
from workers.models import machine
from workers.models.model import PAGE_SIZE, page_bytes
from workers.plan import GPUS, Needs, num_cpu_pages, num_gpu_pages, plan
from workers.plan import main as answer


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command asks imports torch, for seconds; tests/service/test_cli_doctor.py starts programs."""
    monkeypatch.setattr("service.cli.child.subprocess", asked(fork_server(*WORKERS)))


def with_shape(directory: Path, shape: Shape) -> Path:
    (directory / "config.json").write_text(json.dumps(shape.hf_config()))
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_loaded_model(tmp_path: Path, tied: bool) -> None:
    spec = TinyModel(tied=tied)
    make_model(tmp_path / "whole", spec)
    executor = LlmExecutor.load(tmp_path / "whole", kv_pages=3, self_check=False)
    (tmp_path / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    needs = Needs(tmp_path, "auto", on_gpu=False)
    info = executor.info()
    assert (needs.weight_bytes, needs.num_parameters) == (info.weight_bytes, info.num_parameters)
    assert page_bytes(needs.model) == executor.engine.kv.bytes_per_page


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_a_step_reads_and_computes_what_the_benchmarks_say(name: str, tmp_path: Path) -> None:
    """They leave out the weights of norms, and the diagonal of attention: these are the differences."""
    shape = SHAPES[name]
    needs = Needs(with_shape(tmp_path, shape), "auto", on_gpu=False)
    norms = (
        2 * shape.num_hidden_layers + 1
    ) * shape.hidden_size + 2 * shape.num_hidden_layers * shape.head_dim
    for batch, context in ((1, 128), (8, 1024)):
        assert needs.decode(batch, context)[0] == shape.decode_bytes(batch, context) + 2 * norms
    tokens, heads = 512, shape.num_attention_heads * shape.head_dim
    more = 2 * norms * tokens + 2 * shape.num_hidden_layers * heads * tokens
    assert needs.prefill_flops(tokens) == shape.prefill_flops(1, tokens) + more


def test_experts_are_read_as_far_as_they_are_chosen(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=16, num_experts_per_tok=2,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"head_dim": 16}))
    needs = Needs(tmp_path, "auto", on_gpu=False)
    expert_bytes = 2 * 3 * 64 * 32 * 4  # of one expert in both layers
    kv_bytes = 2 * 2 * 2 * 16 * 4  # of a token
    one, two, eight, nine = (needs.decode(batch, 1)[0] for batch in (1, 2, 8, 9))
    assert two - one == 2 * expert_bytes + kv_bytes
    assert nine - eight == kv_bytes, "eight tokens may choose all"
    embedding_bytes = 97 * 64 * 4
    assert eight == 4 * needs.num_parameters - embedding_bytes + 8 * kv_bytes
    flops = [needs.decode(batch, 1)[1] for batch in (1, 2)]
    assert flops[1] == 2 * flops[0], "each token is computed with two"


def test_a_window_bounds_what_is_attended(tmp_path: Path) -> None:
    settings = hf_config(TinyModel()).to_dict() | {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32,
    }  # fmt: skip
    for name in ("layer_types", "max_window_layers", "use_sliding_window"):
        settings.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    needs = Needs(tmp_path, "auto", on_gpu=False)
    assert needs.decode(1, 32) == needs.decode(1, 64) > needs.decode(1, 31)
    assert needs.prefill_flops(64) - needs.prefill_flops(63) == needs.prefill_flops(63) - needs.prefill_flops(
        62
    )


def test_pages_fit_into_the_memory_that_is_left(tmp_path: Path) -> None:
    needs = Needs(with_shape(tmp_path, SHAPES["qwen3-8b"]), "auto", on_gpu=True)
    for gpu in GPUS.values():
        pages = num_gpu_pages(needs, gpu.memory_bytes, StepLimits())
        taken_bytes = needs.weight_bytes + pages * page_bytes(needs.model)
        # LoRA has 2 GiB of it, and steps at least the reserve.
        assert taken_bytes + (512 << 20) < 0.9 * gpu.memory_bytes
        assert taken_bytes + (6 << 30) > 0.9 * gpu.memory_bytes
    few = num_gpu_pages(needs, 80 * 10**9, StepLimits(max_tokens=8192))
    assert few < num_gpu_pages(needs, 80 * 10**9, StepLimits())
    with pytest.raises(KvSizingError, match="weights of the model do not fit"):
        num_gpu_pages(needs, 8 << 30, StepLimits())
    with pytest.raises(KvSizingError, match="no KV page fits"):
        num_gpu_pages(needs, 18 * 2**30, StepLimits())


def test_a_cpu_gives_the_share_that_a_worker_takes(tmp_path: Path) -> None:
    needs = Needs(with_shape(tmp_path, SHAPES["qwen3-0.6b"]), "auto", on_gpu=False)
    free_bytes = 4 << 30
    pages = num_cpu_pages(needs, free_bytes + needs.weight_bytes)
    assert pages == free_bytes // 4 // page_bytes(needs.model)


def test_what_is_not_a_model_in_safetensors_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    quantised = make_model(tmp_path / "quantised", TinyModel())
    setting(quantization_config={"quant_method": "gptq"})(quantised)
    for model, why in (
        (file, "it is in GGUF format, for llama.cpp: use the original model in safetensors format"),
        (tmp_path, "it is in GGUF format, for llama.cpp: use the original model in safetensors format"),
        (quantised, "its weights are quantised (gptq, "),
        (tmp_path / "none", "it does not exist"),
        ("paged-attention", "it has neither a config.json nor weights"),
    ):
        assert main(["plan", "--model", str(model)]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"quire: {model} cannot be planned: {why}")


def test_a_gpu_is_planned_without_expectations(tmp_path: Path) -> None:
    """None was measured."""
    directory = with_shape(tmp_path, SHAPES["qwen3-8b"])
    found = plan(directory, "auto", "H100", None, 2048, StepLimits())
    assert found["source"] == "NVIDIA's data sheet of the H100 SXM"
    assert found["contexts"] == int(str(found["pages"])) // (2048 // PAGE_SIZE)
    rates = found["rates"]
    assert isinstance(rates, list)
    assert [rate["what"] for rate in rates] == [
        "decode, 1 at once", "decode, 8 at once", "decode, 32 at once", "prefill of 512",
    ]  # fmt: skip
    assert all(rate["expected"] is None and rate["fraction"] is None for rate in rates)
    needs = Needs(directory, "auto", on_gpu=True)
    # One sequence is bound by the reads, and a prompt by the products.
    assert rates[0]["roof"] == pytest.approx(3350e9 / needs.decode(1, 2048)[0])
    assert rates[3]["roof"] == pytest.approx(512 * 989e12 / needs.prefill_flops(512))
    assert rates[0]["roof"] < rates[1]["roof"] < rates[2]["roof"] < 32 * rates[0]["roof"]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shape of which no weights exist. It measures no machine: tests/client/test_commands_page.py."""

    def ask(module: str, asked: str, *, timeout_s: float) -> list[dict[str, object]]:
        monkeypatch.setattr(sys, "argv", [module, asked])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert answer() == 0
        return [json.loads(printed.getvalue())]

    monkeypatch.setattr("service.cli.plan.ask", ask)
    monkeypatch.setattr(machine, "read_bytes_per_s", lambda: 1e10)
    monkeypatch.setattr(machine, "product_flops_per_s", lambda: 1e11)
    shape = dataclasses.replace(SHAPES["qwen3-0.6b"], num_hidden_layers=2)
    model = str(with_shape(tmp_path, shape))
    assert main(["plan", "--model", model, "--context", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu" and "measured on this machine" in found["source"]
    assert found["page_tokens"] == PAGE_SIZE
    assert found["context"] == 100 and found["contexts"] == found["pages"] // 7
    for rate in found["rates"]:
        expected = rate["fraction"] and rate["fraction"] * rate["roof"]
        assert rate["expected"] == expected and rate["roof"] > 0
    assert main(["plan", "--model", model, "--gpu", "L4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "L4, 22.4 GiB, 300 GB/s" in lines[1] and max(map(len, lines)) <= 80
    assert "not measured on such a device" in " ".join(lines[-2:])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        # It measures the machine before. As `test_pages_fit_into_the_memory_that_is_left`.
        pytest.param(["--memory", "1000"], "the weights of the model do not fit", marks=pytest.mark.thorough),
        (["--memory", "0"], "must be at least 1"),
        (["--context", "0"], "must be at least 1"),
        (["--dtype", "int8"], "dtype: must be auto or one of"),
        (["--gpu", "H100"], "only models of native code can be planned: head_dim"),
    ],
)
def test_what_cannot_be_planned_is_told(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "adder", *flags]) == 1
    assert why in capsys.readouterr().err


def test_the_command_offers_the_gpus_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "adder", "--gpu", "list"])
    offered = capsys.readouterr().err.partition("choose from ")[2].rstrip(")\n")
    assert [name.strip("'") for name in offered.split(", ")] == [*GPUS]
