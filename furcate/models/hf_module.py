"""The module for multi-token prediction that may lie in a target's folder: known, and left aside.

It drafts for the target and is no part of it: it is read as a head, by `heads/formats/mtp.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from furcate.errors import BadFile

__all__ = ["MODULES", "MODULE_KEYS", "QWEN_MODULES", "QWEN_PREFIX", "of_module", "without_module"]

MODULES = "num_nextn_predict_layers"
QWEN_MODULES = "mtp_num_hidden_layers"
MODULE_KEYS = frozenset({MODULES, QWEN_MODULES})
QWEN_PREFIX = "mtp."
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def without_module(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the target alone."""
    return {key: value for key, value in config.items() if key not in MODULE_KEYS}


def of_module(config: Mapping[str, Any], layers: int) -> Callable[[str], bool]:
    """Whether a tensor of this name belongs to the module; `layers` are the target's.

    Qwen's names begin with `mtp.`; DeepSeek's are those of further layers, as many as the config
    says. Raises BadFile where it says no number.
    """
    modules = config.get(MODULES)
    modules = 0 if modules is None else modules
    if isinstance(modules, bool) or not isinstance(modules, int) or modules < 0:
        raise BadFile("must be a whole number", field=MODULES, value=modules)

    def belongs(name: str) -> bool:
        layer = _LAYER.match(name)
        further = layer is not None and layers <= int(layer[1]) < layers + modules
        return further or name.startswith(QWEN_PREFIX)

    return belongs
