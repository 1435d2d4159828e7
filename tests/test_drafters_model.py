"""The model drafter: its tree against a teacher-forced run, and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafter_views import (
    CPU,
    PAGE,
    TINY,
    law_of,
    no_features,
    paths_of,
    proposed,
    tiny_decoder,
    view_of,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from furcate.config import DraftOptions
from furcate.drafters.around import around_model
from furcate.drafters.base import Tokens, View
from furcate.drafters.draft_cache import Room
from furcate.drafters.plausible import PRIOR
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.drafters.trust import Trust
from furcate.engine.target import chain
from furcate.kernels.draft import Verdict
from furcate.kernels.grow import ratios
from furcate.kernels.select import select
from furcate.models.causal import causal_attend
from furcate.verify.noise import gumbel_noise

CAPACITY = 4
OPTIONS = DraftOptions(depth=3, topk=3)
LONG = [(7 * i) % 23 for i in range(30)]
SHORT = [5, 2]
MIDDLE = [(5 * i + 1) % 23 for i in range(18)]


def drafter_of(options: DraftOptions = OPTIONS, vocab: int = TINY.vocab_size) -> RecurrentDrafter:
    room = Room(capacity=CAPACITY, pages=40, page_size=PAGE, vocab=vocab, device=CPU)
    return around_model(tiny_decoder(), options, room)


def trust_of(drafter: RecurrentDrafter) -> Trust:
    return drafter.plausible.trust


def read_prompt(drafter: RecurrentDrafter, view: View, step: int = 7) -> None:
    """Hand over everything before the root in stretches, as the engine does."""
    for b in range(len(view.length_B)):
        length = int(view.length_B[b])
        for start in range(0, length, step):
            end = min(start + step, length)
            one = View(
                slot_B=view.slot_B[b : b + 1],
                tokens=Tokens(view.tokens_BW[b : b + 1, :end]),
                length_B=torch.tensor([start]),
                table_BS=view.table_BS[b : b + 1],
                law=law_of([0.0]),
            )
            drafter.read(one, chain(one.tokens_BW[:, start:], torch.tensor([end - start])))


def teacher_forced(text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(logits after each token [T, V], keys of all layers [L, T, K, D]) of one causal pass."""
    decoder, keys = tiny_decoder(), []

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys.append(k_TKD)
        return causal_attend(layer, q_THD, k_TKD, v_TKD)

    hidden_TC = decoder(torch.tensor(text), torch.arange(len(text)), attend)
    return decoder.logits(hidden_TC), torch.stack(keys)


def expected_value(view: View, b: int, path: Sequence[int]) -> float:
    """log value of a path, from one causal pass over the text and the path."""
    root, temperature = int(view.length_B[b]), float(view.law.temperature_B[b])
    text = view.tokens_BW[b, : root + 1].tolist()
    logits_TV = teacher_forced([*text, *path])[0].float()
    total, scale = 0.0, PRIOR.scale(1)
    for d, token in enumerate(path):
        position = torch.tensor([[root + d + 1]])
        seed, choice = view.law.seed_B[b : b + 1], view.law.choice_B[b : b + 1]
        noise_V = gumbel_noise(seed, position, choice, TINY.vocab_size)[0, 0]
        score_V = scale.beta * logits_TV[root + d] + temperature * noise_V
        spread = max(scale.sigma * temperature, scale.floor)
        total += float((score_V / spread).log_softmax(0)[token].clamp_max(-0.005))
    return total


@pytest.mark.parametrize(
    "temperatures", [(0.0, 0.0, 0.0), (1.0, 0.0, 0.3)], ids=["greedy", "mixed"]
)
def test_every_node_is_worth_what_a_teacher_forced_run_says(temperatures: Sequence[float]) -> None:
    view = view_of([LONG, SHORT, MIDDLE], temperatures=temperatures)
    drafter = drafter_of()
    read_prompt(drafter, view)
    proposal = proposed(drafter, view)
    for b in range(3):
        found = paths_of(proposal, b)
        assert len(found) == drafter.pool
        expected = {path: expected_value(view, b, path) for path in found}
        assert found == pytest.approx(expected, abs=2e-4)


def test_the_tree_check_notices_a_prompt_that_was_never_read() -> None:
    view, drafter = view_of([LONG]), drafter_of()
    found = paths_of(proposed(drafter, view))
    expected = {path: expected_value(view, 0, path) for path in found}
    assert found != pytest.approx(expected, abs=2e-4)


