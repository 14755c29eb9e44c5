"""Mixture of experts: the routing of tokens, and the experts' outputs.

An expert is a feed-forward network, down(activation(gate x) * (up x)), or down(activation(up x)) without a
gate, whose projections may have biases. `route` chooses k experts for each token, with weights. `experts`
groups the rows of a batch by expert, so that the matrices of an expert are read once for all of its rows, and
not at all if it has none.

Results are rounded as if the operations ran one by one: both projections to the dtype of x, the activation
and its product with up as in `kernels.gated_activation`. The k results of a token are weighted and summed in
float32, in the order of k, and rounded once. (transformers sums in the order of the experts, in the dtype of
x.)

The bits of a row do not depend on the other rows with packed or quantised weights on the CPU; on a GPU if
that is asked for, else among batches with the same tile configuration (see `kernels.cuda.experts`).

Dimension letters: T tokens; C hidden width; I intermediate width of an expert; E experts; k experts of a
token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import experts as cpu
from kernels.cpu import routing
from kernels.cpu.dtypes import can_run
from kernels.expert_lora import ExpertAdapters
from kernels.gated_activation import ACTIVATIONS, UNGATED, Activation, gated_activation, sigmoid
from kernels.gpu_experts import GpuExperts
from kernels.linear import DenseWeight
from kernels.lora import add_lora
from kernels.routing_rule import BEST_SOFTMAX, RoutingRule
from kernels.weight import Weight

# Biases of gate_up and down: [E, 2 * I] and [E, C], contiguous, in the dtype of x.
Biases = tuple[torch.Tensor, torch.Tensor]
# A tensor [E, O, I], E weights [O, I] in whatever layout, or the result of `pack_experts`. Quantised ones of
# a GPU are together.
ExpertWeights = torch.Tensor | Sequence[Weight] | cpu.PackedWeights | GpuExperts


def route(
    logits: torch.Tensor,
    k: int,
    normalize: bool,
    dtype: torch.dtype | None = None,
    given: torch.Tensor | None = None,
    rule: RoutingRule = BEST_SOFTMAX,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token: those with the highest scores.

    Args:
        logits: [T, E], the router's output; float32, bfloat16 or float16.
        k: The number of experts for each token.
        normalize: Divide the scores of the chosen experts by their sum: always in Mixtral, `norm_topk_prob`
            in Qwen3-MoE.
        dtype: The dtype of the weights, which are rounded once at the end. None: that of the logits, as in
            Qwen3-MoE; Mixtral uses torch.float32.
        given: [T, k] int64, experts that are chosen whatever their scores, in the order in which they are
            summed. Not checked on a GPU. A row that begins with -1 has none. None: no row has.
        rule: What scores are, and which experts may be chosen.
        correction: [E] float32, added to scores to choose by, and not to weights; None: there is none.

    Returns:
        expert_ids [T, k] int64, the best first if they are not given, without repetition; expert_weights
        [T, k]. Of equal scores the lower number comes first, but for float16 on a CPU.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError, RuntimeError: A given expert does not exist (on the CPU).
    """
    check_tensor("logits", logits, (None, None), FLOAT_DTYPES)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: must be between 1 and {logits.shape[1]} experts, got {k}")
    if given is not None:
        check_tensor("given", given, (len(logits), k), (torch.int64,))
    if correction is not None:
        check_tensor("correction", correction, (logits.shape[1],), (torch.float32,))
    if logits.is_cuda:
        from kernels.cuda import routing as cuda

        return cuda.route(logits, k, normalize, dtype or logits.dtype, given, rule, correction)
    if can_run(logits):
        expert_ids, weights = routing.route(logits, k, normalize, given, rule, correction)
        return expert_ids, weights.to(dtype or logits.dtype)
    return route_reference(logits, k, normalize, dtype or logits.dtype, given, rule, correction)


