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

from walks import Answers, Setup, deepest, record_of, setup_of

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine.birth import birth
from furcate.engine.build import build
from furcate.engine.engine import Engine
from furcate.engine.prompts import read_prompts
from furcate.files import write_json
from furcate.tune.walk import tokens_per_round, walk


def main() -> None:
    """Write one JSON object."""
    asked = _asked()
    setup = setup_of(asked)
    texts = [setup.tokenizer.chat_ids(list(line.opening)) for line in read_prompts(asked.prompts)]
    rows = []
    for name, nodes in asked.setting:
        answers = deepest(asked.walks, name)
        row = _played(setup, texts, Asked(name, int(nodes), answers), asked)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        rows.append(row)
    what = (
        "tokens per round (bonus included) of the engine, and of the walk on the same answers; of "
        "answers that differ somewhere neither counts"
    )
    record = record_of(asked.walks, what) | birth(setup.decoder.device)
    write_json(asked.out, {**record, "results": rows})


@dataclass(frozen=True)
class Asked:
    """One setting."""

    name: str
    nodes: int
    answers: Answers


def _played(
    setup: Setup, texts: list[list[int]], one: Asked, asked: argparse.Namespace
) -> dict[str, Any]:
    """Every n-th prompt, one after the other."""
    nodes, answers = one.nodes, one.answers
    drafter, temperature = _named(one.name)
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
            walks.append(walk(answers.each[at].ranks_TD, nodes))
    live, walked = tokens / rounds, tokens_per_round(walks)
    return {
        "setting": one.name,
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
