"""Train a head for multi-token prediction for the shipped storyteller, to measure what such a head gains.

No checkpoint with a trained head is small enough to be at hand, and the storyteller's family has none. So the
storyteller is written as a Qwen3.5 model that computes the same: gates of attention that are one half, norms
less one. Behind its layers are others that add nothing, and each MLP has more columns of zeros, so that the
head takes as small a part of a step's time as in real checkpoints.

    .venv/bin/python .ci/train_head.py build/storyteller-mtp
    .venv/bin/python -m benchmarks.speculation --model build/storyteller-mtp

Dimension letters: B rows of a batch; S tokens of its longest row; C hidden width.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from train_storyteller import EVALUATION_SEED, SEED, STORYTELLER, WARM_UP_STEPS, Rows
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

LAYERS, MLP_WIDTH = 28, 3072
# Tokens that are drafted one after another in training.
DEPTH = 3
STEPS, MATRIX_RATE, GAIN_RATE = 500, 0.02, 5e-3


class Head(nn.Module):
    """As `workers.models.mtp_head`, by the names of a checkpoint below `mtp.`."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        """It begins with the model's last layer, and with the sum of what it gets."""
        super().__init__()
        width, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.fc.weight.data.copy_(torch.eye(width).repeat(1, 2))
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps)
        self.layers = nn.ModuleList([copy.deepcopy(model.model.layers[-1])])
        self.norm = copy.deepcopy(model.model.norm)

    def forward(self, embedded: torch.Tensor, before: torch.Tensor, rotary: nn.Module) -> torch.Tensor:
        """[B, S, C] rows of tokens, of their embeddings and of the hidden rows before them."""
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)
        x = self.fc(torch.cat(both, dim=-1))
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotations = rotary(x, torch.arange(count)[None])
        out = self.layers[0](x, attention_mask=mask, position_embeddings=rotations)
        rows: torch.Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return rows


def converted() -> Qwen3_5ForCausalLM:
    """The storyteller as a Qwen3.5."""
    config = json.loads((STORYTELLER / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    settings = {name: value for name, value in config.items() if hasattr(Qwen3_5TextConfig, name)}
    settings["model_type"] = Qwen3_5TextConfig.model_type
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings, attn_implementation="eager"))
    tensors = {}
    for name, tensor in load_file(STORYTELLER / "model.safetensors").items():
        tensors[name] = tensor.float()
        if "norm" in name:
            tensors[name] -= 1
        elif name.endswith("o_proj.weight"):
            tensors[name] *= 2
        elif name.endswith("q_proj.weight"):
            by_head = tensors[name].unflatten(0, (-1, config["head_dim"]))  # [heads, head_dim, C]
            tensors[name] = torch.cat((by_head, torch.zeros_like(by_head)), dim=1).flatten(0, 1)
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing
    return model.requires_grad_(requires_grad=False)


def drafted(model: Any, head: Head, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden rows of the model, [B, S, C], and those of the head: n tokens behind the first S - n - 1."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    rows, found = hidden, []
    for depth in range(1, DEPTH + 1):
        embedded = model.model.embed_tokens(ids[:, depth:])
        rows = head(embedded, rows[:, :-1], model.model.rotary_emb)
        found.append(rows[:, :-1])
    return hidden, found


def train(model: Qwen3_5ForCausalLM, tokenizer: Any, steps: int) -> Head:
    """A head that is trained on the storyteller's texts. The model does not change."""
    head = Head(model)
    matrices = [p for p in head.parameters() if p.dim() == 2]
    gains = [p for p in head.parameters() if p.dim() == 1]
    optimizers: list[tuple[Any, float]] = [
        (torch.optim.Muon(matrices, weight_decay=0.01), MATRIX_RATE),
        (torch.optim.AdamW(gains, betas=(0.9, 0.97), weight_decay=0.0), GAIN_RATE),
    ]
    batches = Rows(tokenizer, SEED + 1).batches()
    for step in range(1, steps + 1):
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / WARM_UP_STEPS, 0.02 + 2.5 * (1 - step / steps))
        ids, weights = next(batches)
        loss = torch.zeros(())
        for depth, rows in enumerate(drafted(model, head, ids)[1], 1):
            wanted = weights[:, depth + 1 :] > 0
            losses = functional.cross_entropy(model.lm_head(rows[wanted]), ids[:, depth + 1 :][wanted])
            loss = loss + losses / DEPTH
        for optimizer, _ in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer, _ in optimizers:
            optimizer.step()
        if step % 25 == 0:
            used = f"{time.process_time():.0f} s of CPU"
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {used}", flush=True)
    return head


@torch.inference_mode()
def evaluate(model: Qwen3_5ForCausalLM, head: Head, tokenizer: Any) -> None:
    """Print how often a draft is what the model chooses, by how many tokens ahead, on other texts."""
    right, total = [0] * DEPTH, [0] * DEPTH
    for ids, weights in itertools.islice(Rows(tokenizer, EVALUATION_SEED).batches(), 20):
        hidden, found = drafted(model, head, ids)
        chosen = model.lm_head(hidden).argmax(-1)  # [B, S], of the token behind each
        for depth, rows in enumerate(found, 1):
            wanted = weights[:, depth + 1 :] > 0
            same = model.lm_head(rows).argmax(-1) == chosen[:, depth:-1]
            right[depth - 1] += int(same[wanted].sum())
            total[depth - 1] += int(wanted.sum())
    print("right drafts by depth:", [f"{r / t:.3f}" for r, t in zip(right, total, strict=True)], flush=True)


def write(model: Qwen3_5ForCausalLM, head: Head, directory: Path) -> None:
    """Write both in bfloat16, with the layers and columns that add nothing, and the tokenizer."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        for layer in range(model.config.num_hidden_layers, LAYERS):
            tensors[f"model.layers.{layer}.{name[len(last) :]}"] = torch.zeros_like(tensors[name])
    tensors |= {f"mtp.{name}": tensor for name, tensor in head.state_dict().items()}
    for name, tensor in tensors.items():
        more = MLP_WIDTH - model.config.intermediate_size
        if name.endswith("down_proj.weight"):
            tensors[name] = functional.pad(tensor, (0, more))
        elif ".mlp." in name:
            tensors[name] = functional.pad(tensor, (0, 0, 0, more))
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(STORYTELLER / name, directory)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.intermediate_size = LAYERS, MLP_WIDTH
    config.layer_types = ["full_attention"] * LAYERS
    config.architectures, config.dtype = ["Qwen3_5ForCausalLM"], "bfloat16"
    config.save_pretrained(directory)
    written = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Train, evaluate and write."""
    parser = argparse.ArgumentParser(description="Train a head for multi-token prediction.")
    parser.add_argument("directory", type=Path, help="where the model with its head is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer: Any = AutoTokenizer.from_pretrained(STORYTELLER)
    model = converted()
    head = train(model, tokenizer, options.steps)
    evaluate(model, head, tokenizer)
    write(model, head, options.directory)


if __name__ == "__main__":
    main()
