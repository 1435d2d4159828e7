"""How trees grow: fixed ranks, pruning by entropy and value, calibration; and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_views import paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import VOCAB, prompt_of, tiny_engine
from tiny_heads import SMALL_VOCAB, around, network

from furcate.config import DraftOptions, SamplingParams
from furcate.drafters.base import View
from furcate.drafters.chosen_tree import chosen_tree
from furcate.drafters.likeliest import _entropy as entropy
from furcate.drafters.manner import CALIBRATION, Habit, calibration_of, manner_of
from furcate.drafters.plan import dynamic, static
from furcate.drafters.plausible import PRIOR, Curve, Plausible
from furcate.drafters.prune import Pruning
from furcate.errors import BadFile, BadRequest, UserError
from furcate.kernels.draft import Proposal
from furcate.tree.calibration import Calibration, DepthScale, ValueMap
from furcate.tree.static import best_static_tree
from furcate.tree.topology import Topology

CPU = torch.device("cpu")
# the beginning of a published choice list (Medusa, mc_sim_7b_63)
CHOICES = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [0, 0, 1], [2, 0]]


def proposals(drafter: Any, **asked: Any) -> list[Proposal]:
    """What is proposed in the rounds of one answer."""
    made: list[Proposal] = []
    real: Callable[[View, int], Proposal] = drafter.propose
    drafter.propose = lambda view, levels: made.append(real(view, levels)) or made[-1]
    with tiny_engine(drafter, max_batch=1) as engine:
        law = {"max_tokens": 8, "seed": 3, "ignore_eos": True, **asked}
        engine.collect(engine.submit(prompt_of(30), SamplingParams(**law)))
    return made


def children_of(proposal: Proposal) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Paths by the path above, most valuable first."""
    found = paths_of(proposal)
    families: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in sorted(found, key=found.__getitem__, reverse=True):
        families.setdefault(path[:-1], []).append(path)
    return families


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_ranks_holds_exactly_these_ranks(kind: str, temperature: float) -> None:
    shape = {"tree": CHOICES, "depth": None, "topk": None}
    every = {"depth": 3, "topk": 8}
    fixed = proposals(around(network(kind), shape, max_batch=1), temperature=temperature)[0]
    wide = proposals(around(network(kind), every, max_batch=1), temperature=temperature)[0]
    whole = children_of(wide)
    want = set()
    for choice in CHOICES:
        path: tuple[int, ...] = ()
        for rank in choice:
            path = whole[path][rank]
        want.add(path)
    assert set(paths_of(fixed)) == want


def test_a_plan_has_a_place_for_every_node_and_no_other() -> None:
    tree = best_static_tree([[0.6, 0.2, 0.1], [0.5, 0.3], [0.4, 0.1]], 20).topology
    plan = static(tree, CPU)
    assert [int(step.kept_X.sum()) for step in plan if step.kept_X is not None] == [
        tree.depth.count(d) for d in range(1, len(plan) + 1)
    ]
    assert plan[-1].rows == 0
    assert [step.candidates for step in dynamic(3, 10, 8)] == [8, 64, 80]


def test_children_are_capped_by_the_entropy_of_their_row() -> None:
    drafter = around(network("eagle3"), {"topk": 6, "entropy_children": 0.05}, max_batch=1)
    sizes = {len(f) for p in proposals(drafter) for f in children_of(p).values()}
    assert len(sizes) > 2
    assert min(sizes) < 6
    weights = torch.tensor([[[0.97, 0.01, 0.01, 0.01], [0.25] * 4]]).log()
    value = weights.sort(dim=2, descending=True).values
    kept = Pruning(kappa=1.0).pruned(value, torch.zeros(1, 2), entropy(weights)) > -torch.inf
    # exp(H) is 1.18 and 4: one more than a share of a child, and four
    assert kept.sum(2).tolist() == [[2, 4]]


def test_a_gate_shuts_rows_that_hesitate_and_are_worth_little() -> None:
    weights = torch.tensor([[[0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.25] * 4]]).log()
    above = torch.tensor([[0.5, 0.5, 1.0]]).log()
    kept = Pruning(gamma=0.3, least=0.3).pruned(weights * 0, above, entropy(weights)) > -torch.inf
    assert kept.all(2).tolist() == [[True, False, True]]
    assert 0.5 * (1 - math.sqrt(0.3 * math.log(4))) < 0.3 < 1 - math.sqrt(0.3 * math.log(4))


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_nodes_below_the_threshold_are_dropped(kind: str) -> None:
    plain = around(network(kind), {"topk": 6}, max_batch=1)
    pruned = around(network(kind), {"topk": 6, "value_threshold": 0.02}, max_batch=1)
    whole, cut = paths_of(proposals(plain)[0]), paths_of(proposals(pruned)[0])
    assert 0 < len(cut) < len(whole)
    assert cut == {p: v for p, v in whole.items() if v >= math.log(0.02)}


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    st.floats(1e-6, 1),
)
@settings(max_examples=200, deadline=None)
def test_the_curve_on_the_device_is_the_calibrations_map(
    knots: list[float], values: list[float], x: float
) -> None:
    shape = ValueMap(tuple(sorted(knots)), tuple(sorted(values))[: len(knots)])
    curve = Curve(shape, CPU)
    assert float(curve(torch.tensor(x).log()).exp()) == pytest.approx(shape(x), rel=2e-3, abs=1e-6)


