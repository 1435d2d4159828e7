"""Plain decoding beside transformers' `generate`, the same float32 weights, prompts and process.

Each prompt is decoded by both in turn, so that a machine that slows down slows both; both score
the prompt afresh and stop after the same number of tokens. Needs the dev extra.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from versus_peers import as_transformers

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine.birth import birth
from furcate.engine.build import build
from furcate.engine.engine import Engine
from furcate.files import write_json
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.prove.grid import PROMPTS
from furcate.text.tokenizer import load_tokenizer


def main(
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = 6,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Print both speeds and their ratio; medians over prompts."""
    path = resolve("smollm2-135m")
    words = load_tokenizer(path)
    decoder = load_decoder(path, torch.float32, torch.device("cpu"))
    reference = as_transformers(decoder)
    decoder.pack()
    options = EngineOptions(max_batch=1, reuse_prefix=False)
    engine = Engine(build(decoder, words, "off", options, DraftOptions()))
    law = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    asked = [engine.encode(text) for text in PROMPTS[:prompts]]
    _ours(engine, asked[0], law)
    _theirs(reference, asked[0], 8)
    ours, theirs, equal = [], [], 0
    for prompt in asked:
        mine, my_seconds = _ours(engine, prompt, law)
        other, their_seconds = _theirs(reference, prompt, max_tokens)
        ours.append(max_tokens / my_seconds)
        theirs.append(max_tokens / their_seconds)
        equal += mine == other
    record = {
        "what": "plain decoding, prompt included, against transformers' generate; float32",
        "command": f"python benchmarks/against_transformers.py --max-tokens {max_tokens} "
        f"--prompts {prompts}",
        **birth(torch.device("cpu")),
        "tokens_per_second": statistics.median(ours),
        "transformers_tokens_per_second": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "equal_answers": f"{equal} of {prompts}",
    }
    typer.echo(record)
    if out is not None:
        write_json(out, record)


def _ours(engine: Engine, prompt: list[int], law: SamplingParams) -> tuple[list[int], float]:
    began = time.perf_counter()
    output = engine.collect(engine.submit(prompt, law))
    return list(output.token_ids), time.perf_counter() - began


@torch.inference_mode()
def _theirs(model: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    ids = torch.tensor([prompt])
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist(), time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
