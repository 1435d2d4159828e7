"""Answers to prompts of the target's own, or of a file: streams that calibrations are fitted to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from furcate.config import SamplingParams
from furcate.engine.bulk import Script, Written, write
from furcate.engine.prompts import read_prompts
from furcate.errors import BadRequest
from furcate.models.decoder import Decoder
from furcate.text.tokenizer import Tokenizer
from furcate.train.held_away import HeldAway
from furcate.train.talk import Scripts, TalkRecipe
from furcate.tune.answers import answers
from furcate.tune.replay import Stream

__all__ = ["SELF", "StreamsAsked", "own_streams"]

SELF = "self"
MOST_USER, MOST_PASSAGE, MOST_BEFORE = 80, 120, 240  # tokens, the last of all before the answer


@dataclass(frozen=True, slots=True)
class StreamsAsked:
    """Which answers are wanted: so many at each temperature, of so many tokens at most."""

    prompts: str  # SELF, or a file of prompts
    temperatures: tuple[float, ...]
    conversations: int
    answer_tokens: int
    seed: int
    batch: int


def own_streams(
    decoder: Decoder, tokenizer: Tokenizer, asked: StreamsAsked, held: HeldAway
) -> list[Stream]:
    """The answers, written by the target; those to prompts that are held away are left out.

    Raises:
        BadRequest: no answer is left; there is no chat template; the batch is too large.
        BadFile: the file is no file of prompts.
        Unsupported: the template leaves no turn to be written.
    """
    source = _self_asked if asked.prompts == SELF else _from_file
    found = [stream for stream in source(decoder, tokenizer, asked, held) if stream.answer]
    if not found:
        hint = "give prompts of your own, which no evaluation uses"
        raise BadRequest("left no answer", field="--prompts", value=asked.prompts, hint=hint)
    return found


def _self_asked(
    decoder: Decoder, tokenizer: Tokenizer, asked: StreamsAsked, held: HeldAway
) -> Iterator[Stream]:
    """The target writes the user's turn too, as for training, from another seed."""
    context = min(MOST_BEFORE + asked.answer_tokens, decoder.spec.max_position)
    talks = [_talk(tokenizer, asked, context, each) for each in asked.temperatures]
    todo: list[tuple[float, Script]] = []
    for at, (temperature, talk) in enumerate(zip(asked.temperatures, talks, strict=True)):
        numbers = range(at * asked.conversations, (at + 1) * asked.conversations)
        todo += [(temperature, talk[number].script) for number in numbers]
    written = write(
        decoder,
        [script for _, script in todo],
        stop_ids=talks[0].stop_ids,
        batch=min(asked.batch, len(todo)),
        context=context,
    )
    for (temperature, script), one in zip(todo, written, strict=True):
        text = tokenizer.decode(_before_answer(one), skip_special=False)
        if len(one.spans) == 2 and not held.within(talks[0].wrap.turn_before(text)):
            answer = one.tokens[one.spans[1].start : one.spans[1].end]
            yield Stream(tuple(_before_answer(one)), tuple(answer), temperature, script.seed)


def _talk(tokenizer: Tokenizer, asked: StreamsAsked, context: int, temperature: float) -> Scripts:
    recipe = TalkRecipe(
        seed=asked.seed,
        context=context,
        follow_up=0.0,
        answer_temperatures=(temperature,),
        answer_shares=(1.0,),
        most_user=MOST_USER,
        most_passage=MOST_PASSAGE,
        most_answer=asked.answer_tokens,
    )
    return Scripts(tokenizer, recipe)


def _before_answer(one: Written) -> list[int]:
    return one.tokens[: one.spans[-1].start]


def _from_file(
    decoder: Decoder, tokenizer: Tokenizer, asked: StreamsAsked, held: HeldAway
) -> Iterator[Stream]:
    prompts = [
        prompt
        for prompt in read_prompts(Path(asked.prompts))
        if not any(held.within(turn["content"]) for turn in prompt.opening)
    ][: asked.conversations]
    for temperature in asked.temperatures if prompts else ():
        params = SamplingParams(
            temperature=temperature, seed=asked.seed, max_tokens=asked.answer_tokens
        )
        yield from answers(decoder, tokenizer, prompts, params, asked.batch)
