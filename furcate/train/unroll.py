"""Runs a head over a batch step by step, each step fed with what the last one gave.

Legend: T rows of a batch, F features, C hidden size, N rows with a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from furcate.heads.medusa import Medusa
from furcate.heads.places import Head
from furcate.models.decoder import Attend
from furcate.train.attention import Unrolled
from furcate.train.batches import Batch

__all__ = ["Forward", "unroll"]

Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


def unroll(
    head: Head, features_TF: Tensor, batch: Batch, steps: int, forward: Forward | None = None
) -> Iterator[Tensor]:
    """What the output matrix reads at the rows of each step's guesses: `steps` times [N, C].

    Step k of row t reads token t + k and the state of t, or in later steps what step k - 1 gave
    for row t, and guesses token t + k + 1. Rows that step k cannot fill give zeros.
    `forward` stands in for the head's own, where another form of it is faster.
    """
    if isinstance(head, Medusa):
        for step, one in enumerate(head.heads, start=1):
            yield one(_rows(features_TF, batch.rows(step)))
        return
    forward = forward or head
    attend = Unrolled(batch.packing)
    state_TC = head.fuse(features_TF)
    for step in range(1, steps + 1):
        tokens_T = batch.tokens_TA[step : step + len(features_TF)]
        state_TC = forward(tokens_T, state_TC, batch.positions_T + step, attend)
        yield head.final(_rows(state_TC, batch.rows(step)))


def _rows(x_TC: Tensor, row_N: Tensor) -> Tensor:
    rows_NC: Tensor = _Rows.apply(x_TC, row_N)  # type: ignore[no-untyped-call]
    return rows_NC


class _Rows(torch.autograd.Function):
    """Rows by index, each at most once but for T, which is none and gives zeros.

    The backward pass writes rows and adds nothing up, so that its result does not depend on an
    order.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, row_N: Tensor) -> Tensor:
        ctx.save_for_backward(row_N)
        ctx.rows = len(x_TC)
        picked_NC = x_TC.index_select(0, row_N.clamp(max=len(x_TC) - 1))
        return picked_NC * (row_N < len(x_TC))[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NC: Tensor) -> tuple[Tensor, None]:
        (row_N,) = ctx.saved_tensors
        slope_TC = slope_NC.new_zeros(ctx.rows + 1, slope_NC.shape[1])
        slope_TC.index_copy_(0, row_N, slope_NC)
        return slope_TC[:-1], None
