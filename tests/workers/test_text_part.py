"""The text part of a multimodal checkpoint computes what the library's whole model does of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.bad_directories import setting
from tests.families import settings_of
from tests.model_factory import load_decoder, make_family_model, rewrite
from tests.tiny_types import small_model
from tests.workers.test_gguf_models import logits
from workers.executors.loading import AUTO, NATIVE, choose_backend, load_served
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.self_check import check_parity


def assert_serves(directory: Path, whole: PreTrainedModel, backend: str) -> None:
    """Prefills, chunks and decodes over pages; without the weights of the other parts."""
    choice = choose_backend(directory, "auto")
    assert choice.backend == backend, choice.reason
    options = directory, "float32", torch.device("cpu"), None
    model, description = load_served(*options, backend=backend, self_check=True)
    check_parity(
        model,
        lambda tokens: whole(input_ids=tokens[None], use_cache=False).logits[0],
        what="the text part",
        vocab_size=description.vocab_size,
        max_seq_len=description.max_seq_len,
    )
    parts = [name for name in dict(whole.named_parameters()) if "vis" not in name and "projector" not in name]
    assert description.num_parameters == sum(whole.get_parameter(name).numel() for name in parts)


# Each is tried with all that the library has by .ci/types_page.py.
@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("llava", "native"),
        ("mistral3", "native"),
        ("qwen2_5_vl", "native"),
        ("qwen3_vl", "native"),
        ("qwen3_vl_moe", "native"),
        ("llama4", "transformers"),
        ("qwen3_5", "native"),
    ],
)
def test_a_model_that_sees_reads_texts(
    model_type: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = small_model(model_type)
    whole.save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        assert_serves(tmp_path, whole, backend)
    assert f"only the text part of {model_type} is served" in caplog.text  # whoever sends images looks there


@pytest.mark.parametrize("whole_is_tied", [True, False])
def test_a_head_that_is_not_there_is_tied_if_either_part_says_so(whole_is_tied: bool, tmp_path: Path) -> None:
    """Version 4 of the library went by the text part, whatever the whole says."""
    small_model("internvl").save_pretrained(tmp_path)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    settings, tensors = json.loads(config.read_text()), load_file(file)
    settings["tie_word_embeddings"] = whole_is_tied
    settings["text_config"]["tie_word_embeddings"] = not whole_is_tied
    config.write_text(json.dumps(settings))
    heads = {name for name in tensors if "lm_head" in name}
    save_file({name: tensor for name, tensor in tensors.items() if name not in heads}, file)
    decoder = load_decoder(tmp_path)
    assert decoder.config.tie_word_embeddings
    embedding = next(tensor for name, tensor in tensors.items() if "embed_tokens" in name)
    save_file(tensors | {"language_model.lm_head.weight": embedding.flip(0).contiguous()}, file)
    assert not load_decoder(tmp_path).config.tie_word_embeddings


def test_the_first_checkpoints_of_qwen_vl(tmp_path: Path) -> None:
    """Whose settings of texts are beside the others, and whose rotation has a type of its own."""
    whole = small_model("qwen2_5_vl")
    whole.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    text = settings.pop("text_config")
    rope = {"type": "mrope", "mrope_section": text["rope_parameters"]["mrope_section"]}
    flat = text | settings | {"rope_scaling": rope, "rope_theta": text.pop("rope_parameters")["rope_theta"]}
    flat.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    rewrite(
        tmp_path,
        lambda tensors: {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
            for name, tensor in tensors.items()
        },
    )
    assert_serves(tmp_path, whole, "native")


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen2_5_vl", "qwen3_vl"])
def test_the_settings_of_the_text_alone(model_type: str, tmp_path: Path) -> None:
    """Tools that remove experts write these, and leave the names of the tensors as they were."""
    whole = small_model(model_type)
    whole.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text_config = json.loads(config.read_text())["text_config"]
    if model_type == "qwen2_5_vl":  # as its first checkpoints say it
        text_config["rope_parameters"] = text_config["rope_parameters"] | {"rope_type": "mrope"}
    config.write_text(json.dumps(text_config))
    rewrite(tmp_path, lambda tensors: {name: one for name, one in tensors.items() if "visual." not in name})
    choice = choose_backend(tmp_path, "auto")
    assert choice.backend == "native", choice.reason
    load_served(tmp_path, "float32", torch.device("cpu"), None, backend="native", self_check=True)


def test_a_base_model_that_sees(tmp_path: Path) -> None:
    whole: Any = small_model("qwen3_vl")
    whole.base_model.save_pretrained(tmp_path)
    whole.get_output_embeddings().weight = whole.get_input_embeddings().weight
    setting(tie_word_embeddings=True)(tmp_path)
    assert_serves(tmp_path, whole, "native")


def test_the_other_parts_may_be_quantised_in_any_way(tmp_path: Path) -> None:
    """As bitsandbytes has Qwen2.5-VL's, whose rows of 3,420 are no whole groups here."""
    whole = small_model("llava")
    whole.save_pretrained(tmp_path)
    setting(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})(tmp_path)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [16, 3420], "dtype": "bfloat16"}
    place = "model.vision_tower.blocks.0.mlp.down_proj.weight"
    quantised = {
        place: torch.zeros(16 * 3420 // 2, 1, dtype=torch.uint8),
        f"{place}.absmax": torch.ones(855),
        f"{place}.quant_map": torch.zeros(16),
        f"{place}.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()]).byte(),
    }
    rewrite(tmp_path, lambda tensors: tensors | quantised)
    assert_serves(tmp_path, whole, "native")


def test_experts_as_qwen_publishes_them(tmp_path: Path) -> None:
    """All of a layer in one tensor, with inputs before outputs, which the library turns as it reads them."""
    whole = small_model("qwen3_vl_moe")
    whole.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            name: one.transpose(1, 2) if ".experts." in name else one for name, one in tensors.items()
        },
    )
    assert_serves(tmp_path, whole, "native")


