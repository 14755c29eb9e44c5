"""A trainer in torch with its rollouts on Quire: reinforcement learning (GRPO), new weights at every step.

The policy learns to count: after "34" the reward is the share of tokens that are the digit before them plus
one. Each step samples a group of rollouts of each prompt, updates the policy by how much better each is than
its group, and pushes the result: all weights, which begin at random (LoadWeights), or with
--lora an adapter of DIR's (LoadAdapter with the same id), which the server loads first. It needs torch and
transformers, and peft for --lora.

Prints a line of JSON for each step. `stale_tokens` were not drawn with the weights that were pushed last.
`logprob_differences` compare what the server said of a token when it was drawn with what the trainer computes
for it in the server's dtype. `mean_of_rounding` is by how much the trainer's own differ from its float32.

Cost: a step is one prefill of all prompts, one fork, and one decode for each further token. A push writes and
reads the weights once. Shares steps: all rollouts, by one BatchDecode for each position.

    quire serve --dtype float32       # or bfloat16; with the model of DIR, by default the shipped one
    cd clients/python/examples/trainer
    python train_policy.py [TARGET] [--model DIR] [--lora] [--steps N] [--group N] [--chart FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from quire import Cache, Client, PrefillItem, SampledToken, StepOutput, checked, output_options
from quire.cli.load import plots
from quire.v1 import types_pb2
from safetensors.torch import save
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

SHIPPED = Path(__file__).resolve().parents[4] / "workers" / "models" / "adder"
PROMPTS = [[digit, (digit + 1) % 10] for digit in range(10)]  # ids of tokens, which are the digits
LENGTH, TEMPERATURE = 8, 1.0  # tokens of a rollout, and how they are drawn
ADAPTER, RANK, ALPHA = "policy", 8, 16
STYLE = """
text { fill: #66707c; font: 12px sans-serif; } .back { fill: #fff; } .tip { opacity: 0; }
.grid { stroke: #e3e7ec; } .axis { stroke: #66707c; } .line { stroke-width: 2; }
circle { r: 1.5px; }
.line.c1 { stroke: #1f6feb; } .line.c2 { stroke: #d9480f; } .line.c3 { stroke: #0c8a6a; }
.k { font-weight: 600; } .c1 { fill: #1f6feb; } .c2 { fill: #d9480f; } .c3 { fill: #0c8a6a; }
.line.c1, .line.c2, .line.c3 { fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #98a3b0; } .back { fill: #1a2027; } .grid { stroke: #2b333d; }
}
"""
_DTYPES = {
    types_pb2.DATA_TYPE_F32: torch.float32,
    types_pb2.DATA_TYPE_BF16: torch.bfloat16,
    types_pb2.DATA_TYPE_F16: torch.float16,
}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Rollouts:
    """All rollouts of a step, those of a prompt in a row. R = prompts * group, L = LENGTH."""

    prompts: torch.Tensor  # [R, 2] int64
    tokens: torch.Tensor  # [R, L] int64
    logprobs: torch.Tensor  # [R, L] float32, when they were drawn, in nats
    stale_tokens: int

    def rewards(self) -> torch.Tensor:
        """[R]: the share of tokens that count on from the one before them."""
        before = torch.cat([self.prompts[:, -1:], self.tokens[:, :-1]], 1)
        return (self.tokens == (before + 1) % 10).float().mean(1)


class Policy:
    """The model that learns, in float32: all its weights, or an adapter on them."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, lora: bool, learning_rate: float) -> None:
        """`dtype`: of the server, in which it computes and writes weights."""
        self.model: torch.nn.Module
        if lora:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415

            served = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            self.model = get_peft_model(served, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES))
        else:
            config = AutoConfig.from_pretrained(directory)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._optimizer = torch.optim.Adam(
            [weight for weight in self.model.parameters() if weight.requires_grad], learning_rate
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """As the server has them."""
        return {name: weight.to(self._dtype) for name, weight in self.model.named_parameters()}

    def logprobs(self, rollouts: Rollouts, dtype: torch.dtype) -> torch.Tensor:
        """Of the tokens drawn, [R, L], computed in `dtype` with the weights that the server has."""
        texts = torch.cat([rollouts.prompts, rollouts.tokens], 1)  # [R, 2 + L]
        weights = {name: weight.to(dtype) for name, weight in self.weights().items()}
        logits = functional_call(self.model, weights, (texts[:, :-1],)).logits
        found = torch.log_softmax(logits.float() / TEMPERATURE, -1)[:, -LENGTH:]
        return found.gather(2, rollouts.tokens[:, :, None])[:, :, 0]

    def learn(self, rollouts: Rollouts, advantages: torch.Tensor) -> dict[str, float]:
        """One update. Returns how trainer and server differ on log-probabilities."""
        logprobs = self.logprobs(rollouts, self._dtype)
        # Samples are weighted by how much likelier the trainer finds them than the server did: about 1.
        loss = -((logprobs - rollouts.logprobs).exp() * advantages[:, None]).mean()
        with torch.no_grad():
            differences = (logprobs - rollouts.logprobs).abs()
            rounding = (logprobs - self.logprobs(rollouts, torch.float32)).abs()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return {
            "max": float(differences.max()),
            "mean": float(differences.mean()),
            "mean_of_rounding": float(rounding.mean()),
        }


class WeightsPush:
    """Pushes all weights, over gRPC. The server needs no directory of the trainer."""

    adapter_id = ""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._version = 0

    def push(self, policy: Policy) -> tuple[float, float]:
        """Returns the seconds of sending and of loading."""
        began_s = time.monotonic()
        source = self._client.upload_weights(save(policy.weights()))
        sent_s = time.monotonic()
        # With recompute=True or keep_kv=True rollouts under way would continue.
        self._version = self._client.load_weights(source).weights_version
        return sent_s - began_s, time.monotonic() - sent_s

    def stale(self, caches: list[Cache]) -> int:
        """The number of caches whose last answer is not of the weights that were pushed last."""
        return sum(cache.weights_version != self._version for cache in caches)


class AdapterPush:
    """Pushes an adapter, as a new version of the same id. The caches of a version keep it."""

    adapter_id = ADAPTER
    _config: ClassVar = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES}

    def __init__(self, client: Client) -> None:
        self._client = client
        self._version = 0

    def push(self, policy: Policy) -> tuple[float, float]:
        """Returns the seconds of encoding and of loading."""
        began_s = time.monotonic()
        weights = {
            name.replace(".default", ""): weight
            for name, weight in policy.weights().items()
            if ".lora_" in name
        }
        files = {
            "adapter_config.json": json.dumps(self._config).encode(),
            "adapter_model.safetensors": save(weights),
        }
        encoded_s = time.monotonic()
        self._version = self._client.load_adapter(ADAPTER, files=files).version
        return encoded_s - began_s, time.monotonic() - encoded_s

    def stale(self, caches: list[Cache]) -> int:
        """The number of caches that are not of the version that was pushed last, which the server counts."""
        (policy,) = [known for known in self._client.list_adapters() if known.adapter_id == ADAPTER]
        return len(caches) - policy.caches if policy.version == self._version else len(caches)


def sample(client: Client, pushed: WeightsPush | AdapterPush, step: int, group: int) -> Rollouts:
    """The rollouts of a step, reproducible by their seeds."""
    count = len(PROMPTS) * group
    seeds = range(step * count, (step + 1) * count)
    asked = [output_options(temperature=TEMPERATURE, sampled_logprob=True, seed=seed) for seed in seeds]
    roots = checked(
        client.batch_prefill(
            [
                PrefillItem(
                    prompt, asked[0], adapter_id=pushed.adapter_id, sample_seeds=seeds[at : at + group]
                )
                for at, prompt in zip(range(0, count, group), PROMPTS, strict=True)
            ]
        )
    )
    forks = client.fork_caches([(root, group - 1) for root in roots])
    caches = [cache for root, forked in zip(roots, forks, strict=True) for cache in (root, *forked)]
    drawn: Sequence[SampledToken | StepOutput] = [one for root in roots for one in root.samples]
    rows = [drawn]
    stale = pushed.stale(caches)
    while len(rows) < LENGTH:
        decodes = zip(caches, (one.token_id for one in drawn), asked, strict=True)
        rows.append(drawn := checked(client.batch_decode([*decodes])))
        stale += pushed.stale(caches)
    client.fork_caches([(caches[0], 0)], release=caches)
    return Rollouts(
        torch.tensor(PROMPTS).repeat_interleave(group, 0),
        torch.tensor([[one.token_id for one in row] for row in rows]).T,
        torch.tensor([[one.sampled_logprob for one in row] for row in rows]).T,
        stale,
    )


def train(
    client: Client, policy: Policy, pushed: WeightsPush | AdapterPush, steps: int, group: int
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each step."""
    for step in range(steps):
        send_s, load_s = pushed.push(policy)
        began_s = time.monotonic()
        rollouts = sample(client, pushed, step, group)
        sampled_s = time.monotonic()
        rewards = rollouts.rewards().view(len(PROMPTS), group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        differences = policy.learn(rollouts, advantages.flatten())
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "stale_tokens": rollouts.stale_tokens,
            "logprob_differences": differences,
            "send_s": send_s,
            "load_s": load_s,
            "rollouts_s": sampled_s - began_s,
            "tokens_per_s": rollouts.tokens.numel() / (sampled_s - began_s),
            "train_s": time.monotonic() - sampled_s,
        }


def chart(steps: list[dict[str, Any]]) -> str:
    """An SVG: the reward, and the seconds of a step, over steps."""
    panels = {
        "reward": [("reward", "c1", [step["reward"] for step in steps])],
        "seconds": [
            ("push weights", "c2", [step["send_s"] + step["load_s"] for step in steps]),
            ("rollouts", "c1", [step["rollouts_s"] for step in steps]),
            ("update", "c3", [step["train_s"] for step in steps]),
        ],
    }
    parts = []
    for at, (unit, named) in enumerate(panels.items()):
        lines = [plots.Line(*line) for line in named]
        drawn = plots.against([step["step"] for step in steps], lines, "steps", unit)
        keys = " ".join(f'<tspan class="k {line.colour}" dx="10">{line.name}</tspan>' for line in lines)
        keys += ' <tspan dx="10">seconds</tspan>' if unit == "seconds" else ""
        drawn = drawn.replace("<svg", f'<svg x="{at * 570}" y="24" width="560" height="250"', 1)
        parts.append(f'<text class="t" x="{at * 570 + 36}" y="20">{keys}</text>{drawn}')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1140 280"><style>{STYLE}</style>'
        f'<rect class="back" width="1140" height="280" rx="10"/>{"".join(parts)}</svg>'
    )


def main() -> None:
    """Trains. The policy is served until other weights are loaded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group", type=int, default=32, help="rollouts of each prompt in a step")
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    steps = []
    with Client(options.target, timeout_s=600) as client:
        dtype = _DTYPES[client.model_info().model.dtype]
        if options.lora:
            # Another run may have left others.
            client.load_weights(str(options.model.resolve()))
        policy = Policy(options.model, dtype, lora=options.lora, learning_rate=options.learning_rate)
        pushed = AdapterPush(client) if options.lora else WeightsPush(client)
        for figures in train(client, policy, pushed, options.steps, options.group):
            print(json.dumps(figures), flush=True)
            steps.append(figures)
    if options.chart:
        options.chart.write_text(chart(steps))


if __name__ == "__main__":
    main()
