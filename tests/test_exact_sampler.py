"""The sampler's law, and whole streams across rounds, with the real noise.

Seeds are fixed, so these tests give the same answer every time. For another implementation of the
same law each chi-square threshold would raise a false alarm once in a million (P_MIN), and the
uniformity test once in ten thousand. Legend: B requests, R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from verify_cases import draft_of, filtered_law, law_of, stacked

from furcate.kernels.draft import Draft, Verdict
from furcate.verify.coupled import verify
from furcate.verify.law import Law, Rows, noise_of, plain_rows
from furcate.verify.process import choose, process

P_MIN = 1e-6
CHUNK = 20_000


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Of a chi-square test; bins that expect fewer than 5 are taken together.

    0 where a token of probability 0 was drawn.
    """
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    counts, expected = (
        np.append(x[~small], x[small].sum()) for x in (counts.astype(float), expected)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(chi2, max(len(counts) - 1, 1)))


def drawn(logits_V: Tensor, draws: int, **options: float) -> np.ndarray:
    """Counts of the tokens that plain decoding draws; half the seeds at each of two positions."""
    vocab = len(logits_V)
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, draws, CHUNK):
        seed_B = torch.arange(start, min(start + CHUNK, draws))
        batch = len(seed_B)
        law = law_of(batch, vocab, seed_B=seed_B // 2, **options)
        rows = plain_rows(torch.zeros(batch, dtype=torch.int64), 100 + seed_B % 2)
        processed = process(logits_V.expand(batch, 1, vocab), law, rows)
        counts += np.bincount(choose(processed).token_BR[:, 0].numpy(), minlength=vocab)
    return counts


def some_logits(vocab: int, seed: int) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.7


CASES = [
    (8, {"temperature_B": 1.0}),
    (8, {"temperature_B": 0.3}),
    (64, {"temperature_B": 1.5}),
    (256, {"temperature_B": 0.8}),
    (8, {"temperature_B": 1.0, "top_k_B": 3}),
    (64, {"temperature_B": 1.2, "top_p_B": 0.8}),
    (64, {"temperature_B": 1.0, "min_p_B": 0.1}),
    (64, {"temperature_B": 1.5, "top_k_B": 30, "top_p_B": 0.9, "min_p_B": 0.02}),
]


@pytest.mark.parametrize(("vocab", "options"), CASES, ids=str)
def test_the_sampler_has_the_law_that_was_asked_for(vocab: int, options: dict[str, float]) -> None:
    logits_V = some_logits(vocab, seed=vocab)
    law = filtered_law(
        logits_V.tolist(),
        options["temperature_B"],
        int(options.get("top_k_B", 0)),
        options.get("top_p_B", 1.0),
        options.get("min_p_B", 0.0),
    )
    assert p_value(drawn(logits_V, 300_000, **options), np.array(law)) > P_MIN


def test_a_temperature_wrong_by_two_per_cent_would_be_seen() -> None:
    logits_V = some_logits(64, seed=64)
    law = filtered_law(logits_V.tolist(), 1.5, 0, 1.0, 0.0)
    assert p_value(drawn(logits_V, 300_000, temperature_B=1.53), np.array(law)) < P_MIN


def p_values(cases: int, draws: int, temperature_error: float) -> list[float]:
    """p-values of many random (law, temperature, top_p), all in one batch per few cases."""
    rng, vocab, found = np.random.default_rng(7), 8, []
    for case in range(cases):
        logits = rng.normal(size=vocab) * 1.5
        temperature, top_p = rng.uniform(0.5, 2.0), rng.uniform(0.3, 1.0)
        law = filtered_law(torch.tensor(logits).float().tolist(), temperature, 0, top_p, 0.0)
        if sum(p > 0 for p in law) < 2:
            continue
        options = {"temperature_B": temperature * temperature_error, "top_p_B": top_p}
        batch = law_of(draws, vocab, seed_B=torch.arange(draws) + case * draws, **options)
        rows = plain_rows(torch.zeros(draws).long(), torch.full((draws,), case))
        logits_BRV = torch.tensor(logits).float().expand(draws, 1, vocab)
        token_B = choose(process(logits_BRV, batch, rows)).token_BR[:, 0]
        found.append(p_value(np.bincount(token_B.numpy(), minlength=vocab), np.array(law)))
    return found


def test_p_values_over_many_laws_are_uniform() -> None:
    found = p_values(cases=250, draws=3000, temperature_error=1.0)
    assert len(found) > 150
    assert stats.kstest(found, "uniform").pvalue > 1e-4


def test_small_errors_would_make_p_values_uneven() -> None:
    found = p_values(cases=250, draws=3000, temperature_error=1.06)
    assert stats.kstest(found, "uniform").pvalue < 1e-4


# --- rounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A target whose next-token logits are a row of a table, and a drafter that has another one."""

    target_VV: Tensor
    drafter_VV: Tensor


def table(vocab: int, seed: int, error: float = 0.8) -> Table:
    rng = torch.Generator().manual_seed(seed)
    target_VV = torch.randn(vocab, vocab, generator=rng) * 1.2
    return Table(target_VV, target_VV + error * torch.randn(vocab, vocab, generator=rng))


Drafting = Callable[[Table, Tensor, Law, Tensor], Draft]


def no_draft(_: Table, root_B: Tensor, law: Law, length_B: Tensor) -> Draft:
    return plain_rows(root_B, length_B).draft


def drafted(table: Table, root_B: Tensor, noise_BDV: Tensor) -> Draft:
    """Two children of the root and, below the first, a chain of two."""
    vocab = len(table.drafter_VV)
    first_B2 = (table.drafter_VV[root_B] + noise_BDV[:, 0]).topk(min(2, vocab), -1).indices
    chain = [first_B2[:, 0]]
    for d in (1, 2):
        chain.append((table.drafter_VV[chain[-1]] + noise_BDV[:, d]).argmax(-1))
    tokens_BR = torch.stack([root_B, *chain, first_B2[:, 1]], 1)
    shape = draft_of([0] * 5, [0, 0, 1, 2, 0])
    return replace(stacked([shape]), **_spread(shape, len(root_B)), tokens_BR=tokens_BR)


def _spread(draft: Draft, batch: int) -> dict[str, Tensor]:
    names = ("parent_BR", "depth_BR", "end_BR", "value_BR")
    spread = {name: getattr(draft, name).expand(batch, -1) for name in names}
    return spread | {"live_B": draft.live_B.expand(batch)}


def static_draft(table: Table, root_B: Tensor, law: Law, length_B: Tensor) -> Draft:
    return drafted(table, root_B, torch.zeros(len(root_B), 3, 1))


def coupled_draft(table: Table, root_B: Tensor, law: Law, length_B: Tensor) -> Draft:
    """Looks at the very noise that will decide."""
    noise_BDV = noise_of(law, length_B, 2, len(table.target_VV))
    return drafted(table, root_B, noise_BDV * law.temperature_B[:, None, None])


Position = Callable[[Tensor], Tensor]


def by_position(length_B: Tensor) -> Tensor:
    return length_B


def by_depth_alone(length_B: Tensor) -> Tensor:
    """The noise of a node depends on its depth in the round, and comes back in the next one."""
    return torch.zeros_like(length_B)


@dataclass(frozen=True)
class Play:
    """Tokens of each stream, and how many each round had accepted and emitted."""

    tokens_BT: Tensor
    accepted_by_round: list[Tensor]
    count_by_round: list[Tensor]


def played(
    table: Table, law: Law, rounds: int, drafting: Drafting, position: Position = by_position
) -> Play:
    """Some rounds of draft, verify, commit, starting from token 0 at position 7."""
    batch = len(law.seed_B)
    out_BT = torch.zeros(batch, 4 * rounds + 1, dtype=torch.int64)
    done_B, length_B = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), 7)
    accepted, counts = [], []
    for _ in range(rounds):
        root_B = out_BT.gather(1, (done_B - 1).clamp_min(0)[:, None])[:, 0] * (done_B > 0)
        draft = drafting(table, root_B, law, position(length_B))
        rows = Rows(draft, position(length_B), int(draft.depth_BR.max()))
        verdict = verify(table.target_VV[draft.tokens_BR], law, rows).verdict
        law = committed(law, verdict)
        for k in range(verdict.emitted_BD.shape[1]):
            column_B = torch.where(k < verdict.count_B, done_B + k, out_BT.shape[1] - 1)
            out_BT[torch.arange(batch), column_B] = verdict.emitted_BD[:, k]
        done_B, length_B = done_B + verdict.count_B, length_B + verdict.count_B
        accepted.append(verdict.accepted_B)
        counts.append(verdict.count_B)
    return Play(out_BT[:, :-1], accepted, counts)


