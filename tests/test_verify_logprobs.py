"""Log-probabilities of emitted tokens."""

from __future__ import annotations

import math

import pytest
import torch
from verify_cases import draft_of, filtered_law, law_of, rows_of

from furcate.verify.coupled import verify
from furcate.verify.logprobs import processed_logprobs, raw_logprobs

LOGITS = torch.tensor([[[1.0, 3.0, 2.0, 0.0], [5.0, 0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 0.0]]])
DRAFT = draft_of([2, 1, 3], [0, 0, 0])  # the greedy choice at the root is 1, then 0


def test_raw_logprobs_are_the_models_own() -> None:
    law = law_of(1, 4, bias_BV=torch.tensor([[0.0, 0.5, 0.0, 0.0]]), presence_B=0.5)
    verdict = verify(LOGITS, law, rows_of(DRAFT)).verdict
    got = raw_logprobs(LOGITS, verdict, top=2)
    want = LOGITS.log_softmax(-1)
    assert got.chosen_BD[0].tolist() == [want[0, 0, 1], want[0, 1, 0]]
    assert got.top_id_BDK[0].tolist() == [[1, 2], [0, 3]]
    assert got.top_BDK[0, 0].tolist() == [want[0, 0, 1], want[0, 0, 2]]


def test_processed_logprobs_are_those_of_the_law_that_is_drawn_from() -> None:
    law = law_of(1, 4, temperature_B=0.7, top_k_B=3, top_p_B=0.9, min_p_B=0.05, seed_B=3)
    rows = rows_of(DRAFT)
    verified = verify(LOGITS, law, rows)
    got = processed_logprobs(verified.processed, law, verified.verdict, top=4)
    for d in range(int(verified.verdict.count_B)):
        row = int(verified.verdict.path_BD[0, d])
        want = filtered_law(LOGITS[0, row].tolist(), 0.7, 3, 0.9, 0.05)
        told = dict(zip(got.top_id_BDK[0, d].tolist(), got.top_BDK[0, d].tolist(), strict=True))
        for token, p in enumerate(want):
            assert told[token] == (pytest.approx(math.log(p), abs=1e-5) if p else -math.inf)
        assert got.chosen_BD[0, d] == told[int(verified.verdict.emitted_BD[0, d])]


def test_a_greedy_request_is_told_at_temperature_one() -> None:
    law = law_of(1, 4, bias_BV=torch.tensor([[0.0, 0.0, 9.0, 0.0]]))
    verified = verify(LOGITS, law, rows_of(DRAFT))
    got = processed_logprobs(verified.processed, law, verified.verdict, top=1)
    want = (LOGITS[0, 0] + torch.tensor([0.0, 0.0, 9.0, 0.0])).log_softmax(-1)
    assert got.chosen_BD[0, 0] == want[2]
    assert got.top_id_BDK[0, 0].tolist() == [2]


def test_no_top_logprobs_is_an_empty_list() -> None:
    verdict = verify(LOGITS, law_of(1, 4), rows_of(DRAFT)).verdict
    assert raw_logprobs(LOGITS, verdict, top=0).top_BDK.shape == (1, 2, 0)
