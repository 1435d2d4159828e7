"""Parts of training: batches, columns of the loss, the loss in pieces, schedule, measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_corpus import recipe, target, write_corpus
from torch import Tensor

from furcate.errors import BadRequest
from furcate.heads.eagle import Eagle3
from furcate.heads.mtp import Mtp
from furcate.heads.spec import MedusaSpec
from furcate.kernels.packed_attention import Packing
from furcate.kernels.soft_cross_entropy import Objective, Scores
from furcate.models.causal import causal_attend
from furcate.train.batches import Batch, Order, lay_out, split
from furcate.train.corpus import Conversation, Corpus, Kind, Part
from furcate.train.held_out import HeldOut, Tally
from furcate.train.learner import Learner
from furcate.train.loss import Teacher, grade
from furcate.train.loss_vocabulary import Chooser, Columns
from furcate.train.recipe import HeadPlan, Recipe
from furcate.train.run import Run
from furcate.train.schedule import progress, rate
from furcate.train.session import begin
from furcate.train.shapes import Shape, eagle3_layers, plans

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Forty conversations of the tiny target."""
    return write_corpus(tmp_path_factory.mktemp("text"), 40)


def _talk(tokens: Sequence[int], *spans: tuple[int, int]) -> Conversation:
    return Conversation(np.array(tokens), tuple(Part(a, b, Kind.ANSWER) for a, b in spans))


def test_losses_are_taken_where_the_next_token_is_an_answer() -> None:
    talks = [_talk([10, 11, 12, 13, 14], (2, 4)), _talk([20, 21, 22], (0, 3)), _talk([30], (0, 1))]
    batch = lay_out(talks, 2, CPU)
    assert batch.tokens_TA.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 30, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert batch.packing.bounds == (0, 5, 8, 9)
    assert batch.packing.longest == 5
    # tokens 12 and 13 of the first; of the second only 22: nothing lies before 20, and slot 0 of
    # a draft is never computed, so 21 cannot be guessed
    assert batch.at_N.tolist() == [1, 2, 6]
    assert batch.tokens_TA[batch.at_N + 1].tolist() == [12, 13, 22]
    assert batch.rows(1).tolist() == [0, 1, 5]
    assert batch.rows(2).tolist() == [9, 0, 9]


