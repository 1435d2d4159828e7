"""`furcate generate`: answer one prompt, and on request show that plain decoding says the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from furcate.cli.lazy import bench_module, compare_module, load_engine
from furcate.cli.options import DraftFlags, Json, Quiet, SamplingFlags, TargetFlags
from furcate.cli.show import err, print_json, print_text, stats_json, stats_line
from furcate.config import SamplingParams
from furcate.errors import BadFile, BadRequest, RequestFailed

if TYPE_CHECKING:
    from furcate.engine.compare import Parting
    from furcate.engine.engine import Engine
    from furcate.engine.outputs import Output

__all__ = ["answered", "generate"]


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
class _Plain:
    """What plain decoding said, and where it parts from the answer."""

    output: Output
    parting: Parting | None


def generate(
    ask: PromptFlags,
    show: ShowFlags,
    sampling: SamplingFlags,
    draft: DraftFlags,
    target: TargetFlags,
) -> None:
    """Answer one prompt."""
    text, params = _prompt(ask), sampling.params()
    with load_engine(target, draft, max_batch=1) as engine:
        prompt = _encoded(engine, ask, text)
        output = answered(engine, prompt, params, aloud=not show.as_json)
        plain = _plainly(engine, output, params) if show.compare else None
    if show.as_json:
        print_json(_record(output, plain))
    elif plain is not None:
        _tell(output, plain)
    elif not show.quiet:
        err().print(f"{stats_line(output.stats)} · seed {output.seed}", style="dim")


def answered(engine: Engine, prompt: list[int], params: SamplingParams, *, aloud: bool) -> Output:
    """The answer, written to standard output as it grows where `aloud`.

    Raises:
        RequestFailed: the model gave no usable numbers.
    """
    request_id = engine.submit(prompt, params)
    while aloud and (piece := engine.next_piece(request_id)) is not None:
        print_text(piece.text)
        if piece.choice is not None:
            break
    output = engine.collect(request_id)
    if aloud:
        print_text("\n")
    if output.choices[0].error is not None:
        raise RequestFailed(output.choices[0].error, hint="look for damage in the target's weights")
    return output


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


def _plainly(engine: Engine, output: Output, params: SamplingParams) -> _Plain:
    """The same prompt and seed without drafting, by the same weights."""
    compare = compare_module()
    seeded = params.model_copy(update={"seed": output.seed})
    with err().status("decoding plainly, to compare ..."), compare.plain_twin(engine) as twin:
        plain = answered(twin, list(output.prompt_token_ids), seeded, aloud=False)
        return _Plain(plain, compare.parting(engine, output, plain, seeded))


def _record(output: Output, plain: _Plain | None) -> dict[str, Any]:
    record = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "prompt_tokens": len(output.prompt_token_ids),
        "stats": stats_json(output.stats),
    }
    if plain is None:
        return record
    part = plain.parting
    return record | {
        "identical": part is None,
        "difference": None if part is None else bench_module().parting_json(part),
        "baseline_tokens_per_second": plain.output.stats.tokens_per_second,
        "speedup": _ratio(output, plain.output),
    }


def _tell(output: Output, plain: _Plain) -> None:
    """The end of `--compare`: equal or not, tokens per round, both speeds."""
    stats, baseline = output.stats, plain.output.stats
    part = plain.parting
    print_text(f"\nidentical to plain decoding: {'yes' if part is None else 'no'}\n")
    if part is not None:
        reason = "a rounding tie" if part.tie else "not a rounding tie: please report this"
        print_text(f"first difference: token {part.index}, gap {part.gap:.1e}, {reason}\n")
    print_text(
        f"tokens per round (bonus included): {stats.tokens_per_round:.2f}\n"
        f"with drafting: {stats.tokens_per_second:.1f} tokens/s\n"
        f"plain: {baseline.tokens_per_second:.1f} tokens/s\n"
        f"speedup: {_ratio(output, plain.output):.2f}\n"
    )


def _ratio(output: Output, plain: Output) -> float:
    baseline = plain.stats.tokens_per_second
    return output.stats.tokens_per_second / baseline if baseline else 0.0
