"""The transformers backend: whatever the batches over pages, the logits are those of the plain forward."""

from __future__ import annotations

import functools
import json
import random
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.bad_directories import setting
from tests.families import some
from tests.model_factory import float32_losses, rewrite
from tests.recurrent import RECURRENT
from tests.tiny_types import VOCAB, tiny_config, tiny_model
from tests.workers.packing import (
    new_packer,
    poisoned_pages,
    random_texts,
    rows_in_chunks,
    rows_of_trees,
)
from workers.executors.loading import TRANSFORMERS, load_served
from workers.models.errors import ModelError
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.library_model import EAGER, LibraryModel
from workers.models.library.loading import (
    load_library_model,
    make_library_model,
    plan_library_model,
)
from workers.models.library.parity_check import check_loaded, check_scaled_down
from workers.models.library.settings import LibrarySettings, read_settings
from workers.models.model import ModelDescription
from workers.models.values import warn_outside

CPU = torch.device("cpu")
# float32 with sums of a few hundred terms over a few layers: about ten times what is measured.
RELATIVE_ERROR = 1e-5

RUN = """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe llama llama4_text
    mimo_v2_flash minicpm3 minimax_m2 ministral mistral mixtral modernbert-decoder nanochat nemotron
    olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 stablelm starcoder2 vaultgemma
"""

# With attention of their own, or an index of keys: these run text by text.
GATHERED = """
    bloom codegen deepseek_v32 deepseek_v4 diffllama falcon gpt_neo gpt_neox_japanese glm_moe_dsa gptj mpt
    openai-gpt xglm
"""
# Each token has several hidden rows between its layers.
WITHOUT_HIDDEN_STATES = "deepseek_v4"

# Each has something that others have not: biases of scores, or positions, where texts run one by one;
# windows, latent keys, caps, learned positions, one head of keys, sinks, experts of attention, chunks,
# an index, what is compressed, no cache.
ALWAYS = """
    bloom cohere2 deepseek_v3 deepseek_v4 gemma2 glm_moe_dsa gpt_bigcode gpt_neo gpt_oss jetmoe llama4_text
    openai-gpt
"""
# Of those with recurrent layers: attention and Mamba in one layer, convolutions, the delta rule; a state in a
# cache of the model's own class, in its modules, in a list.
ALWAYS_RECURRENT = "falcon_h1 lfm2 minimax qwen3_next recurrent_gemma rwkv"
# With random weights its gates, square roots of numbers around 0, lose more than rounding explains elsewhere:
# `test_recurrent_engine` runs it.
LOSSY = "qwen4_exp_text"


def check_over_pages(model: LibraryModel) -> None:
    """Texts that grow by random chunks in shared batches over NaN, and trees, are as the library has them."""
    dice = random.Random(0)
    texts = random_texts(0, (1, 17, 50, 70))
    text_config = model.module.config.get_text_config(decoder=True)
    layers = text_config.num_hidden_layers if model.has_hidden_states else None
    in_chunks = rows_in_chunks(model, texts, poisoned_pages(model), new_packer(0), dice, layers)
    for text, rows, losses in zip(texts, in_chunks, losses_of(model, texts), strict=True):
        with model._use_attention(EAGER), torch.inference_mode():
            plain = model.module(
                torch.tensor([text]), use_cache=False, output_hidden_states=layers is not None
            )
        expected = [*(plain.hidden_states or ()), plain.logits]
        for (layer, position), row in rows.items():
            assert (row - expected[layer][0, position]).abs().max() < losses[layer], (layer, position)
    if model.takes_trees:
        paths = rows_of_trees(model, poisoned_pages(model), new_packer(1))
        for (path, found), losses in zip(paths, losses_of(model, [path for path, _ in paths]), strict=True):
            expected_rows = model.plain_logits(torch.tensor(path))[-len(found) :]
            assert (found - expected_rows).abs().max() < losses[-1]


def losses_of(model: LibraryModel, texts: Sequence[list[int]]) -> torch.Tensor:
    with model._use_attention(EAGER):
        return float32_losses(model.module, texts, with_states=model.has_hidden_states)


@pytest.mark.parametrize("model_type", some((RUN + GATHERED).split(), ALWAYS.split()))
def test_a_family_over_pages_computes_what_the_library_does(model_type: str) -> None:
    model = make_library_model(tiny_model(model_type))
    assert isinstance(model, GatheredModel) == (model_type in GATHERED.split())
    assert model.has_hidden_states == (model_type not in WITHOUT_HIDDEN_STATES.split())
    check_over_pages(model)


@pytest.mark.parametrize(
    "model_type",
    some(sorted(RECURRENT.keys() - {LOSSY}), ALWAYS_RECURRENT.split()),
)
def test_a_family_with_recurrent_layers_computes_what_the_library_does(model_type: str) -> None:
    model = make_library_model(tiny_model(model_type, **RECURRENT[model_type]))
    assert isinstance(model, GatheredModel) and model.state_shapes and model.has_hidden_states
    check_over_pages(model)


