"""Keys, values and states of a draft network, in pages of the same numbers as the target's.

Legend: B requests, R rows of one pass, F frontier rows, N the root and the frontier nodes of
all levels so far, C size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.heads.recurrent import Recurrent
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import Places, Sight, behind
from furcate.kv.cache import CacheShape, PagedCache
from furcate.kv.states import StatePool
from furcate.models.decoder import Attend

__all__ = ["DraftCache", "Pass", "Room", "places_of"]


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has room for; a drafter's pools mirror the target's pages one to one."""

    capacity: int  # most requests of a round; also the slot of the dummy request
    pages: int  # of the target's cache, scratch page excluded
    page_size: int
    vocab: int  # of the target: no other token is proposed
    device: torch.device
    kernels: Kernels = TORCH

    @property
    def slots(self) -> int:
        """Slots of all pages, the scratch page included."""
        return (self.pages + 1) * self.page_size


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of committed tokens to be scored, and what they see."""

    tokens_BR: Tensor
    position_BR: Tensor
    sight: Sight


@dataclass(frozen=True, slots=True)
class Ending(Pass):
    """The same down to the root."""

    before_BR: Tensor  # int64, slots of the states before these positions
    root_B1: Tensor  # int64, the root's row
    below_B1: Tensor  # int64, the position below it


class DraftCache:
    """Follows the target's pages, so whatever is shared or copied there is shared or copied here.

    Drafted rows keep their keys in a scratch of their own, since more nodes are expanded than are
    kept, and so does the root, whose page may not be reserved yet. A network with states is not
    trained on position 0, before which there is none: nobody sees what is kept there, not even the
    root of a text of one token or the nodes below it.

    Args:
        network: what is kept depends on it alone.
        room: sizes of the engine.
        drafted: frontier rows of each level and request, root excluded.
    """

    def __init__(self, network: Recurrent, room: Room, drafted: Sequence[int]) -> None:
        kv, self._room = network.kv, room
        self._kernels = room.kernels.fitting(network.dtype)
        self._heads = kv.heads
        self._scratch = 1 + sum(drafted)
        self._first = 1 if network.state_size else 0  # first position that anybody sees
        shape = CacheShape(
            layers=kv.layers,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            pages=room.pages - (-room.capacity * self._scratch // room.page_size),
            page_size=room.page_size,
        )
        self.keys = PagedCache(shape, network.dtype, room.device, room.kernels)
        self.states = StatePool(room.slots, network.state_size, network.dtype, room.device)
        self._drafted = Drafted.of(room, drafted)

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot of the target's pages."""
        pools = (self.keys.k_LSKD, self.keys.v_LSKD)
        keys = sum(pool.nbytes // pool.shape[1] for pool in pools)
        return keys + self.states.slot_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of what is drafted, which lies in no page of the target's."""
        pools = (self.keys.k_LSKD, self.keys.v_LSKD, self.states.state_SC)
        return sum(pool.nbytes for pool in pools) - self._room.slots * self.slot_bytes

    def keep(self, view: View, count_B: Tensor, state_TC: Tensor) -> None:
        """Keep the first `count` states of each request, of positions from `view.length` on."""
        places = places_of(view, self._room)
        self._kernels.keep(self.states.state_SC, places, count_B, state_TC)

    def before(self, view: View, position_BR: Tensor) -> Tensor:
        """The states before these positions, [B, R, C]."""
        return self.states.read(places_of(view, self._room), position_BR - 1)

    def stretch(self, view: View, rows: Draft) -> Pass:
        """A chain of committed tokens from position `view.length` on."""
        sight = behind(places_of(view, self._room), rows.end_BR, rows.live_B, self._first)
        return Pass(rows.tokens_BR, view.length_B[:, None] + rows.depth_BR, sight)

    def tail(self, view: View, rows: int) -> Ending:
        """The last `rows` tokens up to the root, or all of them; the root's keys go to scratch."""
        places, drafted = places_of(view, self._room), (self._room.slots, self._scratch)
        tail = self._kernels.tail(view.tokens_BW, places, drafted, rows)
        sight = Sight(
            places=replace(places, length_B=tail.start_B),
            slot_BN=tail.slot_BR,
            end_BN=tail.end_BR,
            live_B=tail.live_B,
            first=self._first,
        )
        return Ending(
            tail.tokens_BR, tail.position_BR, sight, tail.before_BR, tail.root_B1, tail.below_B1
        )

    def below(self, view: View, seen_BFN: Tensor) -> Sight:
        """What the frontier's rows see: the prefix, the root, and their own paths."""
        batch, rows, nodes = seen_BFN.shape
        slot_BN = self._drafted.slot_BN[:batch, :nodes]
        own_BF = self._drafted.own.get((rows, nodes))
        return Sight(
            places=places_of(view, self._room),
            slot_BN=slot_BN,
            end_BN=slot_BN,
            live_B=self._drafted.count_NB[nodes, :batch],
            sees_BRN=seen_BFN,
            first=self._first,
            own_T=None if own_BF is None else own_BF[:batch].flatten(),
        )

    def attend(self, sight: Sight) -> Attend:
        """How the network attends in a pass that sees this."""
        return self.keys.attend(sight, self._heads)

    def copy_page(self, source: int, target: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        self.keys.copy_page(source, target)
        self.states.copy_page(source, target, self._room.page_size)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Where the rows of a tree lie, which is the same in every round; B is the capacity here."""

    slot_BN: Tensor  # int64, the root's first
    count_NB: Tensor  # int64, row n says n for every request
    own: dict[tuple[int, int], Tensor]  # slots of a level's own rows, int64 [B, F], dense

    @staticmethod
    def of(room: Room, drafted: Sequence[int]) -> Drafted:
        """By the frontier rows of each level; keys of `own` are (rows, nodes down to them)."""
        each = 1 + sum(drafted)
        slot = torch.arange(room.capacity * each, device=room.device)
        slot_BN = (room.slots + slot).view(room.capacity, each)
        count_N1 = torch.arange(1 + each, device=room.device)[:, None]
        own = {}
        for rows, end in zip(drafted, accumulate(drafted, initial=1), strict=False):
            own[rows, end + rows] = slot_BN[:, end : end + rows].contiguous()
        return Drafted(slot_BN, count_N1.repeat(1, room.capacity), own)


def places_of(view: View, room: Room) -> Places:
    """Where the pages of a view's requests lie."""
    return Places(view.table_BS, view.length_B, room.page_size, view.tokens.columns)