def committed(law: Law, verdict: Verdict) -> Law:
    """The law of the next round: every emitted token is counted."""
    assert law.counts_BV is not None
    kept_BD = torch.arange(verdict.emitted_BD.shape[1]) < verdict.count_B[:, None]
    counts_BV = law.counts_BV.scatter_add(1, verdict.emitted_BD, kept_BD.long())
    return replace(law, counts_BV=counts_BV, output_B=law.output_B + verdict.count_B)


def joint_p_values(drafting: Drafting, position: Position = by_position) -> Iterator[float]:
    """Of the first three tokens, and of the second round's first token per accepted length."""
    vocab, batch = 4, 300_000
    model = table(vocab, seed=21)
    law_VV = model.target_VV.double().softmax(-1).numpy()
    law = law_of(batch, vocab, temperature_B=1.0, seed_B=torch.arange(batch))
    play = played(model, law, 3, drafting, position)
    first_BT = play.tokens_BT[:, :3].numpy()
    joint = law_VV[0][:, None, None] * law_VV[:, :, None] * law_VV[None, :, :]
    counts = np.bincount(first_BT @ np.array([16, 4, 1]), minlength=64)
    yield p_value(counts, joint.flatten())
    last_B = play.tokens_BT.gather(1, play.count_by_round[0][:, None] - 1)[:, 0]
    next_B = play.tokens_BT.gather(1, play.count_by_round[0][:, None])[:, 0]
    for accepted in range(int(play.accepted_by_round[0].max()) + 1):
        here_B = play.accepted_by_round[0] == accepted
        pairs = np.bincount((last_B * vocab + next_B)[here_B].numpy(), minlength=16)
        share = pairs.reshape(4, 4).sum(1) / pairs.sum()
        yield p_value(pairs, (share[:, None] * law_VV).flatten())