def test_what_rounding_hides_in_logits_is_still_no_state_to_go_on_from() -> None:
    """RecurrentGemma's convolution begins anew in a forward of several tokens, whatever the weights.

    With these ones, and in half precision, the logits are hardly others.
    """
    torch.manual_seed(0)
    config = tiny_config("recurrent_gemma")
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model = make_library_model(module)
    later: list[int] = []
    module.register_forward_pre_hook(
        lambda _, __, asked: later.extend([asked["input_ids"].numel()] * bool(asked["position_ids"].min())),
        with_kwargs=True,
    )
    texts = random_texts(0, (50,))
    rows_in_chunks(model, texts, poisoned_pages(model), new_packer(0), random.Random(0), None)
    assert set(later) == {1}


def test_a_packed_model_runs_text_by_text_as_well() -> None:
    """Two ways to the same logits."""
    check_over_pages(GatheredModel(tiny_model("gemma2")))


@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_a_model_that_hands_out_none_is_served_without(model_type: str) -> None:
    """And it is known that it has none."""
    module = tiny_model(model_type)
    plain = module.forward

    @functools.wraps(plain)
    def forward(*inputs: Any, **asked: Any) -> Any:
        if asked.pop("output_hidden_states", None):
            raise TypeError("unexpected keyword argument")
        return plain(*inputs, **asked)

    module.forward = forward
    model = make_library_model(module)
    assert not model.has_hidden_states
    check_over_pages(model)


def directory_of(model_type: str, directory: Path, **more: Any) -> Path:
    """A sharded checkpoint."""
    more = RECURRENT.get(model_type, {}) | more
    tiny_model(model_type, **more).save_pretrained(directory, max_shard_size="60KB")
    return directory


# One with tied weights, one whose experts are stacked while loading, one with biases and fused projections;
# one with recurrent layers, whose config has an infinity.
@pytest.mark.parametrize(
    "model_type", ["cohere", "mixtral", "gpt2", "bloom", "deepseek_v3", "granitemoehybrid"]
)
def test_a_directory_is_the_model_it_was_saved_from(model_type: str, tmp_path: Path) -> None:
    directory = directory_of(model_type, tmp_path)
    told: list[tuple[int, int]] = []
    plan = plan_library_model(directory)
    model, description = load_library_model(plan, lambda *both: told.append(both))
    tokens = torch.tensor([5, 9, 2, 77, 30])
    with torch.inference_mode():
        expected = tiny_model(model_type, **RECURRENT.get(model_type, {}))(
            input_ids=tokens[None], use_cache=False
        ).logits[0]
    assert torch.allclose(model.plain_logits(tokens), expected, rtol=0, atol=1e-4)
    assert told[-1][0] == told[-1][1] and [done for done, _ in told] == sorted(done for done, _ in told)
    assert description.vocab_size == VOCAB and description.eos_token_ids == (2,)
    assert load_checked(directory).fingerprint == description.fingerprint
    scaled_down = check_scaled_down(directory, plan.settings)
    assert scaled_down is not None
    assert max(scaled_down, check_loaded(directory, model, description)) < RELATIVE_ERROR


def test_an_end_token_outside_the_vocabulary_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = directory_of("gpt2", tmp_path)
    for file in (directory / "config.json", directory / "generation_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": VOCAB}))
    warn_outside.cache_clear()
    assert load_checked(directory).eos_token_ids == ()
    assert f"eos_token_id {VOCAB} is outside the vocabulary of {VOCAB} tokens" in caplog.text


def test_bfloat16_is_within_its_rounding(tmp_path: Path) -> None:
    directory = directory_of("mixtral", tmp_path)
    model, description = load_library_model(plan_library_model(directory, "bfloat16"))
    assert model.dtype == torch.bfloat16
    assert 1e-4 < check_loaded(directory, model, description) < 0.0625


def load_checked(directory: Path) -> ModelDescription:
    """Load with all checks, as a worker does."""
    return load_served(directory, "auto", CPU, None, backend=TRANSFORMERS, self_check=True)[1]


def refusal(directory: Path) -> str:
    """Why it is refused."""
    with pytest.raises(ModelError) as caught:
        load_checked(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bert", "is_decoder: false makes this bert an encoder"),
        ("electra", "is_decoder: false makes this electra an encoder"),
        ("xlm", "causal: must be true, since only decoders are supported"),
        ("cpmant", "layer 0 stores more than a key and a value of each token"),
        ("t5", "t5 is an encoder with a decoder"),
        ("vit", "vit is no causal language model"),
    ],
)
def test_what_cannot_run_is_refused_by_name(model_type: str, why: str, tmp_path: Path) -> None:
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        tiny_model(model_type).save_pretrained(tmp_path)
    else:
        tiny_config(model_type).save_pretrained(tmp_path)
    assert re.search(why, refusal(tmp_path))


ONE_NAN = torch.tensor([0.0] * 4095 + [torch.nan]).view(64, 64)


