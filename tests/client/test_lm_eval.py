"""lm-evaluation-harness itself, where it is installed: `--model quire` and `--model hf` say the same.

Nothing here installs it. Tasks, their texts and the models are made here, so that nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from tests.chat_templates import byte_tokenizer
from tests.gateway_process import ROOT, GatewayProcess
from tests.model_factory import TinyModel, make_family_model, make_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed"
)

ADAPTER = ROOT / "clients" / "python" / "examples" / "lm_eval_adapter.py"
# Texts of bytes: the longest ones below are longer.
ROOM = 96
BEGIN, END = 256, 257
# Of one choice, of some tens of tokens: in nats.
TOLERANCE = 1e-4

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "river", "stone", "blue", "éclair", "naïve", "12", "7")
_TASK = """
task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
{rest}
"""
_TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}, {metric: word_perplexity}]
""",
    "generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for --include_path."""
    directory = tmp_path_factory.mktemp("tasks")
    drawn = random.Random(5)

    def text(words: int) -> str:
        return " ".join(drawn.choice(_WORDS) for _ in range(words))

    with (directory / "data.jsonl").open("w") as lines:
        for number in range(16):
            choices = [text(drawn.randint(1, 4)) for _ in range(4)]
            row = {"question": text((2, 9, 15, 60)[number % 4]), "choices": choices, "gold": number % 4}
            lines.write(json.dumps(row) + "\n")
    for name, rest in _TASKS.items():
        task = _TASK.format(name=name, data=directory / "data.jsonl", rest=rest)
        (directory / f"{name}.yaml").write_text(task)
    return directory


def model(directory: Path, family: str) -> Path:
    """A random model of bytes; the llama's tokenizer begins each text with a token of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<begin>", "<end>")])
    config = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "eos_token": "<end>"}
    if family == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            "<begin> $A", special_tokens=[("<begin>", BEGIN)]
        )
        config["bos_token"] = "<begin>"
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        rest = {
            "max_position_embeddings": ROOM,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            "vocab_size": 258,
        }
        make_family_model(directory, "llama", sizes | heads | rest)
    else:
        # As some models have it: a bos in the config, and none in the tokenizer.
        ends = {"bos_token_id": 5, "eos_token_id": END}
        make_model(directory, TinyModel(vocab_size=258, max_positions=ROOM, extra=ends))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<end>"}))
    return directory


def evaluated(command: list[str], tasks: Path, out: Path, *more: str) -> tuple[Any, dict[str, list[Any]]]:
    """The harness's results, and each task's samples."""
    names = ",".join(f"local_{name}" for name in _TASKS)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "hub")}
    options = ("--tasks", names, "--include_path", str(tasks), "--output_path", str(out), "--log_samples")
    done = subprocess.run(
        [*command, *more, *options],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | offline | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    (results,) = out.glob("*/results_*.json")
    samples = {}
    for name in _TASKS:
        (found,) = out.glob(f"*/samples_local_{name}_*.jsonl")
        samples[name] = [json.loads(line)["resps"] for line in found.read_text().splitlines()]
    return json.loads(results.read_text())["results"], samples


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_it_says_what_the_harness_says_of_transformers(family: str, tasks: Path, tmp_path: Path) -> None:
    directory = model(tmp_path / "model", family)
    with GatewayProcess(model=str(directory), flags=["--dtype", "float32", "--kv-pages", "512"]) as gateway:
        ours, our_samples = evaluated(
            [sys.executable, str(ADAPTER), "--model", "quire", "--batch_size", "8"],
            tasks, tmp_path / "ours", "--model_args", f"target={gateway.address}",
        )  # fmt: skip
    theirs, their_samples = evaluated(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"],
        tasks, tmp_path / "theirs", "--model_args", f"pretrained={directory},dtype=float32",
    )  # fmt: skip
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["local_choice"][metric] == theirs["local_choice"][metric]
    bits = "bits_per_byte,none"
    assert ours["local_text"][bits] == pytest.approx(theirs["local_text"][bits], abs=TOLERANCE)
    assert our_samples["generate"] == their_samples["generate"]
    for our, their in zip(our_samples["choice"], their_samples["choice"], strict=True):
        for ((logprob, is_greedy),), ((told, greedy),) in zip(our, their, strict=True):
            assert float(logprob) == pytest.approx(float(told), abs=TOLERANCE)
            assert is_greedy == greedy
    for ((logprob,),), ((told,),) in zip(our_samples["text"], their_samples["text"], strict=True):
        # Of a whole text, some hundred tokens.
        assert float(logprob) == pytest.approx(float(told), rel=1e-6)


def test_importing_the_adapter_registers_it_beside_the_others() -> None:
    code = "import lm_eval_adapter; from lm_eval.api.registry import get_model; "
    code += "print(get_model('quire').__mro__[1].__name__, get_model('dummy').__name__)"
    paths = os.pathsep.join([str(ADAPTER.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.stdout.strip() == "QuireLM DummyLM", done.stderr
