"""The model families with native code, by the `model_type` of their config.

A `Family` has the properties that are not in its config.json: the library's defaults, and differences in
structure. To add a family with a supported structure, add an entry in `families/`.

Sources: the configuration_*.py and modeling_*.py of transformers 5.23. `tests/workers/test_families.py`
compares the defaults with them, and the logits.
"""

from __future__ import annotations

from workers.models.errors import UnsupportedError
from workers.models.families.dense import DENSE
from workers.models.families.latent import LATENT
from workers.models.families.mixtures import MIXTURES
from workers.models.families.recurrent import RECURRENT
from workers.models.family import Family

FAMILIES: dict[str, Family] = {**DENSE, **MIXTURES, **LATENT, **RECURRENT}


def family_of(model_type: object) -> Family:
    """The family of a config. Raises UnsupportedError if the family is unknown."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(f"model_type: there is no native code for {model_type!r}")
    return FAMILIES[model_type]