@pytest.mark.parametrize("drafting", [no_draft, static_draft, coupled_draft])
def test_the_joint_law_is_the_targets_across_rounds(drafting: Drafting) -> None:
    found = list(joint_p_values(drafting))
    # the joint law, and one test for each accepted length from 0 to 3
    assert len(found) == (2 if drafting is no_draft else 5)
    assert min(found) > P_MIN


def test_noise_that_comes_back_in_the_next_round_would_be_seen() -> None:
    found = list(joint_p_values(static_draft, by_depth_alone))
    assert max(found) < P_MIN


def mixed_law(batch: int, vocab: int) -> Law:
    """Every option on, different in each request; a third of them greedy."""
    rng = torch.Generator().manual_seed(0)
    number = torch.arange(batch)
    return law_of(
        batch,
        vocab,
        seed_B=number,
        temperature_B=torch.where(number % 3 > 0, 0.5 + number % 5 / 4, 0.0),
        top_k_B=torch.where(number % 2 > 0, number % vocab, 0),
        top_p_B=torch.where(number % 4 > 0, 0.9, 1.0),
        min_p_B=torch.where(number % 5 > 0, 0.02, 0.0),
        repetition_B=1 + number % 3 / 10,
        presence_B=number % 7 / 10 - 0.3,
        frequency_B=number % 4 / 10 - 0.2,
        min_tokens_B=number % 6,
        stop_BS=torch.tensor([[1, 2, -1]]).expand(batch, -1),
        bias_BV=torch.randn(batch, vocab, generator=rng),
        allowed_BV=torch.rand(batch, vocab, generator=rng) < 0.9,
        prompt_BV=torch.rand(batch, vocab, generator=rng) < 0.3,
    )


def tokens_that_differ(position: Position) -> int:
    """Of 12 tokens in 3000 streams of every kind: speculation against plain decoding."""
    vocab, tokens = 24, 12
    model, law = table(vocab, seed=5, error=0.3), mixed_law(3000, vocab)
    plain = played(model, law, tokens, no_draft).tokens_BT[:, :tokens]
    differ = 0
    for drafting in (static_draft, coupled_draft):
        play = played(model, law, tokens, drafting, position)
        assert torch.stack(play.accepted_by_round).float().mean() > 0.5
        differ += int((play.tokens_BT[:, :tokens] != plain).sum())
    return differ


def test_speculation_gives_the_tokens_of_plain_decoding() -> None:
    assert tokens_that_differ(by_position) == 0


def test_noise_at_another_position_would_change_tokens() -> None:
    assert tokens_that_differ(lambda length_B: length_B + 1) > 1000
