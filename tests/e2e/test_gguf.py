"""Servers of GGUF files, by path and by name on the hub: tokens, texts, and what is refused before."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quire import Client
from quire.cli.main import main
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.model_names import shipped_model_dir
from tests import quire_command
from tests.e2e.greedy import chosen_here
from tests.e2e.test_replace_weights import replace
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.gguf_files import TypeOf, byte_level, write_gguf
from tests.hub_server import cached
from tests.model_factory import TinyModel, make_family_model, make_model
from workers import convert as convert_module
from workers.common.protocol import EXIT_CONFIG
from workers.models.model import BFLOAT16_KV
from workers.models.weights import plan_load

QUESTION = "What is a page?"
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|eot|>{% endfor %}"
COUNT = 16
Q4_K_M: TypeOf = lambda name: "q6_k" if "v_proj" in name or "down_proj" in name else "q4_k"  # noqa: E731


def make(directory: Path, kind: TypeOf | str, family: str = "llama", **settings: Any) -> Path:
    """A file in a directory of its own, with a tokenizer and a chat template."""
    vocabulary = byte_level("llama-bpe").metadata
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": len(vocabulary["tokens"])}
    make_family_model(directory / "hf", family, settings_of(family)[1] | sizes | settings)
    (directory / "model").mkdir()
    return write_gguf(
        directory / "model" / "tiny-Q4_K_M.gguf",
        directory / "hf",
        kind,
        tokenizer=vocabulary,
        metadata={"tokenizer.chat_template": TEMPLATE},
    )


def printed_tokens(gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """What the server answers to a chat, greedily."""
    flags = ["--temperature", "0", "--max-tokens", str(COUNT), "--logprobs"]
    assert main(["generate", "--target", gateway.address, QUESTION, *flags]) == 0
    return [int(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("lfm2", {"conv_bias": False})])
def test_a_text_is_that_of_transformers(
    family: str, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which reads model, tokenizer and template from the same file."""
    file = make(tmp_path, "f32", family, **settings)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )[0, len(prompt) :].tolist()
    if tokenizer.eos_token_id in expected:
        del expected[expected.index(tokenizer.eos_token_id) :]
    with GatewayProcess(model=str(file), flags=["--device", "cpu", "--kv-pages", "64"]) as gateway:
        assert printed_tokens(gateway, capsys) == expected and len(expected) > 4
        with Client(gateway.address) as client:
            info = client.model_info()
    assert info.model.model_id == file.name
    assert dict(info.special_tokens) == {"bos_token": "<|bos|>", "eos_token": "<|eot|>"}


def test_a_quantised_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In several formats. It proves itself before; its tokens are those of a decoder of this process."""
    file = make(tmp_path, Q4_K_M)
    snapshot = cached(tmp_path / "cache", "org/tiny-GGUF", file.parent)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ["--device", "cpu", "--kv-pages", "64"]
    with GatewayProcess(model="org/tiny-GGUF:q4_k_m", flags=flags, self_check=True) as gateway:
        with Client(gateway.address) as client:
            info = client.model_info(include_tokenizer=True)
        assert info.model.quantization == "q4_k; q6_k"
        assert info.model.model_id == f"org/tiny-GGUF/{file.name}"
        found = printed_tokens(gateway, capsys)
        # Or "agreed", in an earlier start.
        assert "native code agree" in gateway.log()
    tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
    prompt = tokenizer.encode(f"<|user|>{QUESTION}<|eot|>", add_special_tokens=False).ids
    expected = chosen_here(snapshot / file.name, prompt, COUNT, kv_dtype=BFLOAT16_KV)
    end = tokenizer.token_to_id("<|eot|>")
    assert found == expected[: expected.index(end) if end in expected else None]


def test_weights_are_replaced_by_others_of_the_same_formats_only(tmp_path: Path) -> None:
    file = make(tmp_path, Q4_K_M)
    vocabulary = byte_level("llama-bpe").metadata
    other = write_gguf(tmp_path / "other.gguf", tmp_path / "hf", "q8_0", tokenizer=vocabulary)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-3000])
    with GatewayProcess(model=str(file), flags=["--device", "cpu", "--kv-pages", "64"]) as gateway:
        assert replace(gateway, file) == gateway.model().fingerprint
        for source, said in (
            (other, "quantization is q8_0, and that of the served weights is q4_k; q6_k"),
            (cut, "ends beyond the end of the file, which is cut short"),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                replace(gateway, source)
            assert said in str(refusal.value) and str(tmp_path) not in str(refusal.value)


def test_a_converted_model_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command by itself: tests/workers/test_convert.py has what it writes."""
    model = make_model(tmp_path / "model", TinyModel())
    out = tmp_path / "model.gguf"

    def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
        return quire_command.completed("convert", *map(str, arguments))

    done = convert(model, out, "--quantization", "q8_0")
    assert done.returncode == 0 and f"quire: {out} has 0 MB" in done.stderr, done.stderr
    assert plan_load(out).format_names == "q8_0"
    assert "must end with .gguf" in convert(model, tmp_path / "model.bin").stderr
    adder = shipped_model_dir("adder")
    # What the process runs, without another start of it.
    assert convert_module.main(str(adder), str(tmp_path / "other.gguf"), "q8_0") == EXIT_CONFIG
    assert "adder: cannot be written as GGUF: pre_tokenizer" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_of_a_conversion_that_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """By Ctrl-C, or with the terminal that it was started from."""
    model = make_model(tmp_path / "model", TinyModel(hidden_size=512, vocab_size=8192, num_layers=4))
    command = quire_command.module("workers.convert", str(model), str(tmp_path / "model.gguf"), "q4_k_m")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as converting:
        while converting.poll() is None and not [*tmp_path.glob(".*.part")]:
            time.sleep(0.01)
        converting.send_signal(number)
        said = converting.stderr.read() if converting.stderr else ""
    assert "Traceback" not in said and not [*tmp_path.glob(".*")]


def test_without_a_tokenizer_tokens_are_served(tmp_path: Path) -> None:
    make_family_model(tmp_path / "hf", "llama", settings_of("llama")[1])
    file = write_gguf(tmp_path / "tokens.gguf", tmp_path / "hf", "q8_0", tokenizer={"model": "none"})
    with (
        GatewayProcess(model=str(file)) as gateway,
        Client(gateway.address) as client,
        client.prefill([1, 2, 3]) as cache,
    ):
        assert cache.decode(4).token_id >= 0