def test_an_epoch_holds_every_conversation_once_in_an_order_of_its_own() -> None:
    order = Order(np.arange(50), seed=3)
    first, second = ([order.next() for _ in range(50)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert order.epochs == 2.0
    resumed = Order(np.arange(50), seed=3, taken=60)
    assert [resumed.next() for _ in range(40)] == second[10:]


def test_batches_are_full_and_only_their_last_conversation_is_cut(corpus: Corpus) -> None:
    parts = split(corpus, 4, seed=0)
    order = Order(parts.train_I, seed=0)
    for _ in range(5):
        before = order.taken
        talks = list(order.fill(corpus, 300))
        assert sum(len(talk.tokens) for talk in talks) == 300
        again = Order(parts.train_I, 0, before)
        whole = [corpus[again.next()] for _ in talks]
        for talk, one in zip(talks[:-1], whole, strict=False):
            assert talk.tokens.tolist() == one.tokens.tolist()
        assert talks[-1].tokens.tolist() == whole[-1].tokens[: len(talks[-1].tokens)].tolist()


def test_what_is_kept_for_measuring_is_never_learned_from(corpus: Corpus) -> None:
    parts = split(corpus, 4, seed=0)
    assert len(parts.held_out_I) == 4
    assert sorted([*parts.train_I, *parts.held_out_I]) == list(range(40))
    assert len(split(corpus, 64, seed=0).held_out_I) == 4  # at most a tenth
    assert split(corpus, 4, seed=1).held_out_I.tolist() != parts.held_out_I.tolist()


def _laws(rows: int, vocab: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=rng, dtype=torch.float64) * 2).log_softmax(1)


def test_columns_are_frequent_and_occurring_tokens_and_random_others() -> None:
    frequent_V = np.random.default_rng(0).permutation(200)
    chooser = Chooser(frequent_V, 40, seed=0, device=CPU)
    occurring = torch.from_numpy(frequent_V[100:105].copy())
    columns = chooser.choose(occurring, step=1)
    chosen = columns.token_D.tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == 40
    always = {*frequent_V[:30].tolist(), *occurring.tolist()}
    assert always <= set(chosen)
    for token, bias in zip(chosen, columns.bias_D.tolist(), strict=True):
        assert bias == pytest.approx(0.0 if token in always else math.log(165 / 5))
    assert chooser.choose(occurring, step=1).token_D.tolist() == chosen
    assert chooser.choose(occurring, step=2).token_D.tolist() != chosen
    everything = Chooser(frequent_V, 500, seed=0, device=CPU).choose(occurring, step=1)
    assert everything.token_D.tolist() == list(range(200)) and not everything.bias_D.any()


def test_sums_over_columns_stand_for_sums_over_the_vocabulary() -> None:
    """Of 2,000 steps the mean lies within 5 standard errors: a false alarm in 2 million runs."""
    law_V = _laws(1, 60, seed=0)[0].exp()
    chooser = Chooser(np.arange(60), 20, seed=0, device=CPU)
    sums = []
    for step in range(2000):
        columns = chooser.choose(torch.tensor([40, 41]), step)
        sums.append(float((law_V[columns.token_D] * columns.bias_D.exp()).sum()))
    off = abs(np.mean(sums) - 1.0) / (np.std(sums) / len(sums) ** 0.5)
    assert off < 5
    plain = law_V[chooser.choose(torch.tensor([40, 41]), 0).token_D].sum()
    assert abs(float(plain) - 1.0) > 0.05  # without the bias the tail is missing


@pytest.mark.parametrize("most", [1, 7, 100])
def test_the_loss_in_pieces_is_that_of_autograd(most: int) -> None:
    rng = torch.Generator().manual_seed(1)
    output_VC = torch.randn(30, 6, generator=rng, dtype=torch.float64)
    last_NC, final_NC = torch.randn(2, 11, 6, generator=rng, dtype=torch.float64)
    columns = Columns(torch.tensor([0, 3, 4, 9, 29]), torch.tensor([0.0, 0.0, 0.7, 0.7, 0.0]))
    teacher = Teacher.of(last_NC, output_VC, columns, most)
    log_p_ND = (last_NC @ output_VC.T).log_softmax(1)[:, columns.token_D]
    assert torch.allclose(teacher.log_p_ND, log_p_ND)
    weight_N = torch.rand(11, generator=rng)
    graded = grade(final_NC, teacher, weight_N, Objective(), most)
    leaf_NC = final_NC.clone().requires_grad_()
    scores_ND = leaf_NC @ output_VC[columns.token_D].T + columns.bias_D
    p_ND = (log_p_ND + columns.bias_D).exp()
    loss_N = -(p_ND * scores_ND.log_softmax(1)).sum(1)
    (loss_N * weight_N).sum().backward()
    assert leaf_NC.grad is not None
    assert torch.allclose(graded.slope_NC, leaf_NC.grad)
    assert torch.allclose(graded.scores.loss_N, loss_N.detach())


def test_a_heads_gradient_is_that_of_its_whole_loss(corpus: Corpus, tmp_path: Path) -> None:
    """All steps and pieces together, against one loss written down with autograd."""
    plan = recipe("mtp", loss_vocab=1000)
    session = begin(target(), corpus, plan, Run(tmp_path))
    (learner,) = session.lessons.learners
    batch = lay_out([corpus[0], corpus[1]], 3, CPU)
    watched = session.lessons.watch(batch)
    features_TF = watched.features(learner.head.layers)
    learner.learn(features_TF, batch, session.lessons.teacher(watched, batch, 0))
    found = {n: w.grad.clone() for n, w in learner.head.named_parameters() if w.grad is not None}
    learner.head.zero_grad()
    _whole_loss(learner, features_TF, watched.last_TC, batch).backward()
    for name, weight in learner.head.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(found[name], weight.grad, atol=2e-6), name
    assert any(slope.abs().max() > 1e-3 for slope in found.values())


def _whole_loss(learner: Learner, features_TF: Tensor, last_TC: Tensor, batch: Batch) -> Tensor:
    """Conversation by conversation; step k sees the true slots by a mask built from words."""
    head, rows = learner.head, len(batch.positions_T)
    assert isinstance(head, Mtp)
    first_TT = torch.zeros(rows, rows, dtype=torch.bool)
    for a, b in zip(batch.packing.bounds, batch.packing.bounds[1:], strict=False):
        first_TT[a:b, a:b] = torch.ones(b - a, b - a, dtype=torch.bool).tril()
    own_TT = torch.eye(rows, dtype=torch.bool)
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(_: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        group = q_THD.shape[1] // k_TKD.shape[1]
        kept.append((k_TKD.repeat_interleave(group, 1), v_TKD.repeat_interleave(group, 1)))
        k, v = (torch.cat(x) for x in zip(*kept, strict=True))
        seen_TS = torch.cat([first_TT] + [own_TT] * (len(kept) - 1), 1)
        score_HTS = torch.einsum("thd,shd->hts", q_THD, k) * q_THD.shape[2] ** -0.5
        law_HTS = score_HTS.masked_fill(~seen_TS, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", law_HTS, v)

    state_TC, loss = head.fuse(features_TF), torch.zeros(())
    weights = recipe("mtp").depth_weights(3)
    p_TV = target().logits(last_TC).softmax(1)
    for step in range(1, 4):
        tokens_T = batch.tokens_TA[step : step + rows]
        state_TC = head(tokens_T, state_TC, batch.positions_T + step, attend)
        log_q_TV = head.logits(state_TC).log_softmax(1)
        for at, begin_at in zip(batch.at_N.tolist(), batch.begin_N.tolist(), strict=True):
            if at - step >= begin_at:
                row_loss = -(p_TV[at] * log_q_TV[at - step]).sum()
                loss = loss + weights[step - 1] * row_loss / len(batch.at_N)
    return loss


def test_measures_are_those_of_a_slow_count(corpus: Corpus, tmp_path: Path) -> None:
    plan = recipe("eagle3")
    session = begin(target(), corpus, plan, Run(tmp_path))
    (learner,) = session.lessons.learners
    talks = [corpus[i] for i in range(10)]
    for number in range(25):  # a head that hits now and then
        session.lessons.step(lay_out(talks, 3, CPU), number, 5e-3)
    chosen_I = split(corpus, 4, seed=0).held_out_I
    found = HeldOut(target(), corpus, chosen_I, rows=50).measure([learner])["eagle3"]
    hits: dict[tuple[int, int], list[bool]] = {}
    for index in chosen_I.tolist():
        for root, row in _chains(learner, corpus[index]).items():
            hits[index, root] = row
    for depth in range(3):
        reached = [row[depth] for row in hits.values() if len(row) > depth and all(row[:depth])]
        assert found.conditional[depth] == pytest.approx(np.mean(reached))
    first = [row[0] for row in hits.values() if row]
    assert found.agreement[0] == pytest.approx(np.mean(first))


@torch.no_grad()
def _chains(learner: Learner, talk: Conversation) -> dict[int, list[bool]]:
    """Whether the chain below each root hits, depth by depth, as far as answers reach."""
    head, tokens = learner.head, torch.from_numpy(talk.tokens.astype(np.int64))
    assert isinstance(head, Eagle3)
    at_T = torch.arange(len(tokens))
    states = target().states(tokens, at_T, causal_attend, head.layers)
    best_T = target().logits(states.last_TC).argmax(1)
    batch = Batch(
        torch.cat((tokens, torch.zeros(3, dtype=torch.int64))),
        at_T,
        Packing.of((0, len(tokens)), CPU),
        at_T,
        torch.zeros_like(at_T),
    )
    (span,) = talk.spans
    found: dict[int, list[bool]] = {}
    from furcate.train.unroll import unroll

    finals = list(unroll(head, states.features_TF, batch, 3))
    for root in range(len(tokens)):
        row: list[bool] = []
        for step in range(1, 4):
            at = root + step
            if not (span.start <= at + 1 < min(span.end, len(tokens))):
                break
            best = int(head.output(finals[step - 1][at : at + 1]).argmax())
            row.append(best == int(best_T[at]))
        found[root] = row
    return found


def test_a_chain_counts_only_behind_hits() -> None:
    at_N = torch.tensor([1, 2, 3])
    none = torch.zeros(1, dtype=torch.int64)
    batch = Batch(none, torch.arange(5), Packing.of((0, 5), CPU), at_N, torch.zeros_like(at_N))
    tally = Tally(2, CPU)
    zero = torch.zeros(3)
    hits = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])]
    tally.add((Scores(zero, zero, hit) for hit in hits), batch)
    depths = tally.depths()
    assert depths.agreement == pytest.approx((2 / 3, 1.0))
    # rows 0, 1, 2 at depth 1; rows 0 and 1 at depth 2, of which only row 0 hit before
    assert depths.conditional == pytest.approx((2 / 3, 1.0))
    assert depths.chain == pytest.approx(1 + 2 / 3 + 2 / 3)


