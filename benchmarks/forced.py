"""Rounds without text: equal requests, a drafter that is told what is right, or a tree given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from gpu_cases import proposal
from targets import PAGE, Target
from torch import Tensor

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.base import Drafter, View
from furcate.drafters.footprint import Footprint
from furcate.engine.asking import Limits, settle
from furcate.engine.build import Built, build
from furcate.engine.player import Outcome
from furcate.engine.request import Request
from furcate.engine.round import Batch, Round
from furcate.engine.target import Span, chain
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.verify.law import Needs

__all__ = ["Drive", "Forced", "Given", "Sizes", "built_of", "median"]


@dataclass(frozen=True)
class Sizes:
    """Of the requests of a run."""

    batch: int
    context: int  # most tokens of a request, drafted ones included
    nodes: int  # most drafted


class Given:
    """Proposes the same random tree every time, which costs nothing: a round without drafting."""

    light = True
    layers: tuple[int, ...] = ()
    footprint = Footprint()

    def __init__(self, batch: int, nodes: int, device: torch.device) -> None:
        self.pool = nodes
        made = proposal(1, nodes, torch.device("cpu"))
        self.depth = int(made.depth_BP.max())
        self.depths = (self.depth,)
        fields = (made.tokens_BP, made.parent_BP, made.depth_BP, made.value_BP)
        self._most = Proposal(*(x.expand(batch + 1, -1).contiguous().to(device) for x in fields))

    def propose(self, view: View, levels: int) -> Proposal:
        count = len(view.slot_B)
        most = self._most
        return Proposal(
            most.tokens_BP[:count],
            most.parent_BP[:count],
            most.depth_BP[:count],
            most.value_BP[:count],
        )

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """It needs no features."""

    def read(self, view: View, rows: Draft) -> None:
        """There is no cache to fill."""

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """The next tree is the same whatever was accepted."""

    def forget(self, slot: int) -> None:
        """No request leaves anything behind."""

    def copy_page(self, source: int, target: int) -> None:
        """There is no cache to follow."""


class Forced:
    """Does what the drafter inside does, and then puts known tokens on its likeliest path.

    `token_W` is what plain decoding says, prompt and answer; the first `levels` are right.
    """

    def __init__(self, inner: Drafter, levels: int, context: int, device: torch.device) -> None:
        self.inner, self.levels = inner, levels
        self.depth, self.depths = inner.depth, inner.depths
        self.pool, self.light = inner.pool, inner.light
        self.layers, self.footprint = inner.layers, inner.footprint
        self.token_W = torch.zeros(context + 128, dtype=torch.int64, device=device)

    def propose(self, view: View, levels: int) -> Proposal:
        """The path is that of the best child at every level, whatever it is worth."""
        made = self.inner.propose(view, levels)
        tokens_BP, value_BP = made.tokens_BP.clone(), made.value_BP.clone()
        up_B1 = torch.full_like(view.length_B[:, None], -1)
        wrong_BP = (tokens_BP == self.token_W[view.length_B + 1][:, None]) & (made.depth_BP > 0)
        tokens_BP = torch.where(wrong_BP, tokens_BP + 1, tokens_BP)
        for depth in range(1, min(self.levels, self.depth) + 1):
            child_BP = (made.depth_BP == depth) & (made.parent_BP == up_B1)
            worth_BP = torch.where(child_BP, made.value_BP.clamp_min(-1e30), -torch.inf)
            at_B1 = worth_BP.argmax(1, keepdim=True)
            right_B1 = self.token_W[view.length_B + depth][:, None]
            taken_BP = child_BP & (tokens_BP == right_B1)
            tokens_BP = torch.where(taken_BP, tokens_BP + 1, tokens_BP)
            tokens_BP.scatter_(1, at_B1, right_B1)
            value_BP.scatter_(1, at_B1, -1e-3 * depth)
            up_B1 = at_B1
        return replace(made, tokens_BP=tokens_BP, value_BP=value_BP)

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """What was forced teaches nothing, but states are kept."""
        untold = None if draft.tag_BR is None else torch.full_like(draft.tag_BR, -1)
        self.inner.learn(view, replace(draft, tag_BR=untold), verdict, features_BRF)

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        self.inner.keep(view, rows, features_BRF)

    def read(self, view: View, rows: Draft) -> None:
        self.inner.read(view, rows)

    def forget(self, slot: int) -> None:
        self.inner.forget(slot)

    def copy_page(self, source: int, target: int) -> None:
        self.inner.copy_page(source, target)


class Drive:
    """Equal greedy requests side by side in pages of their own, played round by round.

    `prompt` random tokens each; with `scored` false their keys are random too, and nothing is read
    to make them.
    """

    def __init__(self, built: Built, sizes: Sizes, prompt: int, *, scored: bool = True) -> None:
        self.built, self.player, self.batch = built, built.player, sizes.batch
        self.round: Round = built.round
        self.prompt = prompt
        self.length = prompt - 1
        self.device = built.round.state.device
        room = sizes.context - prompt
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, seed=1)
        limits = Limits(self.round.target.decoder.spec.vocab_size, sizes.context, ())
        rng = torch.Generator().manual_seed(3)
        tokens = torch.randint(3, 4000, (prompt,), generator=rng).tolist()
        each = built.round.state.shape.pages
        for slot in range(self.batch):
            request = Request(settle(f"{slot}", tokens, params, limits), 0)
            self.round.state.admit(slot, request)
            first = 1 + slot * each
            self.round.state.set_pages(slot, list(range(first, first + each)))
        if scored:
            self._score()
        self.rewind()
        self.round.propose(self.asked(1).on(self.device))

    def asked(self, rows: int, unread: int = 0) -> Batch:
        """A round of all requests, behind so many that are not read yet."""
        longest = self.length + unread * min(rows, self.round.drafter.depth + 1)
        return Batch(
            slot_B=torch.arange(self.batch),
            allowance_B=torch.full((self.batch,), rows),
            rows=rows,
            columns=longest + 1 + rows,
            needs=Needs(),
            levels=max(self.round.drafter.depths, default=0),
        )

    def rewind(self) -> None:
        """The device forgets all that is accepted beyond what the host has read."""
        self.round.state.length_C[: self.batch] = self.length

    def run(self, rows: int, tokens: int) -> tuple[list[int], list[float]]:
        """Tokens of the first request, and milliseconds of every round."""
        found: list[int] = []
        times: list[float] = []
        for new, ms in self._rounds(rows):
            found += new
            times.append(ms)
            self.length = self.prompt - 1 + len(found)
            if len(found) >= tokens or not new:
                break
        return found, times

    def stand(self, rows: int, times: int) -> list[float]:
        """Milliseconds of rounds that all begin at the same length; three more only warm up."""
        taken = [ms for _, ms in islice(self._rounds(rows, still=True), times + 3)]
        return taken[3:]

    def _rounds(self, rows: int, *, still: bool = False) -> Iterator[tuple[list[int], float]]:
        """(what the first request got, milliseconds since the round before was read).

        As the engine does, a round is launched before the one ahead of it is read. With `still` the
        device forgets what it has accepted.
        """
        flights: deque[Outcome] = deque()
        last = time.perf_counter()
        try:
            while True:
                while len(flights) <= self.player.ahead:
                    unread = 0 if still else len(flights)
                    if still:
                        self.rewind()
                    flights.append(self.player.launch(self.asked(rows, unread)))
                told = flights.popleft()().told()
                now = time.perf_counter()
                yield told[0].tokens, (now - last) * 1e3
                last = now
        finally:
            for outcome in flights:
                outcome()

    def _score(self) -> None:
        """The prompts' keys: each is the same, and each is scored."""
        slot_B = torch.arange(self.batch, device=self.device)
        for part_B in slot_B.split(8):  # a pass over all of them would need much memory
            view = self.round.state.view(part_B, self.length, Needs())
            live_B = torch.full_like(part_B, self.length)
            self.round.prefill(view, chain(view.tokens_BW, live_B), Span(self.length))


def built_of(target: Target, drafter: Drafter | str, sizes: Sizes, *, graphs: bool = True) -> Built:
    """An engine's parts for these sizes."""
    each = -(-(sizes.context + sizes.nodes + 1) // PAGE)
    options = EngineOptions(
        max_batch=sizes.batch,
        max_context=sizes.context,
        kv_tokens=max(64, sizes.batch * each * PAGE),
        page_size=PAGE,
        graphs=graphs,
    )
    nodes = None if drafter == "off" else sizes.nodes
    how = DraftOptions(num_draft_tokens=nodes)
    return build(target.decoder, target.tokenizer, drafter, options, how)


def median(times: list[float]) -> float:
    """The middle one."""
    return sorted(times)[len(times) // 2]
