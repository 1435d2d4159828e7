"""The loop around the round: admit, score prompts in chunks, launch a round, deliver an outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from furcate.config import SamplingParams
from furcate.engine.answer import Answer, Taken
from furcate.engine.asking import settle
from furcate.engine.budget import Budget, Patience, Returns
from furcate.engine.build import Built
from furcate.engine.catch_up import CatchUp
from furcate.engine.emitted import Told
from furcate.engine.flight import Flight, Flights
from furcate.engine.lineup import Lineup
from furcate.engine.outputs import Choice, Piece, TokenLogprob
from furcate.engine.probe import nobody, seconds_of
from furcate.engine.request import Phase, Request
from furcate.engine.round import Batch
from furcate.engine.scheduler import Chunk
from furcate.engine.target import Span, chain
from furcate.engine.watch import Watch
from furcate.verify.law import Needs, needs_of
from furcate.verify.stops import Finish

__all__ = ["Loop"]

BROKEN = "the target's logits at this position are not finite numbers"
WARM_ROWS = (1, 2, 4, 8, 16)


class Loop:
    """Continuous batching over one Round; single-threaded, whoever calls `step` drives all.

    The host reads the device once a round, at its end, and where the player has it so while the
    next round is under way already: the device never waits for what the host makes of a round.
    """

    def __init__(self, built: Built) -> None:
        self.round = built.round
        self.player = built.player
        self.state = built.round.state
        self.scheduler = built.scheduler
        self.tokenizer = built.tokenizer
        self.limits = built.limits
        self._reuse_prefix = built.options.reuse_prefix
        most_nodes = built.round.most_nodes
        drafter = built.round.drafter
        self.budget = Budget(
            self._probe,
            most_nodes=most_nodes,
            adaptive=built.adaptive,
            depths=drafter.depths,
            deepest=drafter.depth,
        )
        self.patience = Patience.of(light=drafter.light)
        self.returns = Returns()
        self.watch = Watch(active=not drafter.light)
        self.flights = Flights(self.scheduler.book.pool, self.state.shape.levels)
        self._lineup = Lineup(self.limits.vocab, self.scheduler.book.page_size)
        self._catch_up = CatchUp(self.round, self.limits.vocab)
        self._ended = 0.0  # when the last round that was read was over
        self._news = False  # gains have come that no draft was judged by yet
        self._answers: dict[Request, Answer] = {}
        self._outbox: list[Piece] = []

    def submit(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, salt: str = ""
    ) -> list[Request]:
        """Queue a prompt's `n` answers; raises BadRequest for what cannot be honoured.

        Without reuse of prefixes a request's pages have a salt of their own: its `n` answers and
        its own return after a preemption find them, nobody else does.
        """
        salt = salt if self._reuse_prefix else request_id
        ask = settle(request_id, prompt, params, self.limits, salt)
        requests = [Request(ask, index) for index in range(params.n)]
        for request in requests:
            request.stats.prompt_tokens = len(prompt)
            self._answers[request] = Answer(ask, self.tokenizer)
            self.scheduler.add(request)
        return requests

    def warm_up(self, params: SamplingParams) -> None:
        """Learn ahead what small rounds of this kind cost, so that no request waits for it."""
        needs = needs_of([params], self.limits.vocab)
        if self.budget.adaptive and self.budget.most_nodes:
            costs, levels = self.budget.costs(needs), self.budget.levels_behind(needs, 1, 1)
            for rows in WARM_ROWS:
                costs.of(rows, levels=levels)
        elif self.player.records:
            self._probe(needs, 1, self.budget.rows(needs, []), self.budget.levels.now)

    def drain(self) -> list[Piece]:
        """What may be shown since the last call."""
        pieces, self._outbox = self._outbox, []
        return pieces

    def step(self) -> None:
        """Advance everybody once; `drain` tells what came of it.

        Whatever goes wrong in a pass ends the requests it was for with "error", since device and
        host may no longer agree on them, and is raised; the others can go on.
        """
        if self.scheduler.newcomers:
            self._land()
        for request in self.scheduler.admit():
            self.state.admit(request.slot, request)
            self.state.set_pages(request.slot, request.pages.numbers)
            self.round.drafter.forget(request.slot)
            request.read = request.cached  # pages that are found hold a drafter's keys too
        chunk = self.scheduler.next_chunk()
        if chunk is not None:
            with self._ending([chunk.request]):
                self._prefill(chunk)
        players = self.scheduler.decoding()
        if self._first_draft(players):
            self._land()
            players = self.scheduler.decoding()
        if players:
            with self._ending(players):
                self._decode(players)
        self._land(self.player.ahead)
        self._land_the_last()
        self.watch.warn()

    def abort(self, request: Request) -> None:
        """End an answer where it stands; what it has emitted stays valid."""
        self._deliver(request, [], self._answers[request].end("abort"))
        self._land_the_last()

    @contextmanager
    def _ending(self, requests: list[Request]) -> Iterator[None]:
        """End these requests if what is done for them fails."""
        try:
            yield
        except BaseException as fault:
            for request in requests:
                if request.choice is None:
                    request.cached = 0  # nobody may continue from its pages
                    what = f"{type(fault).__name__}: {fault}"
                    self._deliver(request, [], self._answers[request].end("error"), what)
            raise

    @torch.inference_mode()
    def _prefill(self, chunk: Chunk) -> None:
        """Score a stretch of a prompt; once it is whole, draft the first round."""
        began = time.perf_counter()
        request, state = chunk.request, self.state
        slot_B = self._on_device([request.slot])
        needs = needs_of([request.ask.params], self.limits.vocab)
        if chunk.end > chunk.start:
            view = state.view(slot_B, chunk.end, needs)
            rows = chain(
                view.tokens_BW[:, chunk.start :], self._on_device([chunk.end - chunk.start])
            )
            self.round.prefill(view, rows, Span(chunk.end, self._lineup.run([request])))
            request.cached = request.read = chunk.end
            state.length_C[request.slot] = chunk.end
        if chunk.end == request.committed - 1:
            request.phase = Phase.DECODE
            self.scheduler.share_prompt(request)
            batch = self._lineup.of([request], 1, needs).on(state.device)
            request.levels = self.budget.levels.now
            batch = replace(batch, levels=request.levels)
            request.gains = self.round.propose(batch)[0].tolist()
            self._news = True
        request.stats.prefill_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def _decode(self, players: list[Request]) -> None:
        """Launch one round of everybody whose prompt is scored.

        The gains are those of the rounds that are read: behind a round in flight the rows are
        chosen by the draft before the one that they will score. The first draft after a rest has
        none before it, and is waited for.
        """
        needs = needs_of([request.ask.params for request in players], self.limits.vocab)
        rows = self.budget.rows(needs, self._gains(players))
        if not (self.flights and self.scheduler.reserve_ahead(rows, self.flights.unread)):
            self._land()  # running ahead gives way before speculation does
            players, rows = self.scheduler.reserve(rows, self._preempted)
        if not players:
            return
        for request in players:
            self.state.set_pages(request.slot, request.pages.numbers)
        batch = self._lineup.of(players, rows, needs, self.flights.unread)
        batch = replace(batch, levels=self._levels(players, rows, needs))
        known, began = self.player.played.recordings, time.perf_counter()
        flight = Flight(players, batch, began, self.player.launch(batch))
        self.flights.launched(flight)
        for request in players:
            flight.levels.append(request.levels)
            request.levels = batch.levels
        if self.player.played.recordings > known:  # the time is that of the recording
            self.flights.disturbed()

    def _first_draft(self, players: list[Request]) -> bool:
        """Whether the draft in flight is the first after a rest, of which no gains are known."""
        drafts = self.budget.most_nodes > 0 and self.flights.asked
        return drafts and not any(request.gains for request in players)

    def _gains(self, players: list[Request]) -> list[list[float]]:
        """What the next drafts promise; nothing behind a round that has not asked for any."""
        if self.flights and not self.flights.asked:
            return [[] for _ in players]
        return [request.gains for request in players]

    def _land(self, left: int = 0) -> None:
        """Read the oldest rounds until no more than `left` are in flight."""
        while len(self.flights) > left:
            flight = self.flights.next()
            try:
                with self._ending(flight.players):
                    self._read(flight)
            finally:
                self.flights.landed(flight)

    def _land_the_last(self) -> None:
        """Where nobody decodes any more the rounds in flight are nobody's."""
        if not self.scheduler.decoding():
            self._land()

    @torch.inference_mode()
    def _read(self, flight: Flight) -> None:
        """Wait for a round; whoever took part and is still there takes what came of it.

        It has taken the time from its launch, or from the end of the one ahead of it, to its end.
        """
        emitted, batch = flight.outcome(), flight.batch
        began, self._ended = max(flight.began, self._ended), time.perf_counter()
        seconds = self._ended - began
        told = emitted.told()
        there = [b for b, r in enumerate(flight.players) if r.phase is Phase.DECODE]
        # of a draft of which no node was scored nothing is known
        scored = [b for b in there if flight.levels[b] and told[b].drafted]
        self.budget.levels.heard([(flight.levels[b], told[b].accepted) for b in scored])
        for b in there:
            request = flight.players[b]
            logprobs = emitted.logprobs(b, told[b].tokens, request.ask.params)
            request.stats.levels += flight.levels[b]
            self._take(request, told[b], logprobs, seconds)
        if there and flight.timed and self.budget.adaptive:  # may launch: all is read by now
            self._reckon(batch, [len(told[b].tokens) for b in there], seconds)
        self._news = True

    def _reckon(self, batch: Batch, counts: Sequence[int], seconds: float) -> None:
        """What a round tells of costs, and of what drafting brings to those who are still there."""
        needs, levels, players = batch.needs, batch.levels, len(batch.slot_B)
        rows = batch.rows * players
        self.budget.observe(needs, rows, seconds, requests=players, levels=levels)
        if levels and not self.round.drafter.light:
            plain = self.budget.costs(needs).of(players, requests=players)
            self.returns.note(sum(counts), len(counts) * seconds / plain)

    def _levels(self, players: list[Request], rows: int, needs: Needs) -> int:
        """Levels of the draft behind this round; 0 while the drafter is not asked."""
        if self.budget.adaptive and not self._asks(players, rows):
            return 0
        return self.budget.levels_behind(needs, rows, len(players))

    def _asks(self, players: list[Request], rows: int) -> bool:
        """Whether the drafter is asked after this round; if so it is told what it has missed."""
        if self._news and any(request.gains for request in players):
            paid = rows > 1 and (self.round.drafter.light or self.returns.positive)
            if self.patience.note(paid):
                self.returns.forget()
            self._news = False
        if not self.patience.asks():
            return False
        if not self.flights.asked:
            for request in players:
                self._catch_up.read(request, self.flights.unread)
        return True

    def _preempted(self, request: Request) -> None:
        """A request gives way; its pages will be found again with a drafter's keys in them."""
        self._catch_up.read(request)
        self.state.release(request.slot)

    def _take(
        self, request: Request, told: Told, logprobs: list[TokenLogprob], seconds: float
    ) -> None:
        """Note what one request got out of a round."""
        stats = request.stats
        stats.rounds += 1
        stats.decode_seconds += seconds
        stats.drafted += told.drafted
        stats.accepted += told.accepted
        stats.off_likeliest_path += told.accepted >= 3 and told.strayed
        stats.saw(told.accepted, told.offered)
        self.watch.note(told.drafted, len(told.tokens))
        answer = self._answers[request]
        taken = answer.take(told.tokens, Finish(told.finish))
        broken = taken.finish_reason is None and told.broken
        if broken:
            taken = answer.end("error", after=taken)
        kept = told.tokens[: taken.tokens]
        stats.tokens += len(kept)
        request.cached += len(kept)
        request.output.extend(kept)
        request.gains = told.gains
        if request.gains:  # whoever proposes has seen all that is committed
            request.read = request.cached
        request.logprobs.extend(logprobs[: len(kept)])
        if broken:
            request.cached = 0  # its keys may be broken too: nobody may continue from them
        self._deliver(request, kept, taken, BROKEN if broken else None)

    def _deliver(
        self, request: Request, tokens: list[int], taken: Taken, error: str | None = None
    ) -> None:
        """Put a piece into the outbox; closes the request if that was its last."""
        params = request.ask.params
        if taken.finish_reason is not None:
            self._close(request, taken, error)
        new = request.logprobs[len(request.logprobs) - len(tokens) :] if params.logprobs else None
        piece = Piece(
            request_id=request.ask.request_id,
            index=request.index,
            text=taken.text,
            token_ids=tuple(tokens),
            finish_reason=taken.finish_reason,
            logprobs=None if new is None else tuple(new),
            choice=request.choice,
        )
        self._outbox.append(piece)

    def _close(self, request: Request, taken: Taken, error: str | None) -> None:
        answer = self._answers.pop(request)
        slot = request.slot
        self._catch_up.read(request)
        self.flights.hold(request.pages.numbers)
        self.scheduler.finish(request)
        if slot >= 0:
            self.state.release(slot)
            self.round.drafter.forget(slot)
        if not self._reuse_prefix and all(other.ask is not request.ask for other in self._answers):
            self.scheduler.book.prefixes.drop(request.ask.salt)
        params = request.ask.params
        request.choice = Choice(
            index=request.index,
            text=answer.text,
            token_ids=tuple(request.output),
            finish_reason=taken.finish_reason or "",
            stop_reason=taken.stop_reason,
            logprobs=tuple(request.logprobs) if params.logprobs else None,
            stats=request.stats,
            error=error,
        )

    def _probe(self, needs: Needs, requests: int, rows: int, levels: int) -> float:
        """Seconds of a round of `rows` rows in total that drafts so many levels."""
        self.flights.disturbed()
        most = self.budget.buckets[-1]
        batch = nobody(self.state, requests, rows, needs, levels=levels, most=most)
        return seconds_of(self.player, batch)

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.state.device)
