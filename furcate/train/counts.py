"""How often the target says each token: the order from which a reduced vocabulary is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from furcate.train.corpus import Corpus, Kind

__all__ = ["answer_counts", "frequent"]

_CHUNK = 1 << 22  # tokens held in memory at a time


def answer_counts(corpus: Corpus) -> NDArray[np.int64]:
    """How often each id of the vocabulary [V] stands in an answer."""
    counts = np.zeros(corpus.about.vocab_size, np.int64)
    starts, ends = corpus.index.bounds(Kind.ANSWER)
    for first in range(0, len(corpus.tokens), _CHUNK):
        ids = np.asarray(corpus.tokens[first : first + _CHUNK])
        inside = _covered(starts - first, ends - first, len(ids))
        counts += np.bincount(ids[inside], minlength=len(counts))
    return counts


def frequent(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """All ids by falling count, ties by id; the first n of them are the best n to draft from."""
    return np.argsort(-counts, kind="stable")


def _covered(starts: NDArray[Any], ends: NDArray[Any], length: int) -> NDArray[np.bool_]:
    """Which of `length` tokens lie in a span; spans may begin before and end behind them."""
    near = (starts < length) & (ends > 0)
    steps = np.zeros(length + 1, np.int32)
    np.add.at(steps, starts[near].clip(0), 1)
    np.add.at(steps, ends[near].clip(max=length), -1)
    covered: NDArray[np.bool_] = np.cumsum(steps[:-1]) > 0
    return covered
