"""The draft head in Triton against the torch reference, and the reference against its formula.

Legend: N rows, V draft vocabulary, C children.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.drafters.plausible import log_weights
from furcate.kernels import draft_head_triton
from furcate.kernels.draft_head import Children, draft_head
from furcate.kernels.draft_head_triton import draft_head as on_device
from furcate.kernels.draws import Draws
from furcate.tree.calibration import DepthScale
from furcate.verify.noise import gumbel_at

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

TIE = 1e-4  # closer scores may change places
# the interpreter's worst of 60 random cases is 2e-6; a GPU's logarithms move noise by as much
TOLERANCE = 1e-5
SCALE = DepthScale(beta=1.1, sigma=0.9, floor=0.6)
INF, NAN = float("inf"), float("nan")
# the interpreter sorts a thousand keys in half a second
SIZE = 131 if DEVICE.type == "cpu" else 32003


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(draft_head_triton, "_BLOCKS", 16)


@dataclass(frozen=True)
class Ask:
    logits_NV: Tensor
    draws: Draws
    token_V: Tensor | None
    count: int
    scale: DepthScale = SCALE

    @property
    def scored_NV(self) -> Tensor:
        """The columns that count."""
        return self.logits_NV if self.token_V is None else self.logits_NV[:, : len(self.token_V)]

    def noise_NV(self) -> Tensor:
        draws = self.draws
        ids_V = torch.arange(self.logits_NV.shape[1]) if self.token_V is None else self.token_V
        seed_N1, position_N1, choice_N1 = (
            x[:, None] for x in (draws.seed_B, draws.position_T, draws.choice_B)
        )
        return gumbel_at(seed_N1, position_N1, choice_N1, ids_V)

    def told(self) -> Children:
        temperature_N, noise_NV = self.draws.temperature_B, self.noise_NV()
        return draft_head(self.scored_NV, temperature_N, noise_NV, self.scale, self.count)

    def run(self) -> Children:
        wide = torch.full((len(self.logits_NV), self.logits_NV.shape[1] + 8), NAN)
        wide = wide.to(self.logits_NV.dtype)
        wide[:, :-8] = self.logits_NV
        draws = Draws(*(getattr(self.draws, n).to(DEVICE) for n in Draws.__dataclass_fields__))
        token_V = None if self.token_V is None else self.token_V.to(DEVICE)
        logits_NV = wide.to(DEVICE)[:, :-8]
        children = on_device(logits_NV, draws, self.scale, self.count, token_V)
        return Children(*(getattr(children, n).cpu() for n in Children.__dataclass_fields__))


def ask(
    rows: int,
    vocab: int,
    count: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    of: int | None = None,
) -> Ask:
    """Random rows; a third greedy. `of`: the tokens are some of so many, in order."""
    rng = torch.Generator().manual_seed(seed)
    warm_N = torch.rand(rows, generator=rng) * 1.7 + 0.3
    draws = Draws(
        temperature_B=torch.where(torch.arange(rows) % 3 == 1, 0.0, warm_N),
        seed_B=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng),
        position_T=torch.randint(0, 200_000, (rows,), generator=rng),
        choice_B=torch.randint(0, 4, (rows,), generator=rng),
    )
    token_V = None if of is None else torch.randperm(of, generator=rng)[:vocab].sort().values
    columns = vocab if of is None else vocab + 3  # a padded head: the last columns do not count
    logits_NV = (torch.randn(rows, columns, generator=rng) * 3).to(dtype)
    return Ask(logits_NV, draws, token_V, count)


def faults(case: Ask, children: Children) -> list[str]:
    """What differs from the torch reference by more than rounding."""
    told = case.told()
    found = []
    if not torch.allclose(children.weight_NC, told.weight_NC, rtol=0, atol=TOLERANCE):
        found.append("weights")
    if not torch.allclose(children.entropy_N, told.entropy_N, rtol=0, atol=TOLERANCE):
        found.append("entropy")
    # one more than asked for, so that the last one's neighbour is known too
    vocab = case.scored_NV.shape[1]
    more = replace(case, count=min(case.count + 1, vocab)).told().weight_NC.double()
    gap = torch.nn.functional.pad(more[:, :-1] - more[:, 1:], (1, 1), value=INF)
    clear = (gap[:, :-1] > 2 * TIE) & (gap[:, 1:] > 2 * TIE)
    if (clear[:, : case.count] & (children.word_NC != told.word_NC)).any():
        found.append("words")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "count"), [(8, 8), (5, 3), (64, 8), (65, 16), (SIZE, 10)])
def test_children_are_those_of_the_reference(vocab: int, count: int, dtype: torch.dtype) -> None:
    case = ask(5, vocab, count, vocab, dtype)
    assert faults(case, case.run()) == []


@pytest.mark.parametrize(
    ("vocab", "of", "count"), [(SIZE, SIZE + 5000, 8), (130, 140, 4), (3, 49152, 1)]
)
def test_noise_is_keyed_by_the_targets_ids(vocab: int, of: int, count: int) -> None:
    case = ask(4, vocab, count, vocab, of=of)
    assert case.token_V is not None and len(case.token_V) == vocab
    assert not torch.equal(case.token_V, torch.arange(vocab)), "ids and ranks have to differ"
    children = case.run()
    assert faults(case, children) == []
    by_rank = replace(case, logits_NV=case.scored_NV, token_V=None)
    assert faults(by_rank, children) != []


def test_the_comparison_can_fail() -> None:
    case = ask(6, 100, 8)
    children = case.run()
    later = replace(case, draws=replace(case.draws, position_T=case.draws.position_T + 1))
    assert set(faults(later, children)) == {"weights", "entropy", "words"}
    warmer = replace(case, scale=DepthScale(1.1, 0.95, 0.6))
    assert "weights" in faults(warmer, children)


def test_greedy_rows_are_equal_bit_for_bit_ties_and_all() -> None:
    case = ask(6, SIZE, 16, dtype=torch.bfloat16)
    rounded = (case.logits_NV * 2).round() / 2  # every value many times
    cold = replace(case.draws, temperature_B=torch.zeros(6))
    case = replace(case, logits_NV=rounded, draws=cold)
    assert torch.equal(case.run().word_NC, case.told().word_NC)


def test_tokens_that_may_not_be_chosen_come_last() -> None:
    case = ask(4, 130, 6)
    case.logits_NV[0, torch.arange(130) != 77] = -INF
    case.logits_NV[1, :110] = -INF  # the whole of the first tile
    case.logits_NV[2, 3:] = -INF
    children = case.run()
    assert faults(case, children) == []
    assert children.word_NC[0, 0] == 77 and children.weight_NC[0].tolist() == [0.0] + [-INF] * 5
    assert children.entropy_N[0] == 0
    assert (children.word_NC[1] >= 110).all()
    assert set(children.word_NC[2, :3].tolist()) == {0, 1, 2}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf - inf
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_has_no_weights(temperature: float) -> None:
    case = ask(5, 120, 4)
    case = replace(case, draws=replace(case.draws, temperature_B=torch.full((5,), temperature)))
    case.logits_NV[0, 110] = NAN
    case.logits_NV[1, 3] = INF
    case.logits_NV[2] = -INF
    case.logits_NV[3] = NAN
    for children in (case.run(), case.told()):
        assert children.weight_NC.isnan().all(1).tolist() == [True] * 4 + [False]
        assert ((children.word_NC >= 0) & (children.word_NC < 120)).all()


def test_the_reference_is_the_drafters_formula() -> None:
    case = ask(7, 400, 5)
    temperature_N = case.draws.temperature_B
    weight_NV = torch.cat(
        [
            log_weights(row[None, None], t[None], noise[None], SCALE)[0]
            for row, t, noise in zip(case.logits_NV, temperature_N, case.noise_NV(), strict=True)
        ]
    )
    told = case.told()
    best = weight_NV.topk(5, 1)
    assert torch.equal(told.word_NC, best.indices)
    assert torch.equal(told.weight_NC, best.values)
    assert torch.equal(told.entropy_N, -(weight_NV.exp() * weight_NV).sum(1))
