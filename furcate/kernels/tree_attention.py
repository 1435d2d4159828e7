"""Tree attention over a paged cache: the prefix is visible to all rows, the tree by `end` alone.

Legend: B requests, R rows, N columns of the tree, S columns (cached prefix and tree), P pages,
H heads, K key/value heads, D head size, T = B * R flat rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

__all__ = [
    "SCRATCH",
    "Columns",
    "Keys",
    "Places",
    "Sight",
    "behind",
    "lay_out",
    "look",
    "packed",
    "slots_of",
    "tree_attention",
    "write",
]

SCRATCH = 0  # slot of the scratch page: reads as finite numbers, is nobody's


@dataclass(frozen=True, slots=True)
class Places:
    """Which slots belong to the requests of a pass."""

    table_BP: Tensor  # int64, pages in order; dense
    length_B: Tensor  # int64, cached tokens L; row r goes to position L + r of the request
    page_size: int
    columns: int  # S, at least the longest L + live
    # first slot of the one request whose pages follow one another; then S is at most L + R, and
    # all of these places must be the request's own
    run: int | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of one pass see: positions [first, L) of the request, then their own tree.

    The rows are the last R columns of the tree. Row r sees column j of it where `sees` says so.
    Without `sees` rows and columns are the same, and r sees j exactly if j <= r < end[j]: its
    ancestors and itself. One integer a row is all that a kernel needs.
    """

    places: Places
    slot_BN: Tensor  # int64, where the columns of the tree lie; those out of use write to scratch
    end_BN: Tensor  # int64, one past the subtree; of no meaning beside `sees`
    live_B: Tensor  # int64, columns of the tree in use; the rows behind them are pads
    sees_BRN: Tensor | None = None  # bool; then all columns of the tree are in use
    # columns below are hidden, also those of the tree, which lie at L, L + 1, ... for that; a row
    # that sees no other gets zeros. Not with a run
    first: int = 0
    own_T: Tensor | None = None  # `write_T`, where it was laid out before

    @property
    def rows(self) -> int:
        """R."""
        tree = self.end_BN if self.sees_BRN is None else self.sees_BRN
        return tree.shape[1]

    @property
    def write_T(self) -> Tensor:
        """Slot of each row; entries lie dense, also where a request has a single row."""
        if self.own_T is not None:
            return self.own_T
        return self.slot_BN[:, self.slot_BN.shape[1] - self.rows :].flatten().contiguous()


@dataclass(frozen=True, slots=True)
class Columns:
    """A `Sight` spelled out."""

    read_BS: Tensor  # int64, slot of each column; columns out of use read the scratch page
    bias_BRS: Tensor  # float, 0 where row r sees column s, -inf elsewhere
    run: slice | None = None  # the slots themselves, where they follow one another: no gathering


@dataclass(frozen=True, slots=True)
class Keys:
    """One layer's keys and values by slot, [slots, K, D] each."""

    k_SKD: Tensor
    v_SKD: Tensor


def behind(places: Places, end_BR: Tensor, live_B: Tensor, first: int = 0) -> Sight:
    """The sight of a tree whose rows are written to the positions behind the prefix."""
    r_R = torch.arange(end_BR.shape[1], device=end_BR.device)
    at_BR = places.length_B[:, None] + r_R
    if places.run is None:  # in a run pads write behind the tree: all that is read there is new
        at_BR = torch.where(r_R < live_B[:, None], at_BR, -1)
    return Sight(places, slots_of(places, at_BR), end_BR, live_B, first=first)


def lay_out(sight: Sight, dtype: torch.dtype) -> Columns:
    """Slots and visibility of all columns, spelled out for the torch reference.

    The tree's columns lie at L, L + 1, ... of each request, so that a run is read in place; with
    `sees` they lie behind all prefixes.
    """
    places = sight.places
    assert not sight.first or places.run is None
    c_S = torch.arange(places.columns, device=sight.slot_BN.device)
    past_BS = c_S < places.length_B[:, None]
    read_BS = slots_of(places, torch.where(past_BS, c_S, -1))
    if sight.sees_BRN is None:
        read_BS, seen_BRS = _in_line(sight, read_BS, c_S)
    else:
        read_BS = torch.cat([read_BS, sight.slot_BN], 1)
        seen_BRS = torch.cat([past_BS[:, None].expand(-1, sight.rows, -1), sight.sees_BRN], 2)
    if sight.first:
        read_BS, seen_BRS = _from_first(sight, read_BS, seen_BRS)
    bias_BRS = torch.zeros(seen_BRS.shape, dtype=dtype, device=c_S.device)
    run = None if places.run is None else slice(places.run, places.run + places.columns)
    return Columns(read_BS, bias_BRS.masked_fill(~seen_BRS, -torch.inf), run)


def _in_line(sight: Sight, read_BS: Tensor, c_S: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, bool [B, R, S]) where column j of the tree is column L + j of the request."""
    rows, live_B1 = sight.rows, sight.live_B[:, None]
    r_R = torch.arange(rows, device=c_S.device)
    c_BS = (c_S - sight.places.length_B[:, None]).clamp(-1, rows - 1)  # -1 in the prefix
    tree_BS = (c_BS >= 0) & (c_S < sight.places.length_B[:, None] + live_B1)
    at_BS = c_BS.clamp_min(0)
    read_BS = torch.where(tree_BS, sight.slot_BN.gather(1, at_BS), read_BS)
    end_BS = sight.end_BN.gather(1, at_BS)
    own_BRS = (c_BS[:, None, :] <= r_R[:, None]) & (r_R[:, None] < end_BS[:, None, :])
    seen_BRS = (c_BS < 0)[:, None, :] | (tree_BS[:, None, :] & own_BRS)
    # a pad sees one column, so that its softmax stays finite; nobody reads its result
    return read_BS, seen_BRS | ((r_R >= live_B1)[:, :, None] & (c_S == 0))


def _from_first(sight: Sight, read_BS: Tensor, seen_BRS: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, bool [B, R, S]) without the columns below `first`.

    They read the scratch page instead, that is zeros, for rows that see nothing else.
    """
    at_BS = torch.arange(sight.places.columns, device=read_BS.device).expand(len(read_BS), -1)
    if sight.sees_BRN is not None:
        n_N = torch.arange(sight.slot_BN.shape[1], device=read_BS.device)
        at_BS = torch.cat([at_BS, sight.places.length_B[:, None] + n_N], 1)
    hidden_BS = at_BS < sight.first
    late_BRS = seen_BRS & ~hidden_BS[:, None]
    blind_BR1 = ~late_BRS.any(2, keepdim=True)
    return torch.where(hidden_BS, SCRATCH, read_BS), late_BRS | (blind_BR1 & hidden_BS[:, None])


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


def look(sight: Sight, group: int, dtype: torch.dtype) -> Callable[[Tensor, Keys], Tensor]:
    """`tree_attention` by this sight, for every layer of a pass; `group` is H / K."""
    return partial(tree_attention, columns=packed(lay_out(sight, dtype), group))


def write(keys: Keys, slot_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Put the rows' own keys and values where they lie, in place; the scratch slot is zeroed."""
    keys.k_SKD.index_copy_(0, slot_T, k_TKD)
    keys.v_SKD.index_copy_(0, slot_T, v_TKD)
    # the pads of a request whose keys are NaN have written here, and all requests read it
    keys.k_SKD[SCRATCH].zero_()
    keys.v_SKD[SCRATCH].zero_()


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