def test_the_text_part_of_gemma_3n(tmp_path: Path) -> None:
    """Whose other parts the library makes with packages that are not installed here."""
    text = small_model("gemma3n_text")
    text.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": settings}))
    others = {f"model.{part}.weight": torch.zeros(3) for part in ("vision_tower.x", "embed_audio.y")}
    rewrite(
        tmp_path,
        lambda tensors: (
            others
            | {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
        ),
    )
    assert_serves(tmp_path, text, "transformers")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("t5", "model_type: t5 is an encoder with a decoder, but only decoders are supported"),
        ("bert", "is_decoder: false makes this bert an encoder, but only decoders are supported"),
        ("paligemma", "model_type: paligemma is no causal language model, nor a multimodal one"),
    ],
)
def test_what_is_no_decoder_is_refused_by_name(model_type: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=why) as refused:
        choose_backend(tmp_path, "auto")
    assert f"there is no native code for '{model_type}'" in str(refused.value)


@pytest.mark.parametrize(("model_type", "same"), [("kimi_k2", "deepseek_v3"), ("mimo", "qwen2")])
def test_a_model_that_computes_as_another_is_served_as_that(
    model_type: str, same: str, tmp_path: Path
) -> None:
    """Kimi K2 and MiMo, whose types the library does not know; also with layers that predict more tokens."""
    directory = make_family_model(tmp_path / "model", *settings_of(same))
    tokens = [3, 5, 96, 4, 40]
    expected = logits(load_decoder(directory, "float32", pack=True), tokens)
    setting(model_type=model_type)(directory)
    if model_type == "mimo":
        more = {"model.mtp_layers.0.input_proj.weight": torch.ones(4, 4)}
        rewrite(directory, lambda tensors: tensors | more)
    choice = choose_backend(directory, AUTO)
    assert choice.backend == NATIVE
    decoder, _ = load_served(
        directory, "float32", torch.device("cpu"), None, backend=choice.backend, self_check=True
    )
    assert isinstance(decoder, Decoder)
    assert torch.equal(logits(decoder, tokens), expected)
