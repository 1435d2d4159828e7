"""The flags that commands share, as records, and how they become the engine's options."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from furcate.aliases import Drafting, from_vllm
from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.errors import BadRequest

__all__ = ["EMBEDDED", "DraftFlags", "Json", "Quiet", "SamplingFlags", "TargetFlags"]

EMBEDDED = "smollm2-135m"

_TARGET, _DRAFT, _SAMPLING = "Target", "Drafting", "Sampling"

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

    def engine_options(self, **more: Any) -> EngineOptions:
        """As the engine takes them; `more` are options that one command sets by itself."""
        return EngineOptions(
            dtype=self.dtype,  # type: ignore[arg-type]  # pydantic judges the word
            device=self.device,
            max_context=self.max_context,
            kv_tokens=self.kv_tokens,
            **more,
        )


@dataclass(frozen=True, slots=True)
class DraftFlags:
    """Who drafts, and how large its trees may be."""

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            "-d",
            help="ngram, off, or a small model with the target's tokenizer.",
            show_default="ngram",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "--nodes",
            "-n",
            help="Most drafted tokens a round, the root excluded; 0 drafts nothing.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    depth: Annotated[
        int | None, Option(help="Most drafted tokens in a row.", rich_help_panel=_DRAFT)
    ] = None
    topk: Annotated[
        int | None,
        Option(
            help="n-grams: most earlier matches followed. A model: most candidates a level.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    adaptive: Annotated[
        bool | None,
        Option(
            "--adaptive/--fixed",
            help="Choose the size of each tree by its measured cost, or always draft --nodes.",
            show_default="adaptive",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    prompt_lookup_max: Annotated[
        int | None, Option(help="Longest suffix that n-grams match.", rich_help_panel=_DRAFT)
    ] = None
    prompt_lookup_min: Annotated[
        int | None, Option(help="Shortest suffix that n-grams match.", rich_help_panel=_DRAFT)
    ] = None
    speculative_config: Annotated[
        str | None,
        Option(
            metavar="JSON",
            help="vLLM's drafting options. SGLang's --speculative-... flags are understood too; "
            "its --speculative-num-draft-tokens counts the root.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    def chosen_drafter(self) -> str:
        """The drafter's name or path, n-grams where none is named."""
        return self._own_drafter() or self._alias().drafter or "ngram"

    def draft_options(self) -> DraftOptions:
        """furcate's own flags and vLLM's JSON together.

        Raises:
            BadRequest: something is named in both ways, or is out of range.
        """
        own = {name: value for name, value in self._own().items() if value is not None}
        alias = self._alias()
        twice = [name for name in own if name in alias.options]
        if self._own_drafter() and alias.drafter:
            twice.append("drafter")
        if twice:
            hint = "leave it out of one of them"
            what = "given by a flag and in --speculative-config"
            raise BadRequest(what, field=twice[0], hint=hint)
        return DraftOptions(**{**alias.options, **own})

    def _own_drafter(self) -> str | None:
        if self.drafter is not None and not self.drafter.strip():
            hint = "ngram, off, or a model"
            raise BadRequest("must not be empty", field="--drafter", value=self.drafter, hint=hint)
        return self.drafter

    def _own(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.nodes,
            "depth": self.depth,
            "topk": self.topk,
            "adaptive": self.adaptive,
            "prompt_lookup_max": self.prompt_lookup_max,
            "prompt_lookup_min": self.prompt_lookup_min,
        }

    def _alias(self) -> Drafting:
        if self.speculative_config is None:
            return Drafting(None, {})
        field = "--speculative-config"
        try:
            config = json.loads(self.speculative_config)
        except json.JSONDecodeError as err:
            what = f"not JSON: {err.msg} at character {err.pos}"
            raise BadRequest(what, field=field, value=self.speculative_config) from None
        if not isinstance(config, dict):
            raise BadRequest("must be a JSON object", field=field, value=self.speculative_config)
        return from_vllm(config)


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