def route_reference(
    logits: torch.Tensor,
    k: int,
    normalize: bool,
    dtype: torch.dtype,
    given: torch.Tensor | None = None,
    rule: RoutingRule = BEST_SOFTMAX,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` in plain torch, whose topk chooses among equal scores."""
    # [T, E]
    scores = sigmoid(logits.float()) if rule.sigmoid else functional.softmax(logits, -1, dtype=torch.float32)
    chosen_by = _of_best_groups(scores if correction is None else scores + correction, rule)
    expert_ids = torch.topk(chosen_by, k, dim=-1)[1]  # [T, k]
    if given is not None:
        expert_ids = torch.where(given[:, :1] < 0, expert_ids, given)
    weights = scores.gather(1, expert_ids)
    if normalize:
        total = weights.sum(-1, keepdim=True) + rule.eps
        weights = weights / total
        if given is not None:
            # The scores of experts that the router would never choose may all be rounded to 0.
            alone = functional.softmax(logits.gather(1, expert_ids), dim=-1, dtype=torch.float32)
            weights = torch.where(total > 0, weights, alone)
    return expert_ids, (weights * rule.scale).to(dtype)


def _of_best_groups(chosen_by: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """[T, E], lower than any that may be chosen outside of the best groups."""
    if rule.groups == 1:
        return chosen_by
    by_group = chosen_by.view(len(chosen_by), rule.groups, -1)  # [T, G, E / G]
    worth = by_group.topk(2, dim=-1)[0].sum(-1) if rule.sigmoid else by_group.amax(-1)  # [T, G]
    best = torch.zeros_like(worth).scatter_(1, worth.topk(rule.best_groups, dim=-1)[1], 1.0)
    left_out = float("-inf") if rule.sigmoid else 0.0
    return by_group.masked_fill(best[:, :, None] == 0.0, left_out).flatten(1)


def pack_experts(weights: ExpertWeights) -> ExpertWeights:
    """The matrices of all experts as the kernels of their device read them.

    Args:
        weights: The filled weights, which are packed in place. A tensor, as on a GPU, stays as it is.

    Returns:
        For `experts`: in one compiled call, if there are kernels for all of the matrices.
    """
    if isinstance(weights, torch.Tensor | cpu.PackedWeights | GpuExperts):
        return weights
    packed = [weight.packed() for weight in weights]
    parts = [weight.compiled for weight in packed]
    known = [part for part in parts if part is not None]
    return cpu.PackedWeights(packed, known) if len(known) == len(packed) else packed


def experts(  # noqa: PLR0913 - keyword-only options of one formula
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: Activation = "silu",
    *,
    biases: Biases | None = None,
    batch_invariant: bool = False,
    lora: ExpertAdapters | None = None,
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        x: [T, C]; float32, bfloat16 or float16.
        gate_up: [E, 2 * I, C], rows of the gate, then of up: one tensor, contiguous on a GPU, or quantised
            there; on the CPU also E weights [2 * I, C], or from `pack_experts`. Dtype of x. Without gates I
            rows.
        down: [E, C, I], likewise.
        expert_ids: [T, k] int64, from 0 to E - 1. On a GPU any other id makes its row undefined, and no
            other row.
        expert_weights: [T, k]; dtype of x, or float32.
        activation: The activation of the gate; see `kernels.gated_activation`.
        biases: Of gate_up and down; None: they have none.
        batch_invariant: On a GPU, the bits of a row must not depend on the others.
        lora: What adapters add to both projections, with packed or separate weights; None: nothing. On a GPU
            there are no kernels for them.

    Returns:
        A new tensor [T, C] with the dtype of x.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError, RuntimeError: An expert id is out of range (on the CPU).
    """
    _check(x, gate_up, down, expert_ids, expert_weights, biases, 1 if activation == UNGATED else 2)
    if x.is_cuda or isinstance(gate_up, GpuExperts) or isinstance(down, GpuExperts):
        from kernels.cuda import experts as cuda

        assert isinstance(gate_up, torch.Tensor | GpuExperts) and isinstance(down, torch.Tensor | GpuExperts)
        return cuda.experts(
            x,
            gate_up,
            down,
            expert_ids,
            expert_weights,
            activation,
            biases=biases,
            batch_invariant=batch_invariant,
        )
    if isinstance(gate_up, cpu.PackedWeights) and isinstance(down, cpu.PackedWeights):
        tables = None if lora is None else (lora.gate_up, lora.down)
        layer = cpu.expert_layer(gate_up, down, ACTIVATIONS.index(activation), biases, tables)
        slots = None if lora is None else lora.slots
        return cpu.experts(x, layer, expert_ids, expert_weights, slots)
    return _one_by_one(x, gate_up, down, expert_ids, expert_weights, activation, biases, lora)


def _one_by_one(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: Activation,
    biases: Biases | None,
    lora: ExpertAdapters | None,
) -> torch.Tensor:
    """The chosen experts one after the other."""
    gate_up_bias, down_bias = biases or (None, None)
    outputs = x.new_empty(expert_ids.numel(), x.shape[1])  # [T * k, C]
    # Pairs of a token and one of its experts, numbered as in `outputs`, sorted by expert.
    pairs = expert_ids.flatten().argsort(stable=True)  # [T * k]
    counts = expert_ids.flatten().bincount(minlength=len(gate_up)).tolist()
    if len(counts) > len(gate_up):
        raise IndexError(f"expert_ids: must be below {len(gate_up)}, got {len(counts) - 1}")
    end = 0
    for expert, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            of_expert = pairs[begin:end]  # [n]
            tokens = of_expert // expert_ids.shape[1]  # [n]
            rows = x.index_select(0, tokens)  # [n, C]
            bias = None if gate_up_bias is None else gate_up_bias[expert]
            both = matrix_of(gate_up, expert).multiply(rows, bias)  # [n, 2 * I]
            if lora is not None:
                add_lora(both, rows, lora.gate_up.of_expert(expert, x.dtype), lora.slots[tokens])
            inner = gated_activation(both, activation)  # [n, I]
            bias = None if down_bias is None else down_bias[expert]
            result = matrix_of(down, expert).multiply(inner, bias)  # [n, C]
            if lora is not None:
                add_lora(result, inner, lora.down.of_expert(expert, x.dtype), lora.slots[tokens])
            outputs.index_copy_(0, of_expert, result)
    return _weighted_sum(outputs.view(*expert_ids.shape, x.shape[1]), expert_weights)


def matrix_of(weights: ExpertWeights, expert: int) -> Weight:
    """The matrix of an expert, a view."""
    return DenseWeight(weights[expert]) if isinstance(weights, torch.Tensor) else weights[expert]


def _weighted_sum(outputs: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """The sum over k in its order, in float32: [T, k, C], [T, k] -> [T, C] in the dtype of the first."""
    weights = expert_weights.float()[:, :, None]  # [T, k, 1]
    # Not by `sum`, whose order of additions may depend on T.
    total = outputs[:, 0].float() * weights[:, 0]  # [T, C]
    for choice in range(1, outputs.shape[1]):
        total += outputs[:, choice].float() * weights[:, choice]
    return total.to(outputs.dtype)


def _check(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    biases: Biases | None,
    into: int,
) -> None:
    """Check the arguments of `experts`. Of separate matrices only the first is checked, to save time.

    `into`: how many projections `gate_up` has.
    """
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check_tensor("expert_ids", expert_ids, (len(x), None), (torch.int64,))
    if not expert_ids.shape[1]:
        raise ValueError("expert_ids: a token must have an expert")
    check_tensor("expert_weights", expert_weights, expert_ids.shape, (x.dtype, torch.float32))
    if not len(gate_up) or len(gate_up) != len(down):
        raise ValueError(f"gate_up: must have the experts of down, got {len(gate_up)} and {len(down)}")
    width = x.shape[1]
    inner = down[0].shape[-1]
    if biases is not None:
        for name, bias, outputs in zip(("gate_up", "down"), biases, (into * inner, width), strict=True):
            check_tensor(f"the bias of {name}", bias, (len(down), outputs), (x.dtype,))
    for name, weight, shape in (("gate_up", gate_up, (into * inner, width)), ("down", down, (width, inner))):
        if tuple(weight[0].shape) != shape:
            raise ValueError(f"{name}: an expert's shape must be {list(shape)}, got {list(weight[0].shape)}")
        if weight[0].dtype != x.dtype or weight[0].device != x.device:
            raise TypeError(
                f"{name}: must have the dtype and device of x ({x.dtype} on {x.device}), "
                f"got {weight[0].dtype} on {weight[0].device}"
            )
        is_one = isinstance(weight, torch.Tensor) and weight.is_contiguous()
        if x.is_cuda and not is_one and not isinstance(weight, GpuExperts):
            raise ValueError(f"{name}: must be one contiguous tensor on a GPU, or quantised")
