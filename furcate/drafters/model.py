"""Model drafter: a smaller decoder with the target's vocabulary grows the tree.

Legend: B requests, R rows of one pass, F frontier rows, D levels, N frontier nodes of all levels
so far, S columns of the prefix, T flat rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.config import DraftOptions
from furcate.drafters.base import View
from furcate.drafters.expand import (
    Coupling,
    Frontier,
    branch,
    log_weights,
    narrow,
    root,
    to_proposal,
)
from furcate.drafters.judge import judge
from furcate.drafters.trust import Trust
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.tree_attention import Columns, Places, lay_out
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.decoder import Decoder
from furcate.verify.law import Law, noise_of

__all__ = ["ModelDrafter", "Room"]

DEPTH = 5
WIDTH = 4  # frontier rows, and children of each


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has room for; the draft cache mirrors the target's pages one to one."""

    capacity: int  # most requests of a round; also the slot of the dummy request
    pages: int  # of the target's cache, scratch page excluded
    page_size: int
    vocab: int  # of the target: no other token is proposed
    device: torch.device


class ModelDrafter:
    """Speculative decoding (arXiv:2211.17192) with a tree grown by coupled scores.

    Its keys and values lie in pages of the same numbers as the target's, so whatever is shared or
    copied there is shared or copied here. Each round first scores the tokens committed since
    the last one, then F frontier rows per level; drafted rows keep their keys in a scratch of their
    own, since more nodes are expanded than are kept.

    Args:
        decoder: on `room.device`; its token ids must mean what the target's mean.
        options: `depth` levels; `topk` frontier rows, and children of each.
        room: sizes of the engine.
        coupling: how its logits predict the target's choice.
    """

    light = False

    def __init__(
        self,
        decoder: Decoder,
        options: DraftOptions,
        room: Room,
        coupling: Coupling | None = None,
    ) -> None:
        self.depth = DEPTH if options.depth is None else options.depth
        self.width = WIDTH if options.topk is None else options.topk
        self.pool = self.width + (self.depth - 1) * self.width**2
        self.decoder = decoder
        self.coupling = Coupling() if coupling is None else coupling
        self.trust = Trust(room.device)
        self._room = room
        self._vocab = min(room.vocab, decoder.spec.vocab_size)
        # one slot for the root, whose page may not be reserved yet, and one per frontier row
        self._scratch = 1 + (self.depth - 1) * self.width
        self._scratch_begin = (room.pages + 1) * room.page_size
        spec, extra = decoder.spec, -(-room.capacity * self._scratch // room.page_size)
        shape = CacheShape(
            layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            pages=room.pages + extra,
            page_size=room.page_size,
        )
        self.cache = PagedCache(shape, decoder.dtype, room.device)

    def read(self, view: View, rows: Draft) -> None:
        """Score a chain of committed tokens from position `view.length` on, for their keys alone.

        For what a round cannot catch up with: prompts.
        """
        columns = lay_out(self._places(view), rows.end_BR, rows.live_B, self.decoder.dtype)
        self._hidden(rows.tokens_BR, view.length_B[:, None] + rows.depth_BR, columns)

    def propose(self, view: View) -> Proposal:
        """Catch up with what was committed, then grow the tree level by level."""
        hidden_BC, prefix = self._catch_up(view)
        noise_BDV = self._noise(view)
        frontier = root(view.tokens_BW.gather(1, view.length_B[:, None])[:, 0])
        levels, begin = [], 0
        for d in range(1, self.depth + 1):
            if d > 1:
                hidden_BC = self._score(view, frontier, prefix, d - 1)
            noise_BV = None if noise_BDV is None else noise_BDV[:, d - 1]
            logits_BFV = self._logits(hidden_BC, view.law)
            weights_BFV = log_weights(logits_BFV, view.law.temperature_B, noise_BV, self.coupling)
            levels.append(branch(weights_BFV, frontier, self.width, self.trust))
            frontier = narrow(levels[-1], frontier, self.width, begin)
            begin += levels[-1].tokens_BX.shape[1]
        return to_proposal(levels)

    def learn(self, view: View, draft: Draft, verdict: Verdict) -> None:
        """Note how often nodes of each weight were accepted."""
        if draft.tag_BR is not None:
            real_B = view.slot_B != self._room.capacity
            self.trust.update(draft, judge(draft, verdict, real_B))

    def forget(self, slot: int) -> None:
        """Nothing is kept by slot: keys lie in pages, and pages are the engine's."""

    def copy_page(self, source: int, target: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        self.cache.copy_page(source, target)

    def _catch_up(self, view: View) -> tuple[Tensor, Columns]:
        """Score the last D + 2 tokens; (the root's hidden state [B, 1, C], the prefix's columns).

        A round commits at most D + 1 tokens, and the last root's keys lay in scratch: D + 2 rows
        always reach back to what is cached. Scoring a token twice changes nothing.
        """
        rows = self.depth + 2
        start_B = (view.length_B + 1 - rows).clamp_min(0)
        live_B = view.length_B + 1 - start_B
        row_R = torch.arange(rows, device=start_B.device)
        live_BR = row_R < live_B[:, None]
        position_BR = start_B[:, None] + torch.where(live_BR, row_R, 0)
        end_BR = torch.where(live_BR, live_B[:, None], row_R + 1)
        places = replace(self._places(view), length_B=start_B)
        columns = self._with_root_in_scratch(
            lay_out(places, end_BR, live_B, self.decoder.dtype), view.length_B, live_B
        )
        hidden_BRC = self._hidden(view.tokens_BW.gather(1, position_BR), position_BR, columns)
        last_B11 = (live_B - 1)[:, None, None].expand(-1, 1, hidden_BRC.shape[2])
        return hidden_BRC.gather(1, last_B11), columns

    def _with_root_in_scratch(self, columns: Columns, length_B: Tensor, live_B: Tensor) -> Columns:
        slot_B1 = self._scratch_slots(len(length_B))[:, :1]
        batch, rows, width = columns.bias_BRS.shape
        root_BR = torch.arange(rows, device=live_B.device) == live_B[:, None] - 1
        root_BS = torch.arange(width, device=live_B.device) == length_B[:, None]
        return replace(
            columns,
            write_T=torch.where(root_BR, slot_B1, columns.write_T.view(batch, rows)).flatten(),
            read_BS=torch.where(root_BS, slot_B1, columns.read_BS),
        )

    def _score(self, view: View, frontier: Frontier, prefix: Columns, depth: int) -> Tensor:
        """Hidden states of the frontier's rows: each sees the prefix, the root and its own path."""
        batch, rows, nodes = frontier.seen_BFN.shape
        slot_BN = self._scratch_slots(batch)[:, 1 : 1 + nodes]
        column_S = torch.arange(prefix.read_BS.shape[1], device=slot_BN.device)
        past_BFS = (column_S <= view.length_B[:, None])[:, None].expand(-1, rows, -1)
        seen_BFS = torch.cat([past_BFS, frontier.seen_BFN], 2)
        bias_BFS = torch.zeros(seen_BFS.shape, dtype=self.decoder.dtype, device=slot_BN.device)
        columns = Columns(
            write_T=slot_BN[:, nodes - rows :].flatten(),
            read_BS=torch.cat([prefix.read_BS, slot_BN], 1),
            bias_BRS=bias_BFS.masked_fill(~seen_BFS, -torch.inf),
        )
        position_BF = (view.length_B[:, None] + depth).expand(-1, rows)
        return self._hidden(frontier.tokens_BF, position_BF, columns)

    def _hidden(self, tokens_BR: Tensor, position_BR: Tensor, columns: Columns) -> Tensor:
        # a target may know more tokens than the drafter; those read as its last one
        known_T = tokens_BR.flatten().clamp_max(self.decoder.spec.vocab_size - 1)
        attend = self.cache.attend(columns, self.decoder.spec.num_heads)
        hidden_TC: Tensor = self.decoder(known_T, position_BR.flatten(), attend)
        return hidden_TC.view(*tokens_BR.shape, -1)

    def _logits(self, hidden_BRC: Tensor, law: Law) -> Tensor:
        """Logits over the target's vocabulary, with the law's bias and allowed tokens."""
        logits_TV = self.decoder.logits(hidden_BRC.flatten(0, 1))[:, : self._vocab]
        logits_BRV = logits_TV.view(*hidden_BRC.shape[:2], -1)
        if law.bias_BV is not None:
            logits_BRV = logits_BRV + law.bias_BV[:, None, : self._vocab]
        if law.allowed_BV is not None:
            logits_BRV = logits_BRV.masked_fill(~law.allowed_BV[:, None, : self._vocab], -torch.inf)
        return logits_BRV

    def _noise(self, view: View) -> Tensor | None:
        """The target's noise at levels 1..D: float32 [B, D, V]; None if every request is greedy."""
        if not view.law.needs.noise:
            return None
        return noise_of(view.law, view.length_B, self.depth - 1, self._vocab)

    def _places(self, view: View) -> Places:
        size, width = self._room.page_size, view.tokens_BW.shape[1]
        return Places(view.table_BS, view.length_B, size, width)

    def _scratch_slots(self, batch: int) -> Tensor:
        """Slots of the drafted rows, the root's first: int64 [B, 1 + N]."""
        slot = torch.arange(batch * self._scratch, device=self._room.device)
        return (self._scratch_begin + slot).view(batch, self._scratch)
