"""Where a block of emitted tokens ends."""

from __future__ import annotations

import pytest
import torch
from verify_cases import draft_of, law_of, rows_of

from furcate.kernels.draft import Verdict
from furcate.verify.coupled import verify
from furcate.verify.stops import Cut, Finish, truncate

STOP, EOS, OTHER = 9, 8, 10


def cut_of(emitted: list[int], room: int, count: int | None = None) -> Cut:
    count = len(emitted) if count is None else count
    verdict = Verdict(
        torch.arange(len(emitted))[None],
        torch.tensor([emitted]),
        torch.tensor([count]),
        torch.tensor([count - 1]),
    )
    law = law_of(1, 30, stop_BS=torch.tensor([[EOS, STOP, -1]]))
    return truncate(verdict, law.stop_BS, torch.tensor([room]))


@pytest.mark.parametrize(
    ("emitted", "room", "count", "finish"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, 3, Finish.STOP),  # sglang#31599: stop before the cap
        ([10, 11, STOP, 20, 21, 22], 3, 3, Finish.STOP),  # the stop is the last that fits
        ([10, 11, STOP, 20, 21, 22], 2, 2, Finish.LENGTH),  # the stop lies beyond the cap
        ([10, 11, STOP, 20, 21, 22], 1, 1, Finish.LENGTH),
        ([10, 11, 12], 9, 3, Finish.NOT),
        ([10, 11, 12], 4, 3, Finish.NOT),
        ([10, 11, 12], 3, 3, Finish.LENGTH),  # the cap is reached exactly
        ([STOP], 1, 1, Finish.STOP),
        ([10, EOS, STOP], 9, 2, Finish.STOP),  # the first of several
        ([10, STOP, EOS], 9, 2, Finish.STOP),
        ([10, 11], 0, 0, Finish.LENGTH),  # a finished request emits nothing more
        ([STOP, 11], 0, 0, Finish.LENGTH),
    ],
)
def test_the_first_limit_wins(emitted: list[int], room: int, count: int, finish: Finish) -> None:
    cut = cut_of(emitted, room)
    assert int(cut.verdict.count_B) == count
    assert Finish(int(cut.finish_B)) is finish


def test_what_stands_past_the_count_cannot_stop_a_request() -> None:
    cut = cut_of([10, 11, STOP], room=9, count=2)
    assert int(cut.verdict.count_B) == 2
    assert Finish(int(cut.finish_B)) is Finish.NOT


def test_acceptance_is_counted_before_any_stop_rule() -> None:
    assert int(cut_of([10, STOP, 12], room=9).verdict.accepted_B) == 2


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 5, 6])
def test_min_tokens_holds_inside_an_accepted_block(min_tokens: int) -> None:
    """vllm#26317: never before min_tokens tokens, allowed exactly after them."""
    draft = draft_of([1, OTHER, OTHER, OTHER, OTHER], [0, 0, 1, 2, 3])
    logits = torch.zeros(1, 5, 30)
    logits[..., EOS], logits[..., OTHER] = 2.0, 1.0
    law = law_of(1, 30, output_B=2, min_tokens_B=min_tokens, stop_BS=torch.tensor([[EOS]]))
    cut = truncate(verify(logits, law, rows_of(draft)).verdict, law.stop_BS, torch.tensor([100]))
    # two tokens are out; tokens stand before the stop until there are min_tokens of them
    assert int(cut.verdict.count_B) == max(min_tokens - 2, 0) + 1
    assert Finish(int(cut.finish_B)) is Finish.STOP
