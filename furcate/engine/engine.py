"""The engine as a user meets it: load, generate, stream, abort, close."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine.build import Built, load
from furcate.engine.loop import Loop
from furcate.engine.memory import named
from furcate.engine.outputs import Output, Piece
from furcate.engine.report import backend_json
from furcate.engine.request import Request
from furcate.engine.turns import Turns
from furcate.errors import BadRequest

__all__ = ["Engine", "Message", "Prompt"]

Message = dict[str, str]
Prompt = str | list[Message]


class Engine:
    """A target, a drafter and the loop around them.

    One thread advances the loop at a time; any number of streams may be read side by side, each
    reader advancing all requests while it waits.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.tokenizer = built.tokenizer
        self._loop = Loop(built)
        self._lock = Turns()
        self._mail: dict[str, deque[Piece]] = {}
        self._open: dict[str, list[Request]] = {}
        self._asked = 0
        self._closed = False

    @classmethod
    def load(
        cls,
        target: str | Path,
        drafter: str | Path = "ngram",
        *,
        draft: DraftOptions | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a target by name, Hugging Face directory or GGUF file, and a drafter for it.

        Args:
            target: a name known to furcate ("smollm2-135m"), a directory with safetensors, a
                GGUF file, or a hub name that lies in the local Hugging Face cache.
            drafter: "ngram"; "off"; a head that comes with furcate for this target: "eagle3",
                "mtp" (the target's own where its directory holds one) or "medusa"; the directory
                of a head in any known format; another (small) model with the same tokenizer;
                "ngram+" and a head or model, both in one tree; "hybrid" is "ngram+eagle3".
            draft: how drafts are made, see `DraftOptions`; an option that the drafter would ignore
                is refused.
            **options: `dtype`, `device` and whatever else `EngineOptions` names.

        Raises:
            BadRequest, BadFile, Unsupported: naming what is wrong and what to do.
        """
        chosen = draft if isinstance(draft, DraftOptions) else DraftOptions(**(draft or {}))
        return cls(load(target, drafter, EngineOptions(**options), chosen))

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None) -> Output: ...

    @overload
    def generate(self, prompt: list[Message], params: SamplingParams | None = None) -> Output: ...

    @overload
    def generate(self, prompt: list[str], params: SamplingParams | None = None) -> list[Output]: ...

    def generate(self, prompt: Any, params: SamplingParams | None = None) -> Output | list[Output]:
        """Answer one prompt (text or chat messages), or a list of them together.

        A text is a user's turn if the model has a chat template. For another treatment pass
        messages, or token ids to `submit`.
        """
        many = isinstance(prompt, list | tuple) and all(isinstance(one, str) for one in prompt)
        if many and not prompt:
            raise BadRequest("must hold at least one prompt", field="prompt", value=prompt)
        prompts = [self.encode(one) for one in (prompt if many else [prompt])]
        ids: list[str] = []
        try:
            for one in prompts:
                ids.append(self.submit(one, params))
            outputs = [self.collect(request_id) for request_id in ids]
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return outputs if many else outputs[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces of an answer as they become certain; closing the iterator aborts the request."""
        request_id = self.submit(self.encode(prompt), params)
        try:
            while (piece := self.next_piece(request_id)) is not None:
                yield piece
        finally:
            self.abort(request_id)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio: the loop advances in a thread while the caller's goes on."""
        request_id = await asyncio.to_thread(self.submit, self.encode(prompt), params)
        try:
            while (piece := await asyncio.to_thread(self.next_piece, request_id)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(self.abort, request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: messages, or text as a user's turn where there is a template."""
        if not isinstance(prompt, str):
            _check_messages(prompt)
            return self.tokenizer.chat_ids(prompt)
        if not prompt:
            raise BadRequest("must not be empty", field="prompt", value=prompt)
        if self.tokenizer.has_template:
            return self.tokenizer.chat_ids([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, salt: str = ""
    ) -> str:
        """Queue token ids; returns the request's id for `next_piece`, `collect` and `abort`.

        Prompts with different salts never share cached pages.
        """
        with self._lock:
            if self._closed:
                raise BadRequest("the engine is closed", hint="load a new one")
            request_id = f"request-{self._asked}"
            requests = self._loop.submit(
                request_id, prompt_ids, SamplingParams() if params is None else params, salt
            )
            self._asked += 1
            self._open[request_id] = requests
            self._mail[request_id] = deque()
            return request_id

    def next_piece(self, request_id: str) -> Piece | None:
        """The next piece of a request, advancing everybody until there is one; None at its end."""
        while True:
            with self._lock:  # anew for every step, so that others can submit and abort
                mail = self._mail.get(request_id)
                if mail is None:
                    return None
                if mail:
                    return mail.popleft()
                if all(request.choice is not None for request in self._open[request_id]):
                    self._forget(request_id)
                    return None
                self._advance()

    def collect(self, request_id: str) -> Output:
        """Run a request to its end and return all of it."""
        requests = self._open.get(request_id)
        if requests is None:
            raise BadRequest("no such open request", field="request_id", value=request_id)
        while self.next_piece(request_id) is not None:
            pass
        return _output(requests)

    def abort(self, request_id: str) -> Output | None:
        """End a request wherever it stands, give back what it holds, return what it had so far.

        None for a request that is not open: it is done already.
        """
        with self._lock:
            return self._abort(request_id)

    def backend(self) -> dict[str, Any]:
        """What rounds run on: kernels and recorded graphs, and why not the device's own."""
        return backend_json(self.built)

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Measure ahead what rounds of this kind cost; else the first that needs it waits."""
        with self._lock, named("rounds were measured"):
            self._loop.warm_up(params or SamplingParams())

    def step(self) -> bool:
        """Advance all requests once; whether anybody is still at work."""
        with self._lock:
            if self._closed:
                return False
            self._advance()
            return self._loop.scheduler.busy

    def close(self) -> None:
        """Abort what is open and let go of the weights and the cache."""
        with self._lock:
            if self._closed:
                return
            for request_id in list(self._open):
                self._abort(request_id)
            self._closed = True
            del self._loop, self.built

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _advance(self) -> None:
        try:
            with named("a round was played"):
                self._loop.step()
        finally:  # a fault has ended some requests: their readers hear of it
            for piece in self._loop.drain():
                if piece.request_id in self._mail:
                    self._mail[piece.request_id].append(piece)

    def _abort(self, request_id: str) -> Output | None:
        requests = self._open.get(request_id)
        if requests is None:
            return None
        for request in requests:
            if request.choice is None:
                self._loop.abort(request)
        self._forget(request_id)
        return _output(requests)

    def _forget(self, request_id: str) -> None:
        self._mail.pop(request_id, None)
        self._open.pop(request_id, None)


def _check_messages(prompt: object) -> None:
    if not isinstance(prompt, Sequence) or not all(isinstance(one, Mapping) for one in prompt):
        what = "must be a text, or a list of messages"
        raise BadRequest(what, field="prompt", value=prompt)
    if not prompt:
        raise BadRequest("must hold at least one message", field="prompt", value=prompt)


def _output(requests: list[Request]) -> Output:
    ask = requests[0].ask
    choices = tuple(request.choice for request in requests if request.choice is not None)
    return Output(ask.request_id, ask.prompt, ask.seed, choices)