def cached_keys(drafter: RecurrentDrafter, view: View, b: int, tokens: int) -> Tensor:
    position_T = torch.arange(tokens)
    slot_T = view.table_BS[b, position_T // PAGE] * PAGE + position_T % PAGE
    return drafter.cache.keys.k_LSKD[:, slot_T]


@pytest.mark.parametrize("step", [1, 2, 4], ids="{} tokens a round".format)
def test_keys_of_committed_tokens_equal_a_teacher_forced_run(step: int) -> None:
    whole, drafter = [(11 * i + i // 5) % 23 for i in range(44)], drafter_of()
    read_prompt(drafter, view_of([whole[:10]], width=len(whole)))
    for end in range(10, len(whole), step):
        proposed(drafter, view_of([whole[:end]], width=len(whole), garbage=end % 23))
    view = view_of([whole[:end]], width=len(whole))
    keys = teacher_forced(whole[:end])[1]
    # the root's keys lie in scratch until it is scored again in the next round
    assert torch.allclose(cached_keys(drafter, view, 0, end - 1), keys[:, :-1], atol=1e-10, rtol=0)


def test_the_key_check_notices_a_round_that_was_longer_than_the_draft() -> None:
    whole, drafter = [(11 * i + i // 5) % 23 for i in range(44)], drafter_of()
    read_prompt(drafter, view_of([whole[:10]], width=len(whole)))
    proposed(drafter, view_of([whole[:30]], width=len(whole)))
    keys = teacher_forced(whole[:30])[1]
    cached = cached_keys(drafter, view_of([whole[:30]], width=len(whole)), 0, 29)
    assert not torch.allclose(cached, keys[:, :-1], atol=1e-10, rtol=0)


def test_roots_whose_pages_are_not_reserved_yet_do_not_collide() -> None:
    texts = [LONG[:17], MIDDLE[:17]]  # both roots open a page of their own
    alone = []
    for b, text in enumerate(texts):
        view, drafter = view_of([text, text]), drafter_of()
        read_prompt(drafter, view)
        alone.append(paths_of(proposed(drafter, view), b))
    view, drafter = view_of(texts), drafter_of()
    read_prompt(drafter, view)
    view.table_BS[:, 1:] = 0
    proposal = proposed(drafter, view)
    for b in range(2):
        assert paths_of(proposal, b) == pytest.approx(alone[b], abs=1e-5)


def test_a_request_does_not_see_its_neighbours() -> None:
    texts = [LONG, SHORT, MIDDLE]
    view, drafter = view_of(texts, temperatures=[1.0, 0.5, 0.1]), drafter_of()
    read_prompt(drafter, view)
    together = proposed(drafter, view)
    for b in range(3):
        one = slice(b, b + 1)
        law = replace(
            view.law,
            temperature_B=view.law.temperature_B[one],
            seed_B=view.law.seed_B[one],
            choice_B=view.law.choice_B[one],
        )
        alone = proposed(
            drafter,
            replace(
                view,
                slot_B=view.slot_B[one],
                tokens=Tokens(view.tokens_BW[one]),
                length_B=view.length_B[one],
                table_BS=view.table_BS[one],
                law=law,
            ),
        )
        assert paths_of(together, b) == pytest.approx(paths_of(alone), abs=1e-5)


def test_the_noise_decides_between_close_tokens() -> None:
    drafter = drafter_of()
    greedy, warm = view_of([LONG]), view_of([LONG], temperatures=[2.0])
    read_prompt(drafter, greedy)
    assert set(paths_of(proposed(drafter, greedy))) != set(paths_of(proposed(drafter, warm)))


def test_no_token_outside_the_targets_vocabulary_is_proposed() -> None:
    view, drafter = view_of([LONG]), drafter_of(vocab=5)
    read_prompt(drafter, view)
    assert int(proposed(drafter, view).tokens_BP.max()) < 5


def test_forbidden_tokens_are_not_proposed() -> None:
    view, drafter = view_of([LONG]), drafter_of()
    allowed_BV = torch.zeros(1, TINY.vocab_size, dtype=torch.bool)
    allowed_BV[0, [3, 8]] = True
    view = replace(view, law=replace(view.law, allowed_BV=allowed_BV))
    read_prompt(drafter, view)
    found = paths_of(proposed(drafter, view))
    assert {token for path in found for token in path} == {3, 8}


def test_a_copied_page_carries_the_drafts_keys_along() -> None:
    view, drafter = view_of([LONG]), drafter_of()
    read_prompt(drafter, view)
    page = int(view.table_BS[0, 0])
    drafter.copy_page(page, 39)
    k_LSKD = drafter.cache.keys.k_LSKD
    old, new = (k_LSKD[:, p * PAGE : (p + 1) * PAGE] for p in (page, 39))
    assert old.abs().sum() > 0
    assert torch.equal(old, new)


@pytest.mark.parametrize("accepted", [0, 2], ids=["refused", "accepted"])
def test_the_weights_are_corrected_by_what_was_accepted(accepted: int) -> None:
    view, drafter = view_of([LONG], temperatures=[1.0]), drafter_of()
    read_prompt(drafter, view)
    proposal = proposed(drafter, view)
    draft = select(proposal, view.tokens_BW[:, -1], 4, torch.tensor([4]))
    path = torch.tensor([[0, min(1, accepted), min(2, accepted), min(2, accepted)]])
    verdict = Verdict(path, path, torch.tensor([accepted + 1]), torch.tensor([accepted]))
    for _ in range(5):
        drafter.learn(view, draft, verdict, no_features(draft))
    trust = trust_of(drafter)
    factor = ratios((trust.expected_K, trust.accepted_K))
    assert factor.max() > 1 if accepted else factor.min() < 1


def test_the_dummy_request_teaches_nothing() -> None:
    view, drafter = view_of([LONG], slots=[CAPACITY]), drafter_of()
    draft = select(proposed(drafter, view), view.tokens_BW[:, -1], 4, torch.tensor([4]))
    path = torch.tensor([[0, 1, 2, 2]])
    verdict = Verdict(path, path, torch.tensor([3]), torch.tensor([2]))
    drafter.learn(view, draft, verdict, no_features(draft))
    assert trust_of(drafter).expected_K.sum() == 0


def test_propose_and_learn_read_no_value_on_the_host() -> None:
    with FakeTensorMode():
        view, drafter = view_of([LONG, SHORT], temperatures=[1.0, 0.0]), drafter_of()
        proposal = proposed(drafter, view)
        draft = select(proposal, view.tokens_BW[:, -1], 4, torch.tensor([4, 4]))
        path = torch.zeros(2, 4, dtype=torch.int64)
        verdict = Verdict(path, path, path[:, 0] + 1, path[:, 0])
        drafter.learn(view, draft, verdict, no_features(draft))
    assert proposal.value_BP.shape == (2, drafter.pool)