def test_a_map_of_path_values_is_applied_to_paths() -> None:
    shape = ValueMap((0.1, 0.5, 1.0), (0.2, 0.6, 0.9))
    plausible = Plausible(Calibration(values=shape), CPU)
    first, second = torch.tensor([[[0.8]]]).log(), torch.tensor([[[0.4]]]).log()
    one = plausible.worth((torch.zeros(1, 1), torch.zeros(1, 1)), first)
    two = plausible.worth((one.value_BFC[..., 0], one.plain_BFC[..., 0]), second)
    assert float(one.value_BFC.exp()) == pytest.approx(shape(0.8) / shape(1.0), rel=1e-4)
    assert float(two.value_BFC.exp()) == pytest.approx(shape(0.32) / shape(1.0), rel=1e-4)


def test_scales_go_by_depth_and_are_read_from_the_heads_folder(tmp_path: Path) -> None:
    assert calibration_of(tmp_path) == PRIOR
    fitted = Calibration(scales=(DepthScale(1.0, 0.9), DepthScale(0.5, 2.0)))
    (tmp_path / CALIBRATION).write_text(json.dumps(fitted.to_dict()))
    assert calibration_of(tmp_path) == fitted
    plausible = Plausible(fitted, CPU)
    logits, warm = torch.tensor([[[1.0, 2.0]]]), torch.tensor([1.0])
    one, two = (plausible.log_weights(logits, warm, None, d)[0, 0].diff() for d in (1, 2))
    assert float(one) == pytest.approx(1.0 / 0.9)
    assert float(two) == pytest.approx(0.5 / 2.0)
    (tmp_path / CALIBRATION).write_text("{}")
    with pytest.raises(BadFile, match=r"calibration\.scales"):
        calibration_of(tmp_path)


def test_beta_and_sigma_replace_what_was_fitted() -> None:
    habit = Habit(3, 4, calibration=Calibration(scales=(DepthScale(1.0, 0.9, 0.5), DepthScale())))
    manner = manner_of(DraftOptions(beta=1.3, sigma=0.7), habit, CPU)
    assert manner.calibration.scales == (DepthScale(1.3, 0.7, 0.5), DepthScale(1.3, 0.7, 0.6))
    assert manner_of(DraftOptions(), habit, CPU).calibration == habit.calibration


@pytest.mark.parametrize("content", [CHOICES, {"acceptance": [[0.6, 0.2], [0.5]], "nodes": 4}])
def test_a_tree_may_lie_in_a_file(content: object, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(content))
    want = (
        Topology.from_choices(CHOICES)
        if isinstance(content, list)
        else best_static_tree([[0.6, 0.2], [0.5]], 4).topology
    )
    assert chosen_tree(str(file)) == want


SPOILT = ("[[0], [1, 0]]", '[[0], ["a"]]', "3", '{"acceptance": [[2]], "nodes": 3}', "[[", "[]")


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_tree_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(UserError):
        chosen_tree(str(file))
    with pytest.raises(BadFile):
        chosen_tree(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    "options",
    [
        {"tree": [[0], [0, 0]], "depth": 3},
        {"tree": [[0]], "topk": 3},
        {"tree": []},
        {"tree": [[64]]},
        {"tree": [[1, 0]]},
        {"entropy_gate": 0.2},
        {"value_threshold": 1.0},
        {"beta": 0.0},
        {"draft_vocab": 0},
        {"draft_vocab": 2.5},
    ],
    ids=str,
)
def test_options_that_make_no_tree_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        manner_of(DraftOptions(**options), Habit(4, 4), CPU)


def test_medusa_sees_no_further_than_it_has_heads() -> None:
    deep = [[0] * d for d in range(1, 6)]
    with pytest.raises(BadRequest, match="4 levels ahead"):
        around(network("medusa"), {"tree": deep, "depth": None, "topk": None})
    with pytest.raises(BadRequest, match="4 levels ahead"):
        around(network("medusa"), {"depth": 5})
    assert around(network("medusa"), {"depth": 2}).depth == 2


def test_nobody_proposes_more_tokens_than_a_drafter_knows() -> None:
    assert len(SMALL_VOCAB) < VOCAB
    habit = Habit(2, 4, words=3)
    assert manner_of(DraftOptions(topk=9), habit, CPU).plan[0].children == 3
    with pytest.raises(BadRequest, match="only 3 tokens"):
        manner_of(DraftOptions(tree=[[3]]), habit, CPU)
    drafter = around(network("eagle3", True), max_batch=1)
    for proposal in proposals(drafter):
        assert {token for path in paths_of(proposal) for token in path} <= set(SMALL_VOCAB)
    assert replace(habit, words=4) != habit


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_an_uncoupled_tree_does_not_know_the_noise(kind: str) -> None:
    options = {"depth": 3, "topk": 8}

    def paths(temperature: float, seed: int, **more: Any) -> dict[tuple[int, ...], float]:
        drafter = around(network(kind), {**options, **more}, max_batch=1)
        return paths_of(proposals(drafter, temperature=temperature, seed=seed)[0])

    plain = paths(1.0, 3, coupled=False)
    assert plain == paths(1.0, 4, coupled=False)  # the prompt is the same, the noise is not
    assert paths(1.0, 3) != paths(1.0, 4)
    assert paths(0.0, 3) == paths(0.0, 3, coupled=False)
