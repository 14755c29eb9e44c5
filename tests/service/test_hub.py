"""Models of the hub: found in a local cache, downloaded whole and nothing else, or told in a line why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli import hub
from service.model_names import is_hub_model
from tests import quire_command
from tests.hub_server import COMMIT, Hub, serving

MODEL = "org/model"
FIRST = f"download it first (hf download {MODEL}), or name a directory that holds it"
# Where nothing listens: who asks all the same is told in an instant.
NOBODY = "http://127.0.0.1:1"

SMALL = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b'{"do_sample": true}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b'{"bos_token": "<s>"}',
    "added_tokens.json": b'{"<|im_start|>": 7}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    # Without these the model would be one whose embedding is the last token's.
    "modules.json": b"[]",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
}
WEIGHTS = {"model.safetensors": bytes(range(256)) * 400}
SHARDS = {
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"1" * 1000,
    "model-00002-of-00002.safetensors": b"2" * 1000,
}
# As AutoGPTQ wrote it.
OF_GPTQ = {
    "gptq_model-4bit-128g.safetensors": b"4" * 1000,
    "quantize_config.json": b'{"bits": 4, "group_size": 128}',
}
# What lies beside a model on the hub, and is not fetched.
OTHERS = {
    "docs/README.md": b"#",
    "README.md": b"---\nlicense: mit\n---\n",
    "LICENSE": b"MIT",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"import os",
    "consolidated.safetensors": b"twice",
    "onnx/model.safetensors": b"other",
    "original/config.json": b"{}",
}

Find = Callable[..., tuple[str, str]]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Looks for the model in a process of its own, since the hub's library reads its environment once.

    Returns where it is, or an empty string; and what was printed.
    """
    home = str(tmp_path / "home")

    def run(*, model: str = MODEL, revision: str | None = None, **environment: str) -> tuple[str, str]:
        # Not those of whoever runs the tests.
        others = ("HF_", "TRANSFORMERS_", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        base = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        done = subprocess.run(
            quire_command.module(
                "tests.service.find_model", json.dumps([model, revision]), imported=["service.cli.hub"]
            ),
            env=base | {"HF_HOME": home, "HF_ENDPOINT": NOBODY} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return done.stdout.strip(), done.stderr

    return run


def make_cache(cache: Path, files: dict[str, bytes], commit: str = COMMIT, ref: str = "main") -> Path:
    """A cache of the hub with one snapshot, as its library lays it out, of links. Returns the snapshot."""
    model = cache / "models--org--model"
    snapshot = model / "snapshots" / commit
    (model / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (model / "blobs" / f"{commit}{number}").write_bytes(content)
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(model / "blobs" / f"{commit}{number}")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / ref).write_text(commit)
    return snapshot


def names_in(snapshot: str) -> set[str]:
    """Of its files, with the directories they lie in."""
    return {str(path.relative_to(snapshot)) for path in Path(snapshot).rglob("*") if path.is_file()}


# Without a network.


@pytest.mark.parametrize("weights", [pytest.param(WEIGHTS, marks=pytest.mark.thorough), SHARDS])
def test_what_is_in_the_cache_is_found_without_asking_anybody(
    tmp_path: Path, find: Find, weights: dict[str, bytes]
) -> None:
    snapshot = make_cache(tmp_path / "home" / "hub", SMALL | weights)
    with serving(Hub(MODEL, {})) as endpoint:
        assert find(HF_ENDPOINT=endpoint) == (str(snapshot), "")
    assert find(HF_HUB_OFFLINE="1") == (str(snapshot), "")
    assert find(revision=COMMIT) == (str(snapshot), "")


def test_what_is_not_there_and_may_not_be_fetched_is_told(tmp_path: Path, find: Find) -> None:
    cache, why = tmp_path / "home" / "hub", "HF_HUB_OFFLINE is set"
    found, said = find(HF_HUB_OFFLINE="1")
    assert (found, said) == (
        "",
        f"quire: {MODEL} is no directory here and is not in the cache {cache}; {why}: {FIRST}\n",
    )
    snapshot = make_cache(cache, SMALL | WEIGHTS)
    (snapshot / "model.safetensors").resolve().unlink()
    _, said = find(HF_HUB_OFFLINE="1")
    assert f"is not whole in the cache {cache}; {why}" in said, "a link to nothing"


def test_settings_that_are_known_to_be_missing_are_fetched_or_told(tmp_path: Path, find: Find) -> None:
    snapshot = make_cache(tmp_path / "home" / "hub", SMALL | WEIGHTS)
    listing = {name: {"size": len(data), "blob_id": "0"} for name, data in (SMALL | WEIGHTS).items()}
    trees = snapshot.parents[1] / "trees"
    trees.mkdir()
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    assert find(HF_HUB_OFFLINE="1") == (str(snapshot), "")
    (snapshot / "tokenizer_config.json").unlink()
    assert "is not whole in the cache" in find(HF_HUB_OFFLINE="1")[1]
    site = Hub(MODEL, SMALL | WEIGHTS)
    with serving(site) as endpoint:
        assert find(HF_ENDPOINT=endpoint)[0] == str(snapshot)
    assert site.fetched == ["tokenizer_config.json"]


GGUF = {
    "tiny-Q4_K_M.gguf": b"4" * 500,
    "tiny-UD-Q4_K_M.gguf": b"u" * 500,
    "tiny-Q8_0-00001-of-00002.gguf": b"8" * 500,
    "tiny-Q8_0-00002-of-00002.gguf": b"8" * 300,
    "BF16/tiny-00001-of-00001.gguf": b"b" * 500,
    "mmproj-F16.gguf": b"images",
    "tiny [1]-Q5_K_M.gguf": b"5" * 500,
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"]),
        ("bf16", ["BF16/tiny-00001-of-00001.gguf"]),
        ("F16", []),
        ("K_M", ["tiny-Q4_K_M.gguf"]),
        ("Q4", []),
        (".*", []),
    ],
)
def test_gguf_files_are_chosen_by_what_their_names_have(wanted: str, found: list[str]) -> None:
    assert hub.gguf_files(GGUF, wanted) == found


def test_gguf_files_in_the_cache_are_found_whole(tmp_path: Path, find: Find) -> None:
    snapshot = make_cache(tmp_path / "home" / "hub", GGUF)
    assert find(model=f"{MODEL}:Q4_K_M", HF_HUB_OFFLINE="1") == (str(snapshot / "tiny-Q4_K_M.gguf"), "")
    first = snapshot / "tiny-Q8_0-00001-of-00002.gguf"
    assert find(model=f"{MODEL}:q8_0", HF_HUB_OFFLINE="1") == (str(first), "")
    first.with_name("tiny-Q8_0-00002-of-00002.gguf").unlink()
    assert "has no whole q8_0 in the cache" in find(model=f"{MODEL}:q8_0", HF_HUB_OFFLINE="1")[1]


# Over the network.


def test_one_gguf_model_is_downloaded_and_nothing_else(find: Find) -> None:
    # What has no format in its name is named by all of it.
    plain = {f"sub/plain-0000{n}-of-00002.gguf": b"p" * 500 for n in (1, 2)}
    site = Hub(MODEL, GGUF | OTHERS | plain)
    with serving(site) as endpoint:
        found, said = find(model=f"{MODEL}:Q8_0", HF_ENDPOINT=endpoint)
        shards = {name: content for name, content in GGUF.items() if "Q8_0" in name}
        assert sorted(site.fetched) == sorted(shards), "each once"
        assert Path(found).name == "tiny-Q8_0-00001-of-00002.gguf"
        assert all((Path(found).parent / name).read_bytes() == content for name, content in shards.items())
        assert f"quire: downloading {MODEL} from 127.0.0.1:" in said and "100% downloaded" in said
        _, said = find(model=f"{MODEL}:Q2_K", HF_ENDPOINT=endpoint)
        assert f"{MODEL} has no GGUF file Q2_K: it has BF16, Q4_K_M, Q5_K_M, Q8_0, UD-Q4_K_M, plain" in said
        printed = said.partition("it has ")[2].strip().split(", ")
        for name in printed:
            assert is_hub_model(f"{MODEL}:{name}"), "what is printed can be typed"
            assert Path(find(model=f"{MODEL}:{name}", HF_ENDPOINT=endpoint)[0]).is_file()
        other, _ = find(model=f"{MODEL}:Q5_K_M", HF_ENDPOINT=endpoint)
        assert Path(other).read_bytes() == b"5" * 500, "a name is no pattern"
        _, said = find(HF_ENDPOINT=endpoint)
        assert f"{MODEL} has GGUF files: name one of them, such as {MODEL}:Q4_K_M; it has BF16" in said
    assert find(model=f"{MODEL}:Q8_0", HF_HUB_OFFLINE="1") == (found, "")
    assert find(model=f"{MODEL}:Q8_0", HF_ENDPOINT=NOBODY) == (found, "")


@pytest.mark.parametrize("weights", [pytest.param(WEIGHTS, marks=pytest.mark.thorough), SHARDS, OF_GPTQ])
def test_a_model_is_downloaded_and_nothing_else(find: Find, weights: dict[str, bytes]) -> None:
    site = Hub(MODEL, SMALL | weights | OTHERS)
    with serving(site) as endpoint:
        found, said = find(HF_ENDPOINT=endpoint)
        assert {name: (Path(found) / name).read_bytes() for name in names_in(found)} == SMALL | weights
        assert sorted(site.fetched) == sorted(SMALL | weights), "each once"
        assert f"quire: downloading {MODEL} from 127.0.0.1:" in said
        assert [line for line in said.splitlines() if "%" in line][-1] == "quire: 100% downloaded"
        assert Path(found).name == COMMIT
    # It is in the cache now, under the names by which it was asked for.
    assert find() == (found, "")
    assert find(revision=COMMIT, HF_HUB_OFFLINE="1") == (found, "")


@pytest.mark.parametrize("missing", ["", "tokenizer.json"])
def test_what_a_tokenizer_json_is_made_from_is_fetched_if_there_is_none(find: Find, missing: str) -> None:
    others = {"tokenizer.model": b"pieces", "tekken.json": b"ranks"}
    small = {name: content for name, content in SMALL.items() if name != missing}
    site = Hub(MODEL, small | WEIGHTS | others)
    with serving(site) as endpoint:
        find(HF_ENDPOINT=endpoint)
    assert sorted(site.fetched) == sorted(small | WEIGHTS | (others if missing else {}))


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((404, "RepoNotFound"), "is no directory here, and not on 127.0.0.1:"),
        ((401, "RepoNotFound"), "is no directory here, and not on 127.0.0.1:"),
        ((401, ""), "answered 401, so HF_TOKEN must be a token that may read it"),
        ((403, "GatedRepo"), "is gated: accept its terms on 127.0.0.1:"),
        ((404, "RevisionNotFound"), "the model has no such revision"),
        ((410, ""), "answered 410"),
    ],
)
def test_a_refusal_is_told_in_a_line(find: Find, refusal: tuple[int, str], said: str) -> None:
    with serving(Hub(MODEL, SMALL | WEIGHTS, refusal=refusal)) as endpoint:
        found, lines = find(HF_ENDPOINT=endpoint)
    assert found == "" and lines.startswith(f"quire: {MODEL}") and lines.count("\n") == 1
    assert said in lines


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (SMALL | {"pytorch_model.bin": b"p"}, "its weights are pickles only, which run code"),
        (SMALL | {"consolidated.00.pth": b"p"}, "its weights are pickles only, which run code"),
        (SMALL | {"pytorch_model.bin": b"p"}, "`hf download` it and convert it as docs/models.md says"),
        (SMALL, "it has no model*.safetensors"),
        (SMALL | {"a.safetensors": b"a", "b.safetensors": b"b"}, "it has no model*.safetensors"),
        (SMALL | {"consolidated.safetensors": b"c"}, "it has no model*.safetensors"),
        (SMALL | {"model.gguf": b"g"}, "has GGUF files: name one of them, such as org/model:Q4_K_M"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}, "it is a LoRA adapter (PEFT)"),
        (WEIGHTS, "it has no config.json"),
    ],
)
def test_what_cannot_be_served_is_told(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(hub.HubError, match=re.escape(said)):
        hub._check_can_be_served(MODEL, {name: len(content) for name, content in files.items()})


def test_a_token_is_shown_to_the_hub_and_to_nobody_else(find: Find) -> None:
    site = Hub(MODEL, SMALL | WEIGHTS)
    with serving(site) as endpoint:
        _, said = find(HF_ENDPOINT=endpoint, HF_TOKEN="hf_secret")
    assert site.authorizations == {"Bearer hf_secret"}
    assert all(MODEL in request for request in site.requests), "nothing but the model is asked for"
    assert "secret" not in said
