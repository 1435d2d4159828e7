"""The longest path that the target's choices follow, in Triton: one warp a request, no walk.

Twin of `accept`. Legend: B requests, R rows, D deepest level, and in the kernel levels padded to a
power of two; L lanes: the rows padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict

__all__ = ["accept"]

_ROWS_OF_A_WARP = 128  # four a lane; up to there a second warp costs more than it brings


def accept(draft: Draft, choice_BR: Tensor, depth: int, broken_BR: Tensor | None = None) -> Verdict:
    """As `furcate.kernels.accept.accept`, in one launch; all tensors lie dense.

    Args:
        draft: B trees; pads are told by their index alone.
        choice_BR: int64, the target's choice at each row.
        depth: D, at least the deepest level of any node.
        broken_BR: bool, rows where nothing could be chosen. Where the path meets one, `count` ends
            before it and is at most `accepted`.
    """
    batch, rows = choice_BR.shape
    fields = (draft.tokens_BR, draft.parent_BR, draft.depth_BR, draft.end_BR, draft.live_B)
    assert all(x.is_contiguous() for x in (*fields, choice_BR))
    assert broken_BR is None or broken_BR.is_contiguous()
    path_BD, emitted_BD = (choice_BR.new_empty((batch, depth + 1)) for _ in "pe")
    count_B, accepted_B = (choice_BR.new_empty(batch) for _ in "ca")
    lanes = max(32, triton.next_power_of_2(rows))
    _accept[(batch,)](
        *fields,
        choice_BR,
        broken_BR if broken_BR is None else broken_BR.view(torch.uint8),
        path_BD,
        emitted_BD,
        count_B,
        accepted_B,
        rows,
        depth,
        L=lanes,
        D=max(32, triton.next_power_of_2(depth + 1)),
        num_warps=max(1, lanes // _ROWS_OF_A_WARP),
    )
    return Verdict(path_BD, emitted_BD, count_B, accepted_B)


@triton.jit
def _accept(
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    end_ptr,
    live_ptr,
    choice_ptr,
    broken_ptr,
    path_ptr,
    emitted_ptr,
    count_ptr,
    accepted_ptr,
    rows,
    depth,
    L: tl.constexpr,
    D: tl.constexpr,
):
    b = tl.program_id(0)
    first = b * rows
    row_L = tl.arange(0, L)
    at_L = first + tl.minimum(row_L, rows - 1)  # all lanes read; who is used, index alone tells
    used_L = row_L < tl.load(live_ptr + b).to(tl.int32)
    parent_L = tl.load(parent_ptr + at_L)
    token_L = tl.load(tokens_ptr + at_L)
    level_L = tl.load(depth_ptr + at_L).to(tl.int32)
    end_L = tl.load(end_ptr + at_L).to(tl.int32)
    if broken_ptr is not None:
        broken_L = tl.load(broken_ptr + at_L) != 0
    wanted_L = tl.load(choice_ptr + first + parent_L, mask=used_L, other=0)

    # in preorder a row lies below a miss exactly if some miss before it, or it, ends behind it
    missed_L = (token_L != wanted_L) & (row_L > 0)
    closed_L = tl.associative_scan(tl.where(missed_L, end_L, 0), 0, _larger)
    reached_L = used_L & (closed_L <= row_L)
    rank_L = tl.where(reached_L, level_L * L + (L - 1 - row_L), -1)  # no two alike
    best = tl.max(rank_L, 0)
    accepted = best // L
    last = L - 1 - best % L

    # no store has a mask: lanes off the path repeat its end
    on_path_L = (row_L <= last) & (last < end_L)
    from_L = tl.where(on_path_L, row_L, last)
    chosen_L = tl.load(choice_ptr + first + from_L)
    bonus = tl.load(choice_ptr + first + last)
    count = accepted + 1
    if broken_ptr is not None:
        count = tl.min(tl.where(on_path_L & broken_L, level_L, count), 0)
    out = b * (depth + 1)
    to_L = out + tl.where(on_path_L, level_L, accepted)
    tl.store(path_ptr + to_L, from_L.to(tl.int64))
    tl.store(emitted_ptr + to_L, chosen_L)
    level_D = tl.arange(0, D)
    rest_D = out + tl.minimum(tl.maximum(level_D, accepted), depth)
    tl.store(path_ptr + rest_D, last.to(tl.int64))
    tl.store(emitted_ptr + rest_D, bonus)
    b_D = b + level_D * 0  # one word by all lanes: by one alone, the others would wait at a branch
    tl.store(count_ptr + b_D, count.to(tl.int64))
    tl.store(accepted_ptr + b_D, accepted.to(tl.int64))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
