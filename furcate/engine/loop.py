"""The loop around the round: admit, score prompts in chunks, play a round, deliver the tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from furcate.config import SamplingParams
from furcate.engine.answer import Answer, Taken
from furcate.engine.asking import settle
from furcate.engine.budget import Budget, Patience
from furcate.engine.build import Built
from furcate.engine.emitted import Emitted, Told
from furcate.engine.outputs import Choice, Piece, TokenLogprob
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
PROBES = 3  # rounds timed to learn the cost of a size; the first one only warms up


class Loop:
    """Continuous batching over one Round; single-threaded, whoever calls `step` drives all.

    The host reads the device once a round, at its end.
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
        self.budget = Budget(self._probe, most_nodes=most_nodes, adaptive=built.adaptive)
        self.patience = Patience.of(light=built.round.drafter.light)
        self.watch = Watch(active=not built.round.drafter.light)
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
            for rows in WARM_ROWS:
                self.budget.costs(needs).of(rows)
        elif self.player.records:
            self._probe(needs, self.budget.rows(needs, []))

    def drain(self) -> list[Piece]:
        """What may be shown since the last call."""
        pieces, self._outbox = self._outbox, []
        return pieces

    def step(self) -> None:
        """Advance everybody once; `drain` tells what came of it.

        Whatever goes wrong in a pass ends the requests it was for with "error", since device and
        host may no longer agree on them, and is raised; the others can go on.
        """
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
        if players:
            with self._ending(players):
                self._decode(players)
        self.watch.warn()

    def abort(self, request: Request) -> None:
        """End an answer where it stands; what it has emitted stays valid."""
        self._deliver(request, [], self._answers[request].end("abort"))

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
            self.round.prefill(view, rows, Span(chunk.end, self._run_of([request])))
            request.cached = request.read = chunk.end
            state.length_C[request.slot] = chunk.end
        if chunk.end == request.committed - 1:
            request.phase = Phase.DECODE
            self.scheduler.share_prompt(request)
            batch = self._batch([request], 1, needs).on(state.device)
            request.gains = self.round.propose(batch)[0].tolist()
        request.stats.prefill_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def _decode(self, players: list[Request]) -> None:
        """One round of everybody whose prompt is scored."""
        needs = needs_of([request.ask.params for request in players], self.limits.vocab)
        wanted = self.budget.rows(needs, [request.gains for request in players])
        began = time.perf_counter()
        players, rows = self.scheduler.reserve(wanted, self._preempted)
        for request in players:
            self.state.set_pages(request.slot, request.pages.numbers)
        batch = replace(self._batch(players, rows, needs), propose=self._asks(players, rows))
        known = len(self.player.played.recorded)
        emitted = self.player.play(batch)
        seconds = time.perf_counter() - began
        first = known < len(self.player.played.recorded)  # the time is that of the recording
        if not first and batch.propose == (rows > 1 or self.round.drafter.light):
            self.budget.observe(needs, rows * len(players), seconds)
        for b, told in enumerate(emitted.told()[: len(players)]):
            request = players[b]
            params = request.ask.params
            logprobs = _logprobs_of(emitted, b, told.tokens, params) if params.logprobs else []
            self._take(request, told, logprobs, seconds)

    def _asks(self, players: list[Request], rows: int) -> bool:
        """Whether the drafter is asked after this round; if so it is told what it has missed."""
        if not self.budget.adaptive:
            return True
        if any(request.gains for request in players):
            self.patience.note(rows > 1)
        if not self.patience.asks():
            return False
        for request in players:
            self._read_up(request)
        return True

    @torch.inference_mode()
    def _read_up(self, request: Request) -> None:
        """Show a drafter with keys of its own the tokens that were committed without it."""
        if self.round.drafter.light or request.read >= request.cached:
            return
        needs = needs_of([request.ask.params], self.limits.vocab)
        view = self.state.view(self._on_device([request.slot]), request.cached, needs)
        start_B = self._on_device([request.read])
        rows = chain(view.tokens_BW[:, request.read :], view.length_B - start_B)
        self.round.drafter.read(replace(view, length_B=start_B), rows)
        request.read = request.cached

    def _preempted(self, request: Request) -> None:
        """A request gives way; its pages will be found again with a drafter's keys in them."""
        self._read_up(request)
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
        self._read_up(request)
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

    def _batch(self, players: list[Request], rows: int, needs: Needs) -> Batch:
        longest = max(request.committed for request in players)
        asked = [r.ask.params for r in players if r.ask.params.logprobs]
        top = {p.logprobs_mode: 0 for p in asked}
        for p in asked:
            most = min(p.top_logprobs, self.limits.vocab)
            top[p.logprobs_mode] = max(top[p.logprobs_mode], most)
        return Batch(
            slot_B=torch.tensor([request.slot for request in players]),
            allowance_B=torch.tensor([rows] * len(players)),
            rows=rows,
            columns=longest + rows,
            run=self._run_of(players),
            needs=needs,
            raw_top=top.get("raw"),
            processed_top=top.get("processed"),
        )

    def _run_of(self, players: list[Request]) -> int | None:
        """First slot of a lone request whose pages follow one another; None: keys are gathered."""
        pages = players[0].pages.numbers
        if len(players) > 1 or pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        return pages[0] * self.scheduler.book.page_size

    @torch.inference_mode()
    def _probe(self, needs: Needs, rows: int) -> float:
        """Seconds of a round of `rows` rows in total, played by nobody on the scratch page."""
        each = min(rows, self.budget.buckets[-1])
        players = min(-(-rows // each), self.state.shape.capacity)
        batch = Batch(
            slot_B=torch.tensor([self.state.dummy] * players),
            allowance_B=torch.tensor([each] * players),
            rows=each,
            columns=each + 1,
            needs=needs,
            propose=rows > 1 or self.round.drafter.light,
        )
        times: list[float] = []
        for _ in range(PROBES):
            began = time.perf_counter()
            self.player.play(batch)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.state.device)


def _logprobs_of(
    emitted: Emitted, b: int, kept: list[int], params: SamplingParams
) -> list[TokenLogprob]:
    told = emitted.raw if params.logprobs_mode == "raw" else emitted.processed
    assert told is not None
    chosen = told.chosen_BD[b].tolist()
    ids = told.top_id_BDK[b].tolist()
    values = told.top_BDK[b].tolist()
    top = params.top_logprobs
    return [
        TokenLogprob(t, chosen[d], tuple(zip(ids[d][:top], values[d][:top], strict=True)))
        for d, t in enumerate(kept)
    ]
