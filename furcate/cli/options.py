"""The flags that commands share, as records, and how they become the engine's options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from furcate.config import EngineOptions, SamplingParams
from furcate.errors import BadRequest

__all__ = ["EMBEDDED", "Json", "Quiet", "SamplingFlags", "TargetFlags"]

EMBEDDED = "smollm2-135m"

_TARGET, _SAMPLING = "Target", "Sampling"

Json = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Leave out the line of statistics.")]


@dataclass(frozen=True, slots=True)
class TargetFlags:
    """Which model answers, and where it runs."""

    target: Annotated[
        str,
        Option(
            "--target",
            "-t",
            help="A name that `furcate models` lists, a Hugging Face folder, or a GGUF file.",
            rich_help_panel=_TARGET,
        ),
    ] = EMBEDDED
    dtype: Annotated[
        str,
        Option(help="auto, float64, float32, bfloat16 or float16.", rich_help_panel=_TARGET),
    ] = "auto"
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_TARGET)] = (
        "auto"
    )
    max_context: Annotated[
        int | None,
        Option(help="Longest prompt and answer together, in tokens.", rich_help_panel=_TARGET),
    ] = None
    kv_tokens: Annotated[
        int | None,
        Option(help="Room of the KV cache in tokens, all requests.", rich_help_panel=_TARGET),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            help="Share of a GPU's memory to hold, weights included.",
            show_default="0.9",
            rich_help_panel=_TARGET,
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Option(
            "--batch-invariant",
            help="On a GPU: a token's scores are the same bit for bit, whatever else is scored.",
            rich_help_panel=_TARGET,
        ),
    ] = False

    def engine_options(self, *, engines: int = 1, **more: Any) -> EngineOptions:
        """As the engine takes them; `more` are options that one command sets by itself.

        `engines` are to live side by side, on the same weights.
        """
        return EngineOptions(
            dtype=self.dtype,  # type: ignore[arg-type]  # pydantic judges the word
            device=self.device,
            max_context=self.max_context,
            kv_tokens=self.kv_tokens,
            batch_invariant=self.batch_invariant,
            gpu_memory_utilization=self.gpu_memory_utilization,
            engines=engines,
            **more,
        )


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How an answer is sampled."""

    max_tokens: Annotated[
        int, Option("--max-tokens", "-m", help="Longest answer.", rich_help_panel=_SAMPLING)
    ] = 256
    min_tokens: Annotated[int, Option(help="Shortest answer.", rich_help_panel=_SAMPLING)] = 0
    temperature: Annotated[
        float, Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float, Option(help="Keep the likeliest tokens of this mass.", rich_help_panel=_SAMPLING)
    ] = 1.0
    top_k: Annotated[
        int, Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=_SAMPLING)
    ] = 0
    min_p: Annotated[
        float,
        Option(help="Drop tokens below this share of the best.", rich_help_panel=_SAMPLING),
    ] = 0.0
    repetition_penalty: Annotated[float, Option(help="1 is off.", rich_help_panel=_SAMPLING)] = 1.0
    presence_penalty: Annotated[float, Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    seed: Annotated[
        int | None,
        Option(
            help="The same seed gives the same answer, with and without drafting. "
            "bench takes 0 where none is given.",
            show_default="drawn, and told",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        Option(help="End before this text; may be given again.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=_SAMPLING)
    ] = False

    include_stop_str_in_output: Annotated[
        bool,
        Option(
            "--include-stop-str-in-output",
            help="Let the answer end with the --stop text that ended it.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    stop_token_id: Annotated[
        list[int] | None,
        Option(help="End at this token id; may be given again.", rich_help_panel=_SAMPLING),
    ] = None
    allowed_token_id: Annotated[
        list[int] | None,
        Option(help="Say only tokens with this id; may be given again.", rich_help_panel=_SAMPLING),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        Option(
            metavar="TOKEN=BIAS",
            help="Add to the logit of a token id; may be given again.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    n: Annotated[
        int,
        Option(
            "--n",
            help="Answers to the prompt; more than one for generate only.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1
    logprobs: Annotated[
        bool,
        Option(
            "--logprobs",
            help="Show each token's logprob; for generate --json only.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    top_logprobs: Annotated[
        int,
        Option(
            help="With --logprobs: the likeliest tokens too, this many.", rich_help_panel=_SAMPLING
        ),
    ] = 0

    def lone_params(self) -> SamplingParams:
        """`params` for a command that shows one answer, and no logprobs.

        Raises:
            BadRequest: more is asked for, or as `params`.
        """
        hint = "only `furcate generate` shows this"
        if self.n != 1:
            raise BadRequest("one answer is shown", field="--n", value=self.n, hint=hint)
        if self.logprobs:
            raise BadRequest("no logprobs are shown", field="--logprobs", hint=hint)
        return self.params()

    def params(self) -> SamplingParams:
        """As the engine takes them.

        Raises:
            BadRequest: a value is out of range.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_id or ()),
            allowed_token_ids=tuple(self.allowed_token_id) if self.allowed_token_id else None,
            logit_bias=_biases(self.logit_bias or ()),
            n=self.n,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )


def _biases(words: Iterable[str]) -> dict[int, float]:
    """TOKEN=BIAS words as a mapping."""
    biases: dict[int, float] = {}
    for word in words:
        token, _, bias = word.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            hint = "for example 42=-100"
            what = "must be TOKEN=BIAS, a token id and a number"
            raise BadRequest(what, field="--logit-bias", value=word, hint=hint) from None
        if token_id in biases:
            raise BadRequest("this token has two biases", field="--logit-bias", value=word)
        biases[token_id] = value
    return biases
