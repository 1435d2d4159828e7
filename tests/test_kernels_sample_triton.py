"""The sampler in Triton against the torch path, and its noise word by word.

Legend: B rows, V vocabulary, N words, Q blocks of four tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from triton_device import DEVICE, MARKS
from verify_cases import law_of

from furcate.kernels import noise_triton, sample_triton
from furcate.kernels.draws import Draws
from furcate.kernels.philox import Counter, philox
from furcate.kernels.sample_triton import sample, tl, triton
from furcate.verify import noise
from furcate.verify.law import plain_rows
from furcate.verify.process import Choice, Processed, choose, process

pytestmark = MARKS

TIE = 1e-4  # closer scores may fall either way
# twice the worst of a million random words: float32 logarithms of torch, numpy and CUDA
NOISE_TOLERANCE = 4e-6
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Ask:
    """Rows of logits, and whose they are."""

    logits_BV: Tensor
    temperature_B: Tensor
    seed_B: Tensor
    length_B: Tensor  # position of the last token; the one sampled goes behind it
    choice_B: Tensor

    def judged(self) -> tuple[Processed, Choice]:
        """What the torch path says, on the CPU."""
        batch, vocab = self.logits_BV.shape
        law = law_of(
            batch,
            vocab,
            temperature_B=self.temperature_B,
            seed_B=self.seed_B,
            choice_B=self.choice_B,
        )
        rows = plain_rows(torch.zeros(batch, dtype=torch.int64), self.length_B)
        processed = process(self.logits_BV[:, None], law, rows)
        return processed, choose(processed)

    def run(self) -> tuple[Tensor, Tensor]:
        """(tokens, broken rows) of the kernel, its logits lying between poison."""
        broken_B = torch.empty(len(self.seed_B), dtype=torch.bool, device=DEVICE)
        token_B = sample(
            spaced(self.logits_BV).to(DEVICE),
            draws(self.temperature_B, self.seed_B, self.choice_B, self.length_B + 1),
            broken_B,
        )
        assert token_B.dtype == torch.int64
        return token_B.cpu(), broken_B.cpu()

    def only(self, rows: slice) -> Ask:
        return Ask(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def draws(*law_T: Tensor) -> Draws:
    return Draws(*(x_T.to(DEVICE) for x_T in law_T))


def spaced(logits_BV: Tensor) -> Tensor:
    """The same rows with NaN behind each."""
    wide = torch.full((len(logits_BV), logits_BV.shape[1] + 8), NAN, dtype=logits_BV.dtype)
    wide[:, : logits_BV.shape[1]] = logits_BV
    return wide[:, : logits_BV.shape[1]]


def ask(batch: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Ask:
    """Random rows; a third of them greedy, the others between T = 0.3 and 2."""
    rng = torch.Generator().manual_seed(seed)
    warm_B = torch.rand(batch, generator=rng) * 1.7 + 0.3
    return Ask(
        logits_BV=(torch.randn(batch, vocab, generator=rng) * 3).to(dtype),
        temperature_B=torch.where(torch.arange(batch) % 3 == 1, 0.0, warm_B),
        seed_B=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=rng),
        length_B=torch.randint(0, 200_000, (batch,), generator=rng),
        choice_B=torch.randint(0, 4, (batch,), generator=rng),
    )


def differing(case: Ask, token_B: Tensor) -> int:
    """Rows whose token is not the torch path's, rounding ties aside."""
    processed, choice = case.judged()
    score_BV = processed.scores_BRV[:, 0]
    if score_BV.shape[1] == 1:
        return int((token_B != 0).sum())
    best_B2 = score_BV.topk(2).values
    clear_B = best_B2[:, 0] - best_B2[:, 1] > TIE
    return int((clear_B & (token_B != choice.token_BR[:, 0])).sum())


