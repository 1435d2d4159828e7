"""`furcate generate`: answer one prompt, and on request show that plain decoding says the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from furcate.cli.drafting import DraftFlags
from furcate.cli.fallbacks import fallbacks
from furcate.cli.lazy import bench_module, compare_module, drafter_json, load_engine
from furcate.cli.options import Json, Quiet, SamplingFlags, TargetFlags
from furcate.cli.show import (
    err,
    logprob_json,
    print_json,
    print_text,
    stats_json,
    stats_line,
    why_parted,
)
from furcate.config import SamplingParams
from furcate.errors import BadFile, BadRequest, RequestFailed

if TYPE_CHECKING:
    from furcate.engine.compare import Parting
    from furcate.engine.engine import Engine
    from furcate.engine.outputs import Choice, Output

__all__ = ["answered", "generate"]

_TOGETHER = 8  # answers of one prompt decoded together; further ones wait


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """What is asked."""

    prompt: Annotated[
        str, Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ]
    system: Annotated[str | None, Option(help="A system message before the prompt.")] = None
    raw: Annotated[
        bool, Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False


@dataclass(frozen=True, slots=True)
class ShowFlags:
    """What is shown."""

    compare: Annotated[
        bool, Option("--compare", help="Decode plainly too; say whether the tokens are equal.")
    ] = False
    as_json: Json = False
    quiet: Quiet = False


@dataclass(frozen=True, slots=True)
class _Beside:
    """The answer beside plain decoding.

    Speeds are those of a second run of both: the first one also allocates and learns what rounds
    cost.
    """

    parting: Parting | None
    speed: float  # tokens per second with drafting
    plain_speed: float

    @property
    def wrong(self) -> bool:
        """Whether the answers differ and rounding does not explain it."""
        return self.parting is not None and not self.parting.tie

    @property
    def ratio(self) -> float:
        return self.speed / self.plain_speed if self.plain_speed else 0.0


def generate(
    ask: PromptFlags,
    show: ShowFlags,
    sampling: SamplingFlags,
    draft: DraftFlags,
    target: TargetFlags,
) -> None:
    """Answer one prompt; with --compare the exit code is 1 if an answer is wrong."""
    text, params = _prompt(ask), sampling.params()
    _check_shown(show, params)
    most, engines = min(params.n, _TOGETHER), 2 if show.compare else 1
    with load_engine(target, draft, max_batch=most, engines=engines) as engine:
        prompt = _encoded(engine, ask, text)
        output = answered(engine, prompt, params, aloud=not show.as_json)
        beside = _compared(engine, output, params) if show.compare else None
        drafter = {"drafter": draft.chosen_drafter(), "drafter_details": drafter_json(engine)}
        drafter |= (backend := engine.backend())
    if show.as_json:
        print_json(_record(output, beside) | drafter)
    elif beside is not None:
        _tell(output, beside)
    elif not show.quiet:
        for choice in output.choices:
            err().print(f"{stats_line(choice.stats)} · seed {output.seed}", style="dim")
    if not show.as_json and not show.quiet:
        for line in fallbacks(backend):
            err().print(line, style="dim")
    if beside is not None and beside.wrong:
        raise Exit(1)


def answered(engine: Engine, prompt: list[int], params: SamplingParams, *, aloud: bool) -> Output:
    """The answer, written to standard output where `aloud`: as it grows if it is the only one.

    Raises:
        RequestFailed: the model gave no usable numbers.
    """
    request_id = engine.submit(prompt, params)
    grows = aloud and params.n == 1
    while grows and (piece := engine.next_piece(request_id)) is not None:
        print_text(piece.text)
        if piece.choice is not None:
            break
    output = engine.collect(request_id)
    if grows:
        print_text("\n")
    elif aloud:
        _print_all(output)
    for choice in output.choices:
        if choice.error is not None:
            raise RequestFailed(choice.error, hint="look for damage in the target's weights")
    return output


def _print_all(output: Output) -> None:
    for choice in output.choices:
        print_text(f"--- answer {choice.index + 1} of {len(output.choices)}\n{choice.text}\n")


def _check_shown(show: ShowFlags, params: SamplingParams) -> None:
    """What would be computed and shown nowhere is refused."""
    if params.logprobs and not show.as_json:
        raise BadRequest("logprobs are shown in JSON only", field="--logprobs", hint="add --json")
    if show.compare and params.n > 1:
        hint = "leave one of them out"
        raise BadRequest("--compare sets one answer beside one", field="--n", hint=hint)


def _prompt(ask: PromptFlags) -> str:
    if ask.raw and ask.system is not None:
        hint = "write the system message into the prompt, or leave --raw out"
        raise BadRequest("a raw prompt has no messages", field="--system", hint=hint)
    text = _standard_input() if ask.prompt == "-" else ask.prompt
    if not text.strip():
        raise BadRequest("must not be empty", field="prompt", value=text)
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as reason:
        what = f"standard input is not UTF-8 at byte {reason.start}"
        raise BadFile(what, field="prompt") from None


def _encoded(engine: Engine, ask: PromptFlags, text: str) -> list[int]:
    if ask.raw:
        return engine.tokenizer.encode(text)
    if ask.system is None:
        return engine.encode(text)
    return engine.encode(
        [{"role": "system", "content": ask.system}, {"role": "user", "content": text}]
    )


def _compared(engine: Engine, output: Output, params: SamplingParams) -> _Beside:
    """The same prompt and seed without drafting, by the same weights."""
    compare = compare_module()
    prompt = list(output.prompt_token_ids)
    seeded = params.model_copy(update={"seed": output.seed})
    with err().status("decoding plainly, to compare ..."), compare.plain_twin(engine) as twin:
        plain = answered(twin, prompt, seeded, aloud=False)
        part = compare.parting(engine, output, plain, seeded)
        again = [answered(one, prompt, seeded, aloud=False) for one in (engine, twin)]
        return _Beside(part, *(one.stats.tokens_per_second for one in again))


def _record(output: Output, beside: _Beside | None) -> dict[str, Any]:
    """The first answer, and under `choices` all of them where there are several."""
    record = _choice_json(output.choices[0]) | {
        "seed": output.seed,
        "prompt_tokens": len(output.prompt_token_ids),
    }
    if len(output.choices) > 1:
        record["choices"] = [_choice_json(choice) for choice in output.choices]
    if beside is None:
        return record
    part = beside.parting
    return record | {
        "identical": part is None,
        "difference": None if part is None else bench_module().parting_json(part),
        "tokens_per_second": beside.speed,
        "baseline_tokens_per_second": beside.plain_speed,
        "speedup": beside.ratio,
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "stats": stats_json(choice.stats),
    }
    if choice.logprobs is not None:
        record["logprobs"] = [logprob_json(entry) for entry in choice.logprobs]
    return record


def _tell(output: Output, beside: _Beside) -> None:
    """The end of `--compare`: equal or not, tokens per round, both speeds."""
    part = beside.parting
    print_text(f"\nidentical to plain decoding: {'yes' if part is None else 'no'}\n")
    if part is not None:
        reason = why_parted(bench_module().parting_json(part))
        print_text(f"first difference: token {part.index}, gap {part.gap:.1e}, {reason}\n")
    print_text(
        f"tokens per round (bonus included): {output.stats.tokens_per_round:.2f}\n"
        f"with drafting: {beside.speed:.1f} tokens/s\n"
        f"plain: {beside.plain_speed:.1f} tokens/s\n"
        f"speedup: {beside.ratio:.2f}\n"
    )
