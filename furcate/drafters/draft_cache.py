"""Keys, values and states of a draft network, in pages of the same numbers as the target's.

Legend: B requests, R rows of one pass, F frontier rows, N frontier nodes of all levels so far,
C size of a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

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


class DraftCache:
    """Follows the target's pages, so whatever is shared or copied there is shared or copied here.

    Drafted rows keep their keys in a scratch of their own, since more nodes are expanded than are
    kept, and so does the root, whose page may not be reserved yet. A network with states is not
    trained on position 0, before which there is none: nobody sees what is kept there.

    Args:
        network: what is kept depends on it alone.
        room: sizes of the engine.
        drafted: most frontier rows of a round and request, root excluded.
    """

    def __init__(self, network: Recurrent, room: Room, drafted: int) -> None:
        kv, self._room = network.kv, room
        self._heads = kv.heads
        self._scratch = 1 + drafted
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

    def keep(self, view: View, position_BR: Tensor, state_BRC: Tensor) -> None:
        """Keep states of committed positions; position -1 is nobody's."""
        self.states.write(places_of(view, self._room), position_BR, state_BRC)

    def before(self, view: View, position_BR: Tensor) -> Tensor:
        """The states before these positions, [B, R, C]."""
        return self.states.read(places_of(view, self._room), position_BR - 1)

    def stretch(self, view: View, rows: Draft) -> Pass:
        """A chain of committed tokens from position `view.length` on."""
        sight = behind(places_of(view, self._room), rows.end_BR, rows.live_B, self._first)
        return Pass(rows.tokens_BR, view.length_B[:, None] + rows.depth_BR, sight)

    def tail(self, view: View, rows: int) -> Pass:
        """The last `rows` tokens up to the root, or all of them; the root's keys go to scratch."""
        start_B = (view.length_B + 1 - rows).clamp_min(0)
        live_B = view.length_B + 1 - start_B
        row_R = torch.arange(rows, device=start_B.device)
        live_BR = row_R < live_B[:, None]
        depth_BR = torch.where(live_BR, row_R, 0)
        end_BR = torch.where(live_BR, live_B[:, None], row_R + 1)
        position_BR = start_B[:, None] + depth_BR
        places = replace(places_of(view, self._room), length_B=start_B)
        sight = behind(places, end_BR, live_B, self._first)
        root_BR = row_R == live_B[:, None] - 1
        slot_BR = torch.where(root_BR, self._scratch_slots(len(live_B))[:, :1], sight.slot_BN)
        sight = replace(sight, slot_BN=slot_BR)
        return Pass(view.tokens.at(position_BR), position_BR, sight)

    def below(self, view: View, seen_BFN: Tensor) -> Sight:
        """What the frontier's rows see: the prefix, the root, and their own paths."""
        batch, _, nodes = seen_BFN.shape
        slot_BN = self._scratch_slots(batch)[:, : 1 + nodes]
        return Sight(
            places=places_of(view, self._room),
            slot_BN=slot_BN,
            end_BN=slot_BN,
            live_B=torch.full_like(view.length_B, 1 + nodes),
            sees_BRN=pad(seen_BFN, (1, 0), value=True),
            first=self._first,
        )

    def attend(self, sight: Sight) -> Attend:
        """How the network attends in a pass that sees this."""
        return self.keys.attend(sight, self._heads)

    def copy_page(self, source: int, target: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        self.keys.copy_page(source, target)
        self.states.copy_page(source, target, self._room.page_size)

    def _scratch_slots(self, batch: int) -> Tensor:
        """Slots of the drafted rows, the root's first: int64 [B, 1 + N]."""
        slot = torch.arange(batch * self._scratch, device=self._room.device)
        return (self._room.slots + slot).view(batch, self._scratch)


def places_of(view: View, room: Room) -> Places:
    """Where the pages of a view's requests lie."""
    return Places(view.table_BS, view.length_B, room.page_size, view.tokens.columns)
