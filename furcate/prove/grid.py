"""The grid of sampling laws under which streams are compared, and the prompts they start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furcate.config import SamplingParams

__all__ = ["BATCHES", "PROMPTS", "SETTINGS", "params_of"]

BATCHES = (1, 8)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T 0.3": {"temperature": 0.3},
    "T 0.7": {"temperature": 0.7},
    "T 1": {"temperature": 1},
    "T 1.3": {"temperature": 1.3},
    "top_k": {"temperature": 1, "top_k": 20},
    "top_p": {"temperature": 1, "top_p": 0.9},
    "min_p": {"temperature": 1, "min_p": 0.05},
    "all filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.15},
    "presence and frequency": {
        "temperature": 0.8,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    "greedy, penalties": {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.05},
    "logit_bias": {"temperature": 0.8, "logit_bias": {5: 2.0, 7: -100.0, 11: 1.5, 13: 3.0}},
    "everything": {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 1.0, 9: -2.0},
        "min_tokens": 12,
    },
}

PROMPTS = (
    "Copy this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Count from one to thirty in words, separated by commas.",
    "Write a short poem about a river in winter.",
    "Explain to a child why the moon changes its shape.",
    "Write a Python function that returns the factorial of n, then explain it line by line.",
    "Translate into French: The train leaves at nine, and the train arrives at noon.",
    "List ten animals in alphabetical order, then list them again in reverse order.",
    "Summarise this text, then repeat it word for word: Trees breathe in carbon dioxide and "
    "breathe out oxygen. Forests cool the land and hold the water of the rain.",
)


def params_of(
    setting: str, seed: int, max_tokens: int, stop_ids: Sequence[int] = ()
) -> SamplingParams:
    """The sampling options of one stream; EOS does not end it, so that its length is known.

    `stop_ids` end it under the laws with min_tokens alone, which would bar nothing without them.
    """
    law = SETTINGS[setting]
    ends = tuple(stop_ids) if "min_tokens" in law else ()
    return SamplingParams(
        seed=seed, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=ends, **law
    )
