"""What the device knows of every request, by slot; the last slot is a dummy that nobody owns.

Legend: C slots (capacity and the dummy), B requests in a round, W token columns, P pages of a
table, V vocabulary, S stop ids, D levels of a path, N nodes, F and I numbers of a law.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.config import SamplingParams
from furcate.drafters.base import Tokens, View
from furcate.engine.request import Request
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.entries import FLOATS, INTS, Book, Entries
from furcate.kernels.ledger import Settled
from furcate.verify.law import Law, Needs
from furcate.verify.stops import settle

__all__ = ["MAX_STOP_IDS", "State", "StateShape"]

MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes that stay the same for the life of an engine."""

    capacity: int  # slots for requests, dummy excluded
    context: int  # most tokens of a request
    levels: int  # most tokens a round can emit
    pages: int  # pages of a request's table
    pool: int  # nodes of a proposal
    vocab: int


class State:
    """Lengths, tokens, options, counts and proposals of all requests, on the device."""

    def __init__(self, shape: StateShape, device: torch.device, kernels: Kernels = TORCH) -> None:
        slots = shape.capacity + 1
        self.kernels = kernels
        self.shape = shape
        self.device = device
        self.dummy = shape.capacity
        # one column more than can be committed: what a round does not emit is written there
        self.tokens_CW = self._ints(slots, shape.context + shape.levels + 1)
        self.length_C = self._ints(slots)
        self.finish_C = self._ints(slots)
        self.table_CP = self._ints(slots, shape.pages)
        self.stop_CS = self._ints(slots, MAX_STOP_IDS) - 1
        self.floats_FC = torch.ones(len(FLOATS), slots, device=device)
        self.ints_IC = self._ints(len(INTS), slots)
        self.finish_C[self.dummy] = 1
        self.book = Book(
            self.tokens_CW,
            self.length_C,
            self.finish_C,
            self.table_CP,
            self.stop_CS,
            self.floats_FC,
            self.ints_IC,
        )
        self._dense: dict[str, Tensor] = {}
        self._pages: dict[int, list[int]] = {}  # what the device knows of `table_CP`
        self.proposal = self._no_proposal(slots)

    def admit(self, slot: int, request: Request) -> None:
        """Take a request into `slot`; its pages are told by `set_pages` as they are reserved."""
        ask, params = request.ask, request.ask.params
        tokens = torch.tensor(request.tokens, device=self.device)
        self.tokens_CW[slot, : len(tokens)] = tokens
        self.length_C[slot] = request.cached
        self.finish_C[slot] = 0
        self.floats_FC[:, slot] = torch.tensor(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ]
        )
        top_k = params.top_k if params.top_k > 0 else self.shape.vocab
        seed = ask.seed - (1 << 64) if ask.seed >= 1 << 63 else ask.seed
        counted = [top_k, seed, request.index, params.min_tokens, len(ask.prompt), ask.limit]
        self.ints_IC[:, slot] = torch.tensor(counted)
        self.stop_CS[slot] = -1
        self.stop_CS[slot, : len(ask.stop_ids)] = torch.tensor(ask.stop_ids, dtype=torch.int64)
        self.proposal.value_BP[slot] = -torch.inf
        self._admit_dense(slot, request)

    def set_pages(self, slot: int, pages: list[int]) -> None:
        """Tell the device which pages the request in `slot` owns, if it does not know already."""
        if self._pages.get(slot) == pages:
            return
        self._pages[slot] = list(pages)
        # pinned, so that the device copies it in its turn while the host goes on
        pin = self.device.type == "cuda"
        row_P = torch.zeros(self.shape.pages, dtype=torch.int64, pin_memory=pin)
        row_P[: len(pages)] = torch.tensor(pages, dtype=torch.int64)
        self.table_CP[slot].copy_(row_P, non_blocking=True)

    def release(self, slot: int) -> None:
        """Nobody is in `slot` any more: its rows write to the scratch page only."""
        self._pages.pop(slot, None)
        self.table_CP[slot] = 0
        self.finish_C[slot] = 1
        self.length_C[slot] = 0

    def entries(self, slot_B: Tensor, *, at_work: bool = False) -> Entries:
        """What is known of these; `at_work`: of the dummy in place of finished ones."""
        return self.kernels.entries(self.book, slot_B, self.dummy if at_work else None)

    def view(self, slot_B: Tensor, columns: int, needs: Needs) -> View:
        """The requests in `slot_B`, their tokens cut to `columns`."""
        return self.seen(self.entries(slot_B), columns, needs)

    def seen(self, of: Entries, columns: int, needs: Needs) -> View:
        """The same from what was looked up already."""
        return View(
            slot_B=of.slot_B,
            tokens=Tokens(self.tokens_CW, of.slot_B, columns),
            length_B=of.length_B,
            table_BS=of.table_BP,
            law=self._law(of, needs),
        )

    def commit(
        self, found: Entries, draft: Draft, verdict: Verdict, *, needs: Needs, gains: int
    ) -> Settled:
        """Append the emitted tokens, move the lengths, keep the counts.

        The verdict is uncut: the outcome says how much of it is kept. It has room for `gains` of
        the next proposal; 0: there will be none, and the proposals are withdrawn.
        """
        value_CP = None if gains else self.proposal.value_BP
        by = self.kernels.settle or settle
        settled = by(self.book, found, draft, verdict, value_CP, gains)
        if needs.penalties:
            self._count(found.slot_B, verdict.emitted_BD, settled.count_B)
        return settled

    def _count(self, slot_B: Tensor, emitted_BD: Tensor, count_B: Tensor) -> None:
        counts_CV = self._dense["counts"]
        level_D = torch.arange(emitted_BD.shape[1], device=self.device)
        kept_BD = level_D < count_B[:, None]
        counts_CV.index_put_(
            (slot_B[:, None], emitted_BD), kept_BD.to(counts_CV.dtype), accumulate=True
        )

    def _law(self, of: Entries, needs: Needs) -> Law:
        floats = dict(zip(FLOATS, of.floats_FB.unbind(0), strict=True))
        ints = dict(zip(INTS, of.ints_IB.unbind(0), strict=True))
        dense, slot_B = self._dense, of.slot_B
        return Law(
            temperature_B=floats["temperature"],
            top_k_B=ints["top_k"],
            top_p_B=floats["top_p"],
            min_p_B=floats["min_p"],
            repetition_B=floats["repetition"],
            presence_B=floats["presence"],
            frequency_B=floats["frequency"],
            seed_B=ints["seed"],
            choice_B=ints["choice"],
            min_tokens_B=ints["min_tokens"],
            output_B=of.output_B,
            stop_BS=of.stop_BS,
            bias_BV=dense["bias"][slot_B] if needs.bias else None,
            allowed_BV=dense["allowed"][slot_B] if needs.allowed else None,
            prompt_BV=dense["prompt"][slot_B] if needs.penalties else None,
            counts_BV=dense["counts"][slot_B] if needs.penalties else None,
            needs=needs,
        )

    def _admit_dense(self, slot: int, request: Request) -> None:
        """Rows over the vocabulary, which exist only once some request has needed them."""
        params, vocab = request.ask.params, self.shape.vocab
        rows: dict[str, Tensor] = {}
        if params.logit_bias:
            rows["bias"] = torch.zeros(vocab)
            for token, bias in params.logit_bias.items():
                rows["bias"][token] = bias
        if params.allowed_token_ids is not None:
            rows["allowed"] = torch.zeros(vocab, dtype=torch.bool)
            rows["allowed"][list(params.allowed_token_ids)] = True
        if _penalised(params):
            rows["prompt"] = torch.zeros(vocab, dtype=torch.bool)
            rows["prompt"][list(request.ask.prompt)] = True
            rows["counts"] = torch.bincount(
                torch.tensor(request.output, dtype=torch.int64), minlength=vocab
            )
        for name, row in rows.items():
            if name not in self._dense:
                full = torch.ones if name == "allowed" else torch.zeros
                size = (self.shape.capacity + 1, vocab)
                self._dense[name] = full(size, dtype=row.dtype, device=self.device)
        for name, dense in self._dense.items():
            dense[slot] = rows[name].to(self.device) if name in rows else name == "allowed"

    def _ints(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self.device)

    def _no_proposal(self, slots: int) -> Proposal:
        pool = self.shape.pool
        return Proposal(
            tokens_BP=self._ints(slots, pool),
            parent_BP=self._ints(slots, pool) - 1,
            depth_BP=self._ints(slots, pool) + 1,
            value_BP=torch.full((slots, pool), -torch.inf, device=self.device),
            tag_BP=self._ints(slots, pool) - 1,
        )


def _penalised(p: SamplingParams) -> bool:
    return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
