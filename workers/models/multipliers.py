"""Reads the factors of projections' outputs in a config, such as Falcon-H1's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.models.errors import UnsupportedError
from workers.models.values import boolean, number, positive_numbers


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The factors of the outputs of projections.

    Attributes:
        qkv: Queries, keys and values.
        attended: The output projection of attention.
        mixed: Gates, inputs, B, C and steps of Mamba 2.
        mixer: The output projection of Mamba 2.
        gate: The MLP's gate.
        down: The MLP's down projection.
    """

    qkv: tuple[float, ...] = (1.0, 1.0, 1.0)
    attended: float = 1.0
    mixed: tuple[float, ...] = (1.0,) * 5
    mixer: float = 1.0
    gate: float = 1.0
    down: float = 1.0


ALL_ONE = Multipliers()


def read_multipliers(settings: Mapping[str, object]) -> Multipliers:
    """The multipliers of a config, 1 where it has none. Raises ModelError, or UnsupportedError."""
    into = number(settings, "attention_in_multiplier", 1.0)
    mixer_into = number(settings, "ssm_in_multiplier", 1.0)
    # These multiply inputs. Without a bias it is the same to multiply outputs.
    for name, factor, bias in (
        ("attention_in_multiplier", into, "attention_bias"),
        ("ssm_in_multiplier", mixer_into, "mamba_proj_bias"),
    ):
        if factor != 1.0 and boolean(settings, bias, default=False):
            raise UnsupportedError(f"{name}: must be 1 with {bias}, got {factor}")
    gate, down = _listed(settings, "mlp_multipliers", 2)
    return Multipliers(
        qkv=(into, into * number(settings, "key_multiplier", 1.0), into),
        attended=number(settings, "attention_out_multiplier", 1.0),
        mixed=tuple(mixer_into * one for one in _listed(settings, "ssm_multipliers", 5)),
        mixer=number(settings, "ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _listed(settings: Mapping[str, object], name: str, count: int) -> tuple[float, ...]:
    found = positive_numbers(settings, name) or (1.0,) * count
    if len(found) != count:
        raise UnsupportedError(f"{name}: must have {count} numbers, got {len(found)}")
    return found


def factors(counts: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Pairs (number of outputs, factor) for `Linear`. Empty if all factors are 1."""
    return () if all(value == 1.0 for value in values) else tuple(zip(counts, values, strict=True))
