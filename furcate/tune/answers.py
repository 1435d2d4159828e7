"""What the target answers to prompts, written all at once: streams to be replayed."""

from __future__ import annotations

from collections.abc import Sequence

from furcate.config import SamplingParams
from furcate.engine.bulk import Script, Stage, write
from furcate.engine.prompts import PromptLine
from furcate.models.decoder import Decoder
from furcate.text.tokenizer import Tokenizer
from furcate.tune.replay import Stream

__all__ = ["answers"]


def answers(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[PromptLine],
    params: SamplingParams,
    batch: int,
) -> list[Stream]:
    """The answer to each prompt's opening, EOS included.

    They are what the engine would answer at these params, of which temperature, seed and
    max_tokens are asked for, up to rounding. Raises BadRequest for a prompt that does not fit the
    model's context.
    """
    temperature, seed, most = params.temperature, params.seed, params.max_tokens
    assert seed is not None and most is not None
    openings = [tuple(tokenizer.chat_ids(list(prompt.opening))) for prompt in prompts]
    scripts = [Script((Stage(opening, temperature, most),), seed) for opening in openings]
    context = max(len(opening) for opening in openings) + most + 1
    written = write(
        decoder,
        scripts,
        stop_ids=tokenizer.eos_ids,
        batch=min(batch, len(scripts)),
        context=min(context, decoder.spec.max_position),
    )
    return [
        Stream(opening, tuple(one.tokens[len(opening) :]), temperature, seed, prompt.category or "")
        for prompt, opening, one in zip(prompts, openings, written, strict=True)
    ]
