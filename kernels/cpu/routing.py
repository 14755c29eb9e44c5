"""Calls the compiled choice of experts in routing.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers
from kernels.routing_rule import RoutingRule


class CompiledRule(ctypes.Structure):
    """RoutingRule of routing.h: the fields must agree."""

    _fields_ = (
        *pointers("correction"),
        *integers("experts choices normalised sigmoid groups best_groups"),
        *doubles("scale eps"),
    )

    @classmethod
    def of(
        cls, rule: RoutingRule, experts: int, k: int, normalize: bool, correction: torch.Tensor | None
    ) -> CompiledRule:
        """See `kernels.experts.route`. Does not keep the correction alive."""
        return cls(
            None if correction is None else correction.data_ptr(),
            *(experts, k, normalize, rule.sigmoid, rule.groups, rule.best_groups),
            *(rule.scale, rule.eps),
        )


class _Arguments(ctypes.Structure):
    """The struct of the same name in routing.cpp: the fields must agree."""

    _fields_ = (
        *pointers("logits given ids weights"),
        *integers("tokens threads"),
        ("rule", CompiledRule),
    )


def route(
    logits: torch.Tensor,
    k: int,
    normalize: bool,
    given: torch.Tensor | None,
    rule: RoutingRule,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.experts.route`, which checks the arguments. The weights are float32.

    Raises:
        IndexError: A given expert does not exist.
    """
    tokens, experts = logits.shape
    ids, weights = torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k, dtype=torch.float32)
    logits = logits.contiguous()
    given = None if given is None else given.contiguous()
    arguments = _Arguments(
        logits.data_ptr(),
        None if given is None else given.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        torch.get_num_threads(),
        CompiledRule.of(rule, experts, k, normalize, correction),
    )
    run = library.function(f"quire_route_{SUFFIXES[logits.dtype]}", (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError(f"given: experts must be from 0 to {experts - 1}")
    return ids, weights
