"""What may be asked: sampling options of a request, options of an engine, options of drafting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from furcate.errors import BadRequest

__all__ = ["DraftOptions", "EngineOptions", "SamplingParams"]

Whole = Annotated[int, Field(strict=True)]  # neither true nor "5" nor 5.0
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # whole numbers too
MAX_TOP_LOGPROBS = 20


def _from_json_key(key: object) -> object:
    """JSON has no keys but strings."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key


TokenKey = Annotated[int, BeforeValidator(_from_json_key), Field(strict=True)]


class _Options(BaseModel):
    """Frozen, and nothing is accepted and ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as err:
            raise _as_bad_request(err, type(self)) from None


class SamplingParams(_Options):
    """How one request is sampled; names and meaning as in the OpenAI API and vLLM.

    `temperature` 0 is greedy. `top_k` 0 and -1 both mean off. `seed` None draws one from the
    operating system, and the output names it. `logprobs_mode` "raw" is the model's own law,
    "processed" the law after penalties, temperature and filters.
    """

    n: Annotated[Whole, Field(ge=1, le=128)] = 1
    temperature: Annotated[Finite, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = 0
    min_p: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    logit_bias: Mapping[TokenKey, Annotated[Finite, Field(ge=-100, le=100)]] = {}
    allowed_token_ids: tuple[Whole, ...] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] = 0
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    seed: Annotated[Whole, Field(ge=0, lt=2**64)] | None = None
    stop: tuple[Text, ...] = ()
    stop_token_ids: tuple[Whole, ...] = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: Flag = True

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string_is_a_list(cls, stop: object) -> object:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one token")
        return self


class DraftOptions(_Options):
    """How drafts are made. `num_draft_tokens` counts drafted nodes, the root excluded.

    `None` leaves the choice to the drafter's defaults and the measured cost. `num_draft_tokens` and
    `depth` are the most: the engine chooses by measured cost how many nodes it scores, and how many
    levels a network drafts. With `adaptive` false every round drafts exactly `num_draft_tokens`
    nodes where that many exist, and all levels.

    For drafters with a network of their own: `tree` is "dynamic", or a tree of fixed ranks as a
    list of rank paths (Medusa's `medusa_choices`) or a JSON file with one; `draft_vocab` the tokens
    that a head may propose (None: its own, on a CPU at most 8192); `beta` and `sigma` replace what
    calibration says of all depths. With `coupled` false children are ranked without the noise that
    the target will draw: fewer are accepted, which is what a comparison wants to know. With
    `entropy_children` = k a node has at most 1 + ceil(k * (exp(H) - 1)) children, H being the
    entropy of its law; `value_threshold` drops nodes that are accepted less often, and with
    `entropy_gate` = g the children of nodes whose value * (1 - sqrt(g * H)) is below it.
    """

    num_draft_tokens: Annotated[Whole, Field(ge=0, le=256)] | None = None
    depth: Annotated[Whole, Field(ge=1, le=64)] | None = None
    topk: Annotated[Whole, Field(ge=1, le=64)] | None = None
    tree: Text | tuple[tuple[Annotated[Whole, Field(ge=0, le=63)], ...], ...] = "dynamic"
    draft_vocab: Annotated[Whole, Field(ge=1)] | None = None
    beta: Annotated[Finite, Field(gt=0)] | None = None
    sigma: Annotated[Finite, Field(gt=0)] | None = None
    value_threshold: Annotated[Finite, Field(ge=0, lt=1)] = 0.0
    entropy_children: Annotated[Finite, Field(ge=0)] | None = None
    entropy_gate: Annotated[Finite, Field(ge=0)] | None = None
    coupled: Flag = True
    prompt_lookup_max: Annotated[Whole, Field(ge=1, le=16)] = 4
    prompt_lookup_min: Annotated[Whole, Field(ge=1, le=16)] = 1
    adaptive: Flag = True

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.tree != "dynamic" and (self.depth is not None or self.topk is not None):
            raise ValueError("a tree of fixed ranks says itself how deep and how wide it is")
        if self.entropy_gate is not None and not self.value_threshold:
            raise ValueError("entropy_gate needs a value_threshold above 0")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max = {self.prompt_lookup_max}"
            )
        return self


class EngineOptions(_Options):
    """How an engine runs. `None` leaves the choice to the engine.

    `kv_tokens` is the room of the paged cache in tokens, `prefill_chunk` the most prompt tokens
    scored in one pass, `max_batch` the most requests decoded together.

    On a GPU the engine holds at most the share `gpu_memory_utilization` (None: 0.9) of its memory,
    weights included; without `kv_tokens` the cache takes what is left of it, if there is use for so
    much. `engines` are to live side by side on the same weights, and share what is left evenly.
    Rounds are recorded as CUDA graphs and replayed; with `graphs` false every kernel is launched
    anew, as on a CPU. With `batch_invariant` what the model makes of a token is the same bit for
    bit whatever else is scored beside it; it costs speed. A share and `batch_invariant` are refused
    on a CPU.
    """

    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    device: Text = "auto"
    page_size: Annotated[Whole, Field(ge=16, le=256)] = 16
    kv_tokens: Annotated[Whole, Field(ge=64)] | None = None
    max_context: Annotated[Whole, Field(ge=8)] | None = None
    max_batch: Annotated[Whole, Field(ge=1, le=1024)] = 8
    prefill_chunk: Annotated[Whole, Field(ge=1, le=65536)] = 256
    reuse_prefix: Flag = True
    gpu_memory_utilization: Annotated[Finite, Field(gt=0, le=1)] | None = None
    engines: Annotated[Whole, Field(ge=1)] = 1
    graphs: Flag = True
    batch_invariant: Flag = False


def _as_bad_request(err: ValidationError, kind: type[BaseModel]) -> BadRequest:
    first = err.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or kind.__name__
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        return BadRequest(
            "unknown option", field=field, value=first["input"], hint=f"known: {known}"
        )
    what = first["msg"].removeprefix("Value error, ")
    return BadRequest(what, field=field, value=first["input"] if first["loc"] else None)
