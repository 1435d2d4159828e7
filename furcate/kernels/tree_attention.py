"""Tree attention over a paged cache: the prefix is visible to all rows, the tree by `end` alone.

Legend: B requests, R rows, S columns (cached prefix and tree), P pages, H heads, K key/value heads,
D head size, T = B * R flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "SCRATCH",
    "Columns",
    "Keys",
    "Places",
    "lay_out",
    "packed",
    "slots_of",
    "tree_attention",
]

SCRATCH = 0  # slot of the scratch page: reads as finite numbers, is nobody's


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the rows of one pass are written and what each of them sees."""

    write_T: Tensor  # int64, slot of each row; pads write to the scratch page, or behind the tree
    read_BS: Tensor  # int64, slot of each column; columns out of use read the scratch page
    bias_BRS: Tensor  # float, 0 where row r sees column s, -inf elsewhere
    run: slice | None = None  # the slots themselves, where they follow one another: no gathering


@dataclass(frozen=True, slots=True)
class Keys:
    """One layer's keys and values by slot, [slots, K, D] each."""

    k_SKD: Tensor
    v_SKD: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Which slots belong to the requests of a pass."""

    table_BP: Tensor  # int64, pages in order
    length_B: Tensor  # int64, cached tokens L; row r goes to position L + r of the request
    page_size: int
    columns: int  # S, at least the longest L + live
    # first slot of the one request whose pages follow one another; then S is at most L + R, and
    # all of these places must be the request's own
    run: int | None = None


def lay_out(places: Places, end_BR: Tensor, live_B: Tensor, dtype: torch.dtype) -> Columns:
    """Slots and visibility for one pass.

    Row r of the tree sees the whole prefix [0, L) and the rows j with j <= r < end[j]: its
    ancestors and itself. One integer a row is all that a kernel needs; this reference spells the
    mask out. Tree slots [L, L + live) need not begin at a page's border.
    """
    length_B1, live_B1 = places.length_B[:, None], live_B[:, None]
    rows = end_BR.shape[1]
    r_R = torch.arange(rows, device=end_BR.device)
    c_S = torch.arange(places.columns, device=end_BR.device)
    row_at_BR = length_B1 + r_R
    if places.run is None:  # in a run pads write behind the tree: all that is read there is new
        row_at_BR = torch.where(r_R < live_B1, row_at_BR, -1)
    col_at_BS = torch.where(c_S < length_B1 + live_B1, c_S, -1)

    c_BS = (c_S - length_B1).clamp(-1, rows - 1)  # tree column, -1 in the prefix
    end_BS = end_BR.gather(1, c_BS.clamp_min(0))
    tree_BRS = (c_BS[:, None, :] <= r_R[:, None]) & (r_R[:, None] < end_BS[:, None, :])
    used_BS = col_at_BS >= 0
    seen_BRS = used_BS[:, None, :] & ((c_BS < 0)[:, None, :] | tree_BRS)
    # a pad sees one column, so that its softmax stays finite; nobody reads its result
    seen_BRS = seen_BRS | ((r_R >= live_B1)[:, :, None] & (c_S == 0))
    bias_BRS = torch.zeros(seen_BRS.shape, dtype=dtype, device=end_BR.device)
    in_place = None if places.run is None else slice(places.run, places.run + places.columns)
    return Columns(
        write_T=slots_of(places, row_at_BR).flatten(),
        read_BS=slots_of(places, col_at_BS),
        bias_BRS=bias_BRS.masked_fill(~seen_BRS, -torch.inf),
        run=in_place,
    )


def packed(columns: Columns, group: int) -> Columns:
    """`columns` for query heads that share a key head, `group` of them packed as rows of it.

    Done once a pass, not once a layer.
    """
    return replace(columns, bias_BRS=columns.bias_BRS.repeat(1, group, 1))


def tree_attention(q_THD: Tensor, keys: Keys, columns: Columns) -> Tensor:
    """Attention of every row over the columns it sees, [T, H, D]; `columns` are `packed`.

    The torch reference and the CPU path. Each key is read once for all query heads that share it.
    """
    batch, packed_rows, width = columns.bias_BRS.shape
    kv, size = keys.k_SKD.shape[1:]
    group = q_THD.shape[1] // kv
    rows = packed_rows // group
    k_BKSD = _read(keys.k_SKD, columns).view(batch, width, kv, size).transpose(1, 2)
    v_BKSD = _read(keys.v_SKD, columns).view(batch, width, kv, size).transpose(1, 2)
    q_BKGRD = q_THD.view(batch, rows, kv, group, size).permute(0, 2, 3, 1, 4)
    out_BKGD = torch.nn.functional.scaled_dot_product_attention(
        q_BKGRD.reshape(batch, kv, packed_rows, size),
        k_BKSD,
        v_BKSD,
        attn_mask=columns.bias_BRS[:, None],
    )
    out_BRKGD = out_BKGD.view(batch, kv, group, rows, size).permute(0, 3, 1, 2, 4)
    return out_BRKGD.reshape(batch * rows, kv * group, size)


def _read(pool_SKD: Tensor, columns: Columns) -> Tensor:
    """Keys or values of all columns, request after request."""
    if columns.run is not None:
        return pool_SKD[columns.run]
    return pool_SKD.index_select(0, columns.read_BS.flatten())


def slots_of(places: Places, at_BX: Tensor) -> Tensor:
    """Slot of each position of a request; position -1 is the scratch slot."""
    position_BX = at_BX.clamp_min(0)
    page_BX = places.table_BP.gather(1, position_BX // places.page_size)
    slot_BX = page_BX * places.page_size + position_BX % places.page_size
    return torch.where(at_BX >= 0, slot_BX, SCRATCH)
