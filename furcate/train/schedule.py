"""The learning rate by how far the run is."""

from __future__ import annotations

import math

from furcate.train.recipe import Recipe

__all__ = ["progress", "rate"]


def progress(recipe: Recipe, tokens: int, seconds: float) -> float:
    """Share of the run that is done, by tokens or by time; 1 or more: all."""
    if recipe.tokens is not None:
        return tokens / recipe.tokens
    assert recipe.minutes is not None
    return seconds / (60 * recipe.minutes)


def rate(recipe: Recipe, done: float, steps: int) -> float:
    """Half a cosine from the peak to its last share, times a linear rise.

    Args:
        recipe: of the run.
        done: share of the run that is done.
        steps: steps since the optimisers began; those that begin anew in the middle rise anew.
    """
    last = recipe.last_rate
    fall = last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    rise = min(1.0, (steps + 1) / (recipe.warmup_steps + 1))
    return recipe.rate * fall * rise
