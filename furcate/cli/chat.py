"""`furcate chat`: a conversation in the terminal; Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from furcate.cli.drafting import DraftFlags
from furcate.cli.fallbacks import fallbacks
from furcate.cli.lazy import drafter_json, load_engine
from furcate.cli.options import Quiet, SamplingFlags, TargetFlags
from furcate.cli.show import err, print_json, print_text, stats_json, stats_line
from furcate.config import SamplingParams
from furcate.errors import BadFile, UserError

with suppress(ImportError):  # not on every system; where it is, `input` edits lines with it
    import readline  # noqa: F401

if TYPE_CHECKING:
    from furcate.engine.engine import Engine
    from furcate.engine.outputs import Choice

__all__ = ["chat"]

HELP = """\
/help   this list
/reset  forget the conversation
/stats  what all answers so far did together
/exit   leave (so does Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """How the conversation starts and shows."""

    system: Annotated[str | None, Option(help="A system message before the first turn.")] = None
    as_json: Annotated[
        bool, Option("--json", help="Read all turns, then print one JSON object.")
    ] = False
    quiet: Quiet = False


def chat(flags: ChatFlags, sampling: SamplingFlags, draft: DraftFlags, target: TargetFlags) -> None:
    """Talk with the model; a line is a turn."""
    params = sampling.lone_params()
    with load_engine(target, draft, max_batch=1) as engine:
        talk = Talk(engine, params, flags)
        for line in _lines(silent=flags.as_json):
            if line == "/exit":
                break
            talk.take(line)
        backend = engine.backend()
        drafter = {"drafter": draft.chosen_drafter(), "drafter_details": drafter_json(engine)}
    if flags.as_json:
        print_json(talk.record() | drafter | backend)
    elif not flags.quiet:
        for line in fallbacks(backend):
            err().print(line, style="dim")


@dataclass(slots=True)
class Talk:
    """A conversation under way."""

    engine: Engine
    params: SamplingParams
    flags: ChatFlags
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to the system message, if there is one."""
        system = self.flags.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def take(self, line: str) -> None:
        """Carry out a command, or answer a turn."""
        if line == "/reset":
            self.reset()
        elif line == "/stats":
            err().print(self._totals(), style="dim")
        elif line == "/help":
            err().print(HELP)
        elif line.startswith("/"):
            err().print(f"no such command: {line.split()[0]}; try /help")
        elif line.strip():
            self._turn(line)

    def record(self) -> dict[str, Any]:
        """The conversation for programs."""
        answers = [
            {"finish_reason": answer.finish_reason, "stats": stats_json(answer.stats)}
            for answer in self.answers
        ]
        return {"messages": self.messages, "answers": answers}

    def _totals(self) -> str:
        stats = [answer.stats for answer in self.answers]
        return stats_line(sum(stats[1:], stats[0])) if stats else "nothing is answered yet"

    def _turn(self, line: str) -> None:
        """Answer; a turn that cannot be answered leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            request_id = self.engine.submit(self.engine.encode(asked), self.params)
        except UserError as reason:
            err().print(f"error: {reason}; /reset starts afresh")
            return
        answer = self._answer(request_id)
        assert answer is not None
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason == "abort":
            err().print("(stopped)", style="dim")
        self.answers.append(answer)
        if answer.error is not None:
            err().print(f"error: {answer.error}")
        if not self.flags.quiet and not self.flags.as_json:
            err().print(f"{stats_line(answer.stats)}\n", style="dim")

    def _answer(self, request_id: str) -> Choice | None:
        """The answer, shown as it grows; as far as it came if it was stopped."""
        answer = None
        with _interrupts() as interrupts:
            while not interrupts and answer is None:
                piece = self.engine.next_piece(request_id)
                assert piece is not None, "an answer ends with a piece that holds all of it"
                answer = piece.choice
                if not self.flags.as_json:
                    print_text(piece.text)
        stopped = self.engine.abort(request_id)
        if not self.flags.as_json:
            print_text("\n")
        return stopped.choices[0] if answer is None and stopped is not None else answer


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Notes Ctrl-C in a list instead of raising, so that a round is never torn apart."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if noted:  # a second one means it
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(*, silent: bool) -> Iterator[str]:
    """Lines of standard input; a prompt where a person types them."""
    asking = sys.stdin.isatty() and not silent
    if asking:
        err().print("a line is a turn; /help lists commands", style="dim")
    while True:
        try:
            line = input("> " if asking else "")
        except EOFError:
            if asking:
                print_text("\n")
            return
        except KeyboardInterrupt:
            if not asking:
                raise
            print_text("\n")  # as shells do: drop the line, ask again
            continue
        except UnicodeDecodeError as reason:
            what = f"standard input is not UTF-8 at byte {reason.start}"
            raise BadFile(what, field="turn") from None
        yield line.rstrip()