def test_the_rate_rises_then_falls() -> None:
    plan = recipe(rate=1.0, warmup_steps=9, last_rate=0.1, tokens=1000)
    assert rate(plan, 0.0, 0) == pytest.approx(0.1)
    assert rate(plan, 0.0, 9) == pytest.approx(1.0)
    assert rate(plan, 0.5, 100) == pytest.approx(0.55)
    assert rate(plan, 1.0, 100) == rate(plan, 1.2, 100) == pytest.approx(0.1)
    assert progress(plan, 250, 1e9) == 0.25
    assert progress(recipe(tokens=None, minutes=2.0), 10**12, 30.0) == 0.25


def test_depth_weights_fall_and_add_up() -> None:
    weights = recipe().depth_weights(6)
    assert sum(weights) == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": None}, "tokens or minutes"),
        ({"minutes": 1.0}, "tokens or minutes"),
        ({"rate": 0.0}, "rate"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"last_rate": -0.1}, "last_rate"),
        ({"clip": float("nan")}, "clip"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"heads": ()}, "heads"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        recipe(**changes)


def test_a_plan_that_cannot_be_trained_is_refused() -> None:
    spec = MedusaSpec(32, 64, 4, 1, (2,), 48)
    with pytest.raises(BadRequest, match="as many steps"):
        HeadPlan("medusa", spec, 3)
    with pytest.raises(BadRequest, match="own_output"):
        HeadPlan("medusa", MedusaSpec(32, 64, 4, 1, (2,), 64, own_output=True), 4)
    twice = plans(("mtp", "mtp"), target().spec, Shape())
    with pytest.raises(BadRequest, match="different names"):
        Recipe(twice, tokens=1)


def test_eagle3_reads_three_layers_where_there_are_so_many() -> None:
    assert eagle3_layers(30) == (2, 15, 27)
    assert eagle3_layers(2) == (0, 1)
    assert eagle3_layers(1) == (0,)