@pytest.fixture
def big_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small batches as large ones are cut: one program a row."""
    monkeypatch.setattr(sample_triton, "_PROGRAMS", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 4, 511, 512, 517, 2052, 4999])
def test_tokens_are_those_of_the_torch_path(vocab: int, dtype: torch.dtype) -> None:
    case = ask(6, vocab, vocab, dtype)
    token_B, broken_B = case.run()
    assert differing(case, token_B) == 0
    assert not broken_B.any()


@pytest.mark.parametrize("vocab", [7, 2048, 6001])
@pytest.mark.usefixtures("big_tiles")
def test_one_program_a_row_finds_the_same(vocab: int) -> None:
    case = ask(9, vocab, vocab)
    assert differing(case, case.run()[0]) == 0


def test_the_comparison_can_fail() -> None:
    case = ask(9, 512)
    assert differing(case, case.run()[0]) == 0
    assert differing(replace(case, length_B=case.length_B + 1), case.run()[0]) > 2


def test_a_row_does_not_depend_on_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ask(5, 3000, 2)
    token_B = case.run()[0]
    alone = [int(case.only(slice(b, b + 1)).run()[0]) for b in range(5)]
    assert token_B.tolist() == alone
    for programs in (1, 6, 11):
        monkeypatch.setattr(sample_triton, "_PROGRAMS", programs)
        assert case.run()[0].tolist() == alone


@pytest.mark.parametrize("programs", [1, 512])
def test_equal_scores_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(sample_triton, "_PROGRAMS", programs)
    case = ask(3, 5000)
    flat_BV = torch.zeros(3, 5000)
    flat_BV[1, [700, 701, 4998]] = 1.0
    flat_BV[2, [3, 4999]] = 1.0
    greedy = replace(case, logits_BV=flat_BV, temperature_B=torch.zeros(3))
    assert greedy.run()[0].tolist() == [0, 700, 3]


def test_shared_noise_makes_equal_rows_equal_and_a_seed_tells_them_apart() -> None:
    one = ask(1, 999)
    same = Ask(*(getattr(one, name).repeat_interleave(4, 0) for name in one.__dataclass_fields__))
    assert len(set(same.run()[0].tolist())) == 1
    flat = replace(same, logits_BV=torch.zeros(4, 999), seed_B=torch.arange(4))
    assert len(set(flat.run()[0].tolist())) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("programs", [1, 512])
def test_rows_that_allow_no_choice_are_told(
    monkeypatch: pytest.MonkeyPatch, programs: int, temperature: float
) -> None:
    monkeypatch.setattr(sample_triton, "_PROGRAMS", programs)
    case = replace(ask(7, 1100), temperature_B=torch.full((7,), temperature))
    case.logits_BV[0, 1099] = NAN
    case.logits_BV[1, :] = NAN
    case.logits_BV[2, 5] = INF
    case.logits_BV[3, :] = -INF
    case.logits_BV[4, 7:] = -INF  # seven tokens are left, which is sound
    case.logits_BV[5, 0] = NAN
    token_B, broken_B = case.run()
    assert broken_B.tolist() == [True, True, True, True, False, True, False]
    assert torch.equal(broken_B, case.judged()[1].broken_BR[:, 0])
    assert token_B[4] < 7
    assert differing(case.only(slice(4, 5)), token_B[4:5]) == 0
    assert differing(case.only(slice(6, 7)), token_B[6:7]) == 0


def test_rows_of_a_tree_share_their_requests_law() -> None:
    """Three rows a request at positions of their own are as nine rows that name everything."""
    case, position_T = ask(3, 513, 5), torch.arange(40, 49)
    logits_TV = ask(9, 513, 6).logits_BV.to(DEVICE)
    laws = (case.temperature_B, case.seed_B, case.choice_B)
    few = draws(*laws, position_T)
    all_ = draws(*(x.repeat_interleave(3) for x in laws), position_T)
    assert torch.equal(sample(logits_TV, few), sample(logits_TV, all_))
    swapped = draws(*(x.repeat(3) for x in laws), position_T)
    assert not torch.equal(sample(logits_TV, few), sample(logits_TV, swapped))


def test_who_does_not_ask_is_not_told() -> None:
    case = ask(2, 50)
    arguments = (case.temperature_B, case.seed_B, case.choice_B, case.length_B + 1)
    token_B = sample(case.logits_BV.to(DEVICE), draws(*arguments))
    assert differing(case, token_B.cpu()) == 0


@triton.jit
def _noise_of(word_ptr, gumbel_ptr, ceiling_ptr, count, N: tl.constexpr):
    at_N = tl.program_id(0) * N + tl.arange(0, N)
    word_N = tl.load(word_ptr + at_N, mask=at_N < count, other=1).to(tl.uint32)
    tl.store(gumbel_ptr + at_N, noise_triton.gumbel(word_N), mask=at_N < count)
    tl.store(ceiling_ptr + at_N, noise_triton.ceiling(word_N), mask=at_N < count)


def test_noise_keeps_to_its_formula_and_below_its_ceiling() -> None:
    edges = [0, 1, 2, 127, 128, 2**23, 2**24, 2**25, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128]
    rng = torch.Generator().manual_seed(3)
    word_N = torch.randint(0, 2**32, (200_000,), generator=rng) >> torch.randint(
        0, 33, (200_000,), generator=rng
    )
    near = torch.tensor([*edges, 2**32 - 1]).repeat(3) + torch.arange(-1, 2).repeat_interleave(13)
    word_N = torch.cat([word_N, near.clamp(0, 2**32 - 1)]).to(DEVICE)
    gumbel_N, ceiling_N = (torch.full(word_N.shape, NAN, device=DEVICE) for _ in "gc")
    blocks = (triton.cdiv(len(word_N), 4096),)
    _noise_of[blocks](word_N, gumbel_N, ceiling_N, len(word_N), N=4096, enable_fp_fusion=False)
    told_N = noise.gumbel(noise.uniform(word_N))
    assert (gumbel_N - told_N).abs().max() <= NOISE_TOLERANCE
    over_N = ceiling_N - torch.maximum(gumbel_N, told_N)
    assert over_N.min() > 5e-5
    large_N = (word_N >= 2**6) & (word_N < 2**22)
    assert over_N[large_N].max() < 0.07


@triton.jit
def _words(by_block_ptr, by_token_ptr, seed, position, choice, Q: tl.constexpr):
    block_Q = tl.arange(0, Q)
    word_Q4 = noise_triton.words_of_blocks(seed, position, choice, block_Q)
    at_Q4 = block_Q[:, None] * 4 + tl.arange(0, 4)
    tl.store(by_block_ptr + at_Q4, word_Q4.to(tl.int64))
    token_V = tl.arange(0, 4 * Q)
    word_V = noise_triton.words_at(seed, position, choice, token_V)
    tl.store(by_token_ptr + token_V, word_V.to(tl.int64))


@pytest.mark.parametrize(
    ("seed", "position", "choice"),
    [(1 << 40, 1, 2), (-1, 2**32 - 1, 1 << 20), (-(2**62) + 12345, 130_000, 3)],
)
def test_words_are_those_of_philox(seed: int, position: int, choice: int) -> None:
    by_block, by_token = (torch.full((64,), -1, device=DEVICE) for _ in "bt")
    one = torch.ones(1, dtype=torch.int64)
    _at[(1,)](*(one.to(DEVICE) * x for x in (seed, position, choice)), by_block, by_token, Q=16)
    key = torch.tensor([seed & (2**32 - 1), (seed >> 32) & (2**32 - 1)])
    counter = Counter(torch.arange(16), one * position, one * noise.TARGET, one * choice)
    told = philox(counter, key[0], key[1]).flatten()
    assert torch.equal(by_block.cpu(), told)
    assert torch.equal(by_token.cpu(), told)


@triton.jit
def _at(seed_ptr, position_ptr, choice_ptr, by_block_ptr, by_token_ptr, Q: tl.constexpr):
    seed, position, choice = tl.load(seed_ptr), tl.load(position_ptr), tl.load(choice_ptr)
    _words(by_block_ptr, by_token_ptr, seed, position, choice, Q)


Draw = Callable[[Tensor, Tensor], Tensor]


def surprise(draw: Draw, vocab: int, draws: int) -> float:
    """The chance of a chi-square at least as large if `draw` follows softmax(logits / T)."""
    rng = torch.Generator().manual_seed(vocab)
    logits_V = (torch.randn(vocab, generator=rng) * 1.5).to(DEVICE)
    counts_V = torch.zeros(vocab, device=DEVICE, dtype=torch.float64)
    for first in range(0, draws, 65536):
        seed_B = torch.arange(first, min(first + 65536, draws), device=DEVICE)
        counts_V += torch.bincount(draw(logits_V, seed_B), minlength=vocab)
    law_V = (logits_V.double() / 0.8).softmax(0)
    # tokens in order of chance, in bins of equal rank, so that none is nearly empty
    order_V = law_V.argsort(descending=True)
    bins = max(2, min(64, vocab, draws // 15))
    expected = [float(x.sum()) * draws for x in law_V[order_V].tensor_split(bins)]
    found = [float(x.sum()) for x in counts_V[order_V].tensor_split(bins)]
    kept = [(f, e) for f, e in zip(found, expected, strict=True) if e >= 10]
    rest = (sum(found) - sum(f for f, _ in kept), sum(expected) - sum(e for _, e in kept))
    kept += [rest] if rest[1] >= 10 else []
    statistic = sum((f - e) ** 2 / e for f, e in kept)
    return float(chi2.sf(statistic, len(kept) - 1))


def drawn(logits_V: Tensor, seed_B: Tensor) -> Tensor:
    batch = len(seed_B)
    temperature_B = torch.full((batch,), 0.8, device=DEVICE)
    other_B = torch.zeros_like(seed_B)
    draws = Draws(temperature_B, seed_B, other_B, other_B + 7)
    return sample(logits_V.expand(batch, -1), draws)


def too_warm(logits_V: Tensor, seed_B: Tensor) -> Tensor:
    return drawn(logits_V / 4, seed_B)


# the interpreter takes 20 ms a draw; there it is the comparison with the torch path that tells
CASES = [(v, 4_000_000) for v in (8, 64, 512, 49152)] if DEVICE.type == "cuda" else [(8, 150)]


@pytest.mark.parametrize(("vocab", "draws"), CASES)
def test_draws_follow_the_law(vocab: int, draws: int) -> None:
    """False alarms: one in a million a case (and the draws are always the same)."""
    assert surprise(drawn, vocab, draws) > 1e-6


def test_the_test_of_the_law_can_fail() -> None:
    assert surprise(too_warm, 8, 150) < 1e-6
