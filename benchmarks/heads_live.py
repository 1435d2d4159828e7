"""Plays recorded answers with the engine itself, and sets its rounds beside those of the walk.

    python benchmarks/heads_live.py WALKS --setting eagle3_t0 16 --setting mtp_t1 63 \
        --prompts benchmarks/data/spec_bench_dev.jsonl --out heads_live.json

WALKS is the folder that `heads_walk.py` wrote, with the engine's default temperature law and the
same depth. The engine goes on learning how far its values can be trusted, which a walk does not.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from walks import Answers, births, read_answers

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine.birth import birth
from furcate.engine.build import build, device_of, dtype_of
from furcate.engine.engine import Engine
from furcate.engine.prompts import read_prompts
from furcate.files import write_json
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.tune.walk import tokens_per_round


def main() -> None:
    """Write one JSON object."""
    asked = _asked()
    device = device_of(asked.device)
    path = resolve(asked.target)
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, dtype_of(asked.dtype, device), device)
    if decoder.can_pack:
        decoder.pack()
    prompts = [line.opening for line in read_prompts(asked.prompts)]
    texts = [tokenizer.chat_ids(list(opening)) for opening in prompts]
    setup = Setup(decoder, tokenizer, texts)
    rows = []
    for name, nodes in asked.setting:
        answers = read_answers(asked.walks, name)
        row = _played(setup, name, int(nodes), answers, asked)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        rows.append(row)
    record = {
        "what": "tokens per round (bonus included) of the engine, and of the walk on the same "
        "answers; of answers that differ somewhere neither counts",
        **birth(device),
        "command": "python " + " ".join(sys.argv),
        "walked_by": [one["command"] for one in births(asked.walks)],
        "results": rows,
    }
    write_json(asked.out, record)


@dataclass(frozen=True)
class Setup:
    """The target, and all prompts in its tokens."""

    decoder: Decoder
    tokenizer: Tokenizer
    texts: list[list[int]]


def _played(
    setup: Setup, name: str, nodes: int, answers: Answers, asked: argparse.Namespace
) -> dict[str, Any]:
    """One setting: every n-th prompt, one after the other."""
    drafter, temperature = _named(name)
    texts = setup.texts
    longest = max(len(text) for text in texts) + asked.max_tokens + 1
    options = EngineOptions(max_batch=1, max_context=longest + nodes, reuse_prefix=False)
    depth = answers.each[0].ranks_TD.shape[1]
    draft = DraftOptions(num_draft_tokens=nodes, depth=depth, adaptive=False)
    law = SamplingParams(temperature=temperature, seed=asked.seed, max_tokens=asked.max_tokens)
    tokens = rounds = differing = 0
    walks = []
    with Engine(build(setup.decoder, setup.tokenizer, drafter, options, draft)) as engine:
        for at in range(0, len(texts), asked.every):
            told = engine.collect(engine.submit(texts[at], law))
            recorded = answers.each[at].tokens
            if list(told.token_ids) != recorded[: len(told.token_ids)]:
                differing += 1
                continue
            tokens += told.stats.tokens
            rounds += told.stats.rounds
            walks.append(answers.each[at].walked(nodes))
    live, walked = tokens / rounds, tokens_per_round(walks)
    return {
        "setting": name,
        "nodes": nodes,
        "depth": depth,
        "answers": len(walks),
        "answers_that_differ": differing,
        "live_tokens_per_round": live,
        "walked_tokens_per_round": walked,
        "live_over_walked": live / walked,
    }


def _named(name: str) -> tuple[str, float]:
    """The drafter and the temperature of "eagle3_t0.7"."""
    found = re.fullmatch(r"(.+)_t([\d.]+)", name)
    if found is None:
        raise SystemExit(f"{name}: a setting is called DRAFTER_tTEMPERATURE")
    return found[1], float(found[2])


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", type=Path)
    parser.add_argument("--setting", nargs=2, action="append", required=True, metavar="NAME NODES")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=8, help="8: every eighth prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