@pytest.mark.parametrize(
    ("part", "tensor", "why"),
    [
        ("q_proj", None, r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is missing"),
        ("ghost", torch.zeros(2), r"tensor model.*\.ghost\.weight is not part of this cohere model"),
        ("q_proj", torch.zeros(64, 32), r"has shape \[64, 32\], but the config asks for \[64, 64\]"),
        ("q_proj", ONE_NAN, r"tensor .*q_proj\.weight is not finite as float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    part: str, tensor: torch.Tensor | None, why: str, tmp_path: Path
) -> None:
    tiny_model("cohere").save_pretrained(tmp_path)
    name = f"model.layers.1.self_attn.{part}.weight"
    more = {} if tensor is None else {name: tensor}
    rewrite(tmp_path, lambda found: {each: found[each] for each in found.keys() - {name}} | more)
    assert re.search(why, refusal(tmp_path))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 4096, got 1000000000"),
        ({"hidden_size": 1 << 30}, "hidden_size: must be at most"),
        ({"vocab_size": 1 << 40}, "vocab_size: must be at most"),
        ({"num_hidden_layers": 4000}, "the config asks for more than .* parameters"),
        ({"vocab_size": 1 << 23}, "the config asks for .* weights, but the files have"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised: .*gptq\): bits: must be"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: must be at least 2, got -1"),
        ({"is_causal": False}, "is_causal: must be true"),
        ({"layer_norm_eps": "small"}, r"field 'layer_norm_eps': TypeError: .*(expected|got)"),
        ({"model_type": "nothing"}, "model_type: 'nothing' is not known to the transformers library"),
        ({"hidden_act": "nothing"}, "the transformers library cannot .*nothing"),
        ({"num_attention_heads": "four"}, "the transformers library cannot read the config"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    tiny_model("cohere").save_pretrained(tmp_path)
    setting(**settings)(tmp_path)
    said = refusal(tmp_path)
    assert re.search(why, said) and "\n" not in said


def test_code_of_a_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where its code is; the library's own is used, and nothing is asked of a network."""

    def refuse(*_: object) -> None:
        raise SystemExit("a network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    directory = directory_of("cohere", tmp_path)
    (directory / "code.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    setting(auto_map=auto_map)(directory)
    assert load_checked(directory).architecture == "cohere"


def test_experts_of_which_a_token_goes_through_none_are_refused(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    setting(num_experts_per_tok=0)(tmp_path)
    assert "num_experts_per_tok: must be at least 1, got 0" in refusal(tmp_path)


def test_a_model_whose_tokens_see_those_that_follow_is_refused(tmp_path: Path) -> None:
    tiny_model("gemma3_text", use_bidirectional_attention=True).save_pretrained(tmp_path)
    assert "use_bidirectional_attention: must be false" in refusal(tmp_path)


SMALLEST: dict[str, Any] = {"model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 64}


def read(directory: Path, config: dict[str, Any]) -> LibrarySettings:
    (directory / "config.json").write_text(json.dumps(config))
    return read_settings(directory)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_max_length": 10**30},
        {"model_max_length": 1e30},
        {"training": {"tokens_seen": 3 * 10**12}},
        {"num_labels": 10**9},  # the library would make a table of them
    ],
)
def test_a_name_that_the_library_does_not_know_is_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, SMALLEST | settings)
    assert found.vocab_size == 97 and len(found.config.id2label or ()) < 10
    assert found.digest != read(tmp_path, SMALLEST).digest


@pytest.mark.parametrize("longest", [10 * 2**20, 100 * 2**20])
def test_long_texts_are_no_size(longest: int, tmp_path: Path) -> None:
    assert read(tmp_path, SMALLEST | {"max_position_embeddings": longest}).max_position_embeddings == longest


def test_the_same_of_a_part(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 10 * 2**20, "vocab_size": 97, "model_max_length": 10**30}
    found = read(tmp_path, {"model_type": "llama4", "text_config": text})
    assert (found.max_position_embeddings, found.vocab_size) == (10 * 2**20, 97)


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        (
            "gpt_neox",
            {"max_position_embeddings": 10**12},
            "max_position_embeddings: must be at most 134217728",
        ),
        ("gpt2", {"n_positions": 1 << 25}, "n_positions: must be at most 16777216"),
        ("mpt", {"max_seq_len": 1 << 25}, "max_seq_len: must be at most 16777216"),
        ("llama4", {"text_config": {"hidden_size": 1 << 30}}, "hidden_size: must be at most 1048576"),
        ("mllama", {"vision_config": {"image_size": 1 << 30}}, "image_size: must be at most"),
        ("gpt_neox", {"partial": 10**400}, "partial: must be at most"),
        ("gpt_neox", {"rope_parameters": {"factor": 10**30}}, "factor: must be at most"),
    ],
)
def test_what_would_be_built_is_refused(
    model_type: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        read(tmp_path, {"model_type": model_type} | settings)
