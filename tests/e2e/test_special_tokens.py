"""Tokens that only tokenizer_config.json has, through a real gateway: in prompts, as ends, in refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from quire import Chunk, Client, item
from quire.errors import InvalidRequest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.chat_templates import QWEN, byte_tokenizer
from tests.http_gateway import HttpGateway
from tests.model_factory import TinyModel, make_model

# Of 256 tokens, which are bytes.
START, STOP, END, IMAGE = 256, 257, 258, 259
SPECIAL = {START: "<|im_start|>", STOP: "<|im_end|>", END: "<|endoftext|>", IMAGE: "<image_soft_token>"}
TEXT = "<|im_start|>user\n" + "hi, you " * 8 + "<|im_end|>\n"
LENGTH = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary lacks the token for images, and no config names an end token."""
    directory = make_model(tmp_path_factory.mktemp("model") / "talker", TinyModel(vocab_size=IMAGE))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(16)
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {str(token_id): {"content": text, "special": True} for token_id, text in SPECIAL.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": QWEN, "added_tokens_decoder": added,
        "eos_token": SPECIAL[END],
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[HttpGateway]:
    flags = ["--dtype", "float32", "--kv-pages", "64"]
    with HttpGateway(model=str(model), flags=flags) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: HttpGateway) -> Iterator[Client]:
    with Client(gateway.address) as client:
        yield client


@pytest.fixture
def http(gateway: HttpGateway) -> Iterator[Any]:
    with gateway.client() as http:
        yield http


def run(client: Client, *tokens: int, **settings: Any) -> Chunk:
    """A sample of these tokens alone, as one chunk."""
    asked = item([1], max_tokens=LENGTH, **settings)
    asked.constraint.mask.allowed.ids.extend(tokens)
    chunks = list(client.execute([asked]))
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
    )


def test_the_tokenizer_is_that_of_transformers(client: Client, model: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(model)
    expected = theirs(TEXT)["input_ids"]
    assert len(expected) > 16 and {START, STOP} <= set(expected)
    tokenizer = client.tokenizer()
    assert tokenizer.encode(TEXT) == expected
    info = client.model_info(include_tokenizer=True)
    assert Tokenizer.from_buffer(info.tokenizer_json).encode(TEXT).ids == expected
    # What the server itself encodes.
    chunks = list(client.execute(TEXT, max_tokens=1))
    assert chunks[-1].usage is not None and chunks[-1].usage.input_tokens == len(expected)


def test_a_chat_is_as_long_as_in_transformers(http: Any, model: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(model)
    messages: Any = [{"role": "user", "content": "What is 2 < 3?"}]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = http.chat.completions.create(model="local", messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(prompt)


def test_the_tokenizers_end_token_ends_a_sample(gateway: HttpGateway, client: Client) -> None:
    chunk = run(client, END)
    assert (list(chunk.token_ids), chunk.text) == ([END], "")
    assert (chunk.finish_reason, chunk.stop) == ("stop", "")
    assert len(run(client, END, ignore_eos=True).token_ids) == LENGTH
    assert list(client.model_info().model.eos_token_ids) == [END]
    assert client.tokenizer().end_ids == {END}
    assert f"token {END} ends a text" in gateway.log()


def test_a_stop_text_that_is_a_special_token_ends_a_sample(client: Client) -> None:
    chunk = run(client, STOP, stop=["nowhere", SPECIAL[STOP]])
    assert (list(chunk.token_ids), chunk.text) == ([STOP], "")
    assert (chunk.finish_reason, chunk.stop) == ("stop", SPECIAL[STOP])
    # Without it the token has no text and ends nothing.
    other = run(client, STOP, stop=["nowhere"])
    assert (len(other.token_ids), other.text) == (LENGTH, "")
    # A model can also write it with other tokens.
    letter = byte_tokenizer().encode("x").ids[0]
    assert run(client, letter, stop=["xx"]).stop == "xx"
    assert run(client, STOP, stop=[SPECIAL[STOP]], ignore_eos=True).stop == SPECIAL[STOP]


def test_a_stop_token_of_a_constraint_is_allowed_where_it_ends(client: Client) -> None:
    asked = item([1], max_tokens=LENGTH, stop=[SPECIAL[STOP]], ignore_eos=True)
    asked.constraint.regex = "x+"
    asked.sampling.logit_bias[STOP] = 100
    chunks = list(client.execute([asked]))
    assert "".join(chunk.text for chunk in chunks) == "x" and chunks[-1].stop == SPECIAL[STOP]


@pytest.mark.parametrize("settings", [{"stop": "<|im_end|>"}, {"extra_body": {"stop_token_ids": [STOP]}}])
def test_http_takes_both(http: Any, settings: dict[str, Any]) -> None:
    shared = {"model": "local", "max_tokens": LENGTH, "temperature": 0, "logit_bias": {str(STOP): 100}}

    def ask(**more: Any) -> tuple[str, str, int]:
        made = http.completions.create(prompt="hi", **shared, **more)
        return made.choices[0].text, made.choices[0].finish_reason, made.usage.completion_tokens

    assert ask() == ("", "length", LENGTH)
    assert ask(**settings) == ("", "stop", 1)


def test_a_token_beyond_the_vocabulary_is_refused(client: Client, http: Any) -> None:
    text = f"a {SPECIAL[IMAGE]}"
    for prompt, field in ((text, "text"), ([{"role": "user", "content": text}], "chat")):
        with pytest.raises(InvalidRequest) as refused:
            client.generate(prompt, max_tokens=1)
        assert refused.value.reason == "TOKEN_OUT_OF_VOCAB"
        assert any(field in name for name, _ in refused.value.violations)
    with pytest.raises(openai.BadRequestError) as caught:
        http.chat.completions.create(model="local", messages=[{"role": "user", "content": text}])
    assert (caught.value.code, caught.value.param) == ("token_out_of_vocab", "messages")
    with pytest.raises(InvalidRequest) as refused:
        client.prefill(client.tokenizer().encode(text))
    assert (refused.value.reason, refused.value.code) == (
        "TOKEN_OUT_OF_VOCAB",
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    # A stop text may be such a token: the model cannot choose it.
    assert len(run(client, STOP, stop=[SPECIAL[IMAGE]]).token_ids) == LENGTH
