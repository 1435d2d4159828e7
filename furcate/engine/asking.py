"""From what a caller asks to an Ask in which nothing is open: checks, limits, seed, stop ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from furcate.config import SamplingParams
from furcate.engine.request import Ask
from furcate.engine.state import MAX_STOP_IDS
from furcate.errors import BadRequest

__all__ = ["Limits", "settle"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take."""

    vocab: int
    context: int  # most tokens of a request, prompt included
    eos_ids: tuple[int, ...]


def settle(
    request_id: str, prompt: Sequence[int], params: SamplingParams, limits: Limits, salt: str = ""
) -> Ask:
    """The Ask for a prompt; raises BadRequest for whatever the engine cannot honour."""
    _check_kinds(prompt, params)
    if not prompt:
        raise BadRequest("must hold at least one token", field="prompt", value=list(prompt))
    if len(prompt) >= limits.context:
        raise BadRequest(
            f"has {len(prompt)} tokens and leaves no room for an answer",
            field="prompt",
            hint=f"the context holds {limits.context} tokens; shorten it or raise max_context",
        )
    _check_ids("prompt", prompt, limits.vocab)
    _check_ids("logit_bias", params.logit_bias, limits.vocab)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab)
    eos = () if params.ignore_eos else limits.eos_ids
    stops = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stops) > MAX_STOP_IDS:
        raise BadRequest(
            f"at most {MAX_STOP_IDS} stop ids, EOS included",
            field="stop_token_ids",
            value=len(stops),
        )
    room = limits.context - len(prompt)
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return Ask(request_id, tuple(prompt), params, seed, len(prompt) + wanted, stops, salt)


def _check_kinds(prompt: object, params: object) -> None:
    """Token ids must be ints of Python's own: 1.5 or True would pass for one unnoticed."""
    if not isinstance(params, SamplingParams):
        how = "pass SamplingParams(...)"
        raise BadRequest("must be SamplingParams", field="params", value=params, hint=how)
    hint = "pass a list of ints; a tensor or array has .tolist()"
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise BadRequest("must be a list of token ids", field="prompt", value=prompt, hint=hint)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int):
            what = "must hold token ids only"
            raise BadRequest(what, field="prompt", value=token, hint=hint)


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise BadRequest(
                "no such token", field=field, value=token, hint=f"ids run from 0 to {vocab - 1}"
            )
