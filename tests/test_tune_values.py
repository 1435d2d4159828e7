"""The map of values is fitted so that as many nodes are accepted as it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from furcate.tree.calibration import BINS, Calibration, ValueMap
from furcate.tune.fit_values import Tally, fit_values

PLAIN = Calibration().values
NODES = 200_000
# The fewest accepted nodes of a part are 2,900, in the fit and in the check: one standard error of
# their ratio is 2.6 %, so that a right map fails once in some 10,000 seeds
NEAR = 0.1


def nodes(seed: int) -> tuple[Tensor, Tensor]:
    """(log values, whether on the path) of a drafter that is too sure of itself."""
    rng = torch.Generator().manual_seed(seed)
    log_value_X = -6 * torch.rand(NODES, generator=rng)
    on_X = torch.rand(NODES, generator=rng) < (1.7 * log_value_X).exp()
    return log_value_X, on_X


def tallied(log_value_X: Tensor, on_X: Tensor) -> Tally:
    tally = Tally.empty()
    tally.add(log_value_X, on_X)
    return tally


def test_a_fitted_map_expects_what_is_accepted() -> None:
    values = fit_values(tallied(*nodes(1)), roots=1000)
    log_value_X, on_X = nodes(2)
    for low, high in ((-6.0, 0.0), (-1.0, 0.0), (-2.0, -1.0)):
        at_X = (log_value_X > low) & (log_value_X <= high)
        part = tallied(log_value_X[at_X], on_X[at_X])
        assert part.expected(values) == pytest.approx(part.accepted, rel=NEAR)
        assert part.expected(PLAIN) > (1 + NEAR) * part.accepted  # the check can fail


def test_a_map_keeps_certainty_and_order() -> None:
    values = fit_values(tallied(*nodes(3)), roots=1000)
    assert values(1.0) == 1.0 and len(values.estimated) <= BINS
    assert list(values.empirical) == sorted(values.empirical) and values.empirical[0] > 0


def test_cells_hold_sums_and_leave_out_what_is_worth_nothing() -> None:
    tally = tallied(
        torch.tensor([0.0, -1.0, -1.0, -40.0, -torch.inf]),
        torch.tensor([True, True, False, False, True]),
    )
    assert float(tally.nodes_K.sum()) == 4 and tally.accepted == 2
    wanted = 1 + 2 * torch.tensor(-1.0).exp().item()
    assert tally.expected(PLAIN) == pytest.approx(wanted, rel=1e-6)


def test_without_nodes_a_map_changes_nothing() -> None:
    assert fit_values(Tally.empty(), roots=0) == ValueMap()
