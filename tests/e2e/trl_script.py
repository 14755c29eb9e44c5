"""TRL's trainer with the rollouts of docs/training.md, watched: `trl_script.py PROGRAM`.

Prints a line of JSON for each step, which compares what the server said of the tokens that it drew with what
TRL computes for them with its own code. The last line has the reward of each step.
"""

# mypy: ignore-errors

from __future__ import annotations

import copy
import json
import runpy
import sys

import torch
import trl

# Threads of torch that wait for each other spin, and what is computed here is small.
torch.set_num_threads(1)
# The results of a layer: of matrices, norms, the rotation, scores, the softmax, and both sums.
ROUNDINGS_OF_A_LAYER = 7 + 4 + 1 + 1 + 1 + 2
# What is rounded to float32 is off by this at most, relative to it.
UNIT = 2.0**-24


class Watched(trl.GRPOTrainer):
    """Compares before each update, which is after the one before it."""

    before = None
    last = None

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        drawn, said = made["completion_mask"].bool(), made["sampling_per_token_logps"]

        def difference(model):
            return float((self._logprobs(model, made) - said).abs()[drawn].max())

        figures = {
            "step": self.state.global_step,
            "difference": difference(self.model),
            "tolerance": self._tolerance(made),
            "without_the_push": None if Watched.before is None else difference(Watched.before),
        }
        print(json.dumps(figures), flush=True)
        Watched.before, Watched.last = copy.deepcopy(self.model), self
        return made

    def _logprobs(self, model, made):
        """TRL's, of the tokens that were drawn: [samples, tokens]."""
        parts = ("prompt", "completion")
        ids = torch.cat([made[f"{part}_ids"] for part in parts], 1)
        mask = torch.cat([made[f"{part}_mask"] for part in parts], 1)
        length = made["completion_ids"].size(1)
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(model, ids, mask, length)[0]

    def _tolerance(self, made):
        """Server and trainer both compute in float32, in different orders.

        Each result that a logit depends on is rounded once; all these errors add up, in both. A
        log-probability is a difference of two values of the size of a logit over the temperature.
        """
        with torch.no_grad():
            logits = self.model(made["completion_ids"]).logits
        largest = float(logits.abs().max()) / self.temperature
        roundings = ROUNDINGS_OF_A_LAYER * self.model.config.num_hidden_layers + 2
        return 2 * 2 * roundings * UNIT * largest


trl.GRPOTrainer = Watched
runpy.run_path(sys.argv[1], run_name="__main__")
rewards = [step["reward"] for step in Watched.last.state.log_history if "reward" in step]
print(json.dumps(rewards))
