"""Replays answers of the target with draft heads: at which rank each tree holds the next tokens.

    python benchmarks/heads_walk.py --drafter eagle3=HEADS/eagle3 --drafter medusa=HEADS/medusa \
        --prompts benchmarks/data/spec_bench_dev.jsonl --temperature 0 --temperature 1 --out WALKS

The answers are written by the target itself and kept in OUT, so that a second run replays the same
ones. For every drafter, temperature and depth one array is kept: ranks by root and level, from
which `benchmarks/heads_report.py` walks trees of any size. With `--values` the values and depths of
each root's best nodes are kept too, for `benchmarks/heads_pruning.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from walks import Setup, setup_of

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine.birth import birth
from furcate.engine.build import build
from furcate.engine.prompts import read_prompts
from furcate.files import write_json
from furcate.tune.answers import answers
from furcate.tune.path_ranks import path_ranks
from furcate.tune.replay import Replay, Stream

STREAMS = "streams.json"
BEST = 128  # nodes of a root whose values are kept


def main() -> None:
    """Write one file of ranks for every drafter and temperature."""
    asked = _asked()
    setup = setup_of(asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    for temperature in asked.temperature or [0.0]:
        streams = _streams(setup, temperature, asked)
        for drafter in asked.drafter:
            name, _, source = drafter.partition("=")
            began = time.perf_counter()
            ranks = _ranks(setup, source or name, streams, asked)
            file = asked.out / f"{name}_t{temperature:g}{asked.suffix}.npz"
            np.savez_compressed(file, **ranks)
            seconds = time.perf_counter() - began
            roots = sum(len(stream.answer) for stream in streams)
            sys.stdout.write(
                f"{file.name}: {len(streams)} answers, {roots} roots, {seconds:.1f} s\n"
            )
            sys.stdout.flush()
    record = {"command": "python " + " ".join(sys.argv), **birth(setup.decoder.device)}
    # processes may share a folder: each has a name of its own
    names = [drafter.partition("=")[0] for drafter in asked.drafter]
    names += [f"t{temperature:g}" for temperature in asked.temperature or [0.0]]
    write_json(asked.out / f"birth_{'-'.join(names)}{asked.suffix}.json", record)


def _ranks(
    setup: Setup, source: str, streams: list[Stream], asked: argparse.Namespace
) -> dict[str, np.ndarray]:
    """By depth, the ranks of all answers' roots one behind the other."""
    longest = max(len(stream.tokens) for stream in streams) + 1
    options = EngineOptions(
        max_batch=asked.roots,
        kv_tokens=max(64, -(-longest // 16) * 16),
        max_context=longest,
        prefill_chunk=4096,
    )
    # only what is asked for: a drafter refuses options that it would ignore
    wished = {
        "depth": max(asked.depth) if asked.depth else None,
        "topk": asked.topk,
        "draft_vocab": asked.draft_vocab,
        "tree": asked.tree,
        "beta": asked.beta,
        "sigma": asked.sigma,
        "value_threshold": asked.value_threshold,
        "entropy_gate": asked.entropy_gate,
        "entropy_children": asked.entropy_children,
        "coupled": False if asked.uncoupled else None,
    }
    draft = DraftOptions(**{name: value for name, value in wished.items() if value is not None})
    replay = Replay(build(setup.decoder, setup.tokenizer, source, options, draft))
    depths = [depth for depth in asked.depth if depth <= replay.drafter.depth]
    depths = sorted({*depths, replay.drafter.depth})
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for stream in streams:
        for name, found in _looked(replay, stream, depths, asked.values).items():
            parts[name] += found
    return {name: np.concatenate(found) for name, found in parts.items()}


@torch.inference_mode()
def _looked(
    replay: Replay, stream: Stream, depths: list[int], values: bool
) -> dict[str, list[np.ndarray]]:
    """What is kept of each batch of an answer's roots."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for view, next_BD in replay.views(stream):
        proposal = replay.drafter.propose(view, replay.drafter.depths[-1])
        for depth in depths:
            found = path_ranks(proposal, next_BD, depth)[:, :depth]
            parts[f"depth{depth}"].append(found.to(torch.int16).cpu().numpy())
        if values:
            value_BP, order_BP = proposal.value_BP.sort(dim=1, descending=True, stable=True)
            best_BK, order_BK = value_BP[:, :BEST].exp(), order_BP[:, :BEST]
            parts["values"].append(best_BK.half().cpu().numpy())
            level_BK = proposal.depth_BP.gather(1, order_BK) * (best_BK > 0)
            parts["levels"].append(level_BK.to(torch.int8).cpu().numpy())
    return parts


def _streams(setup: Setup, temperature: float, asked: argparse.Namespace) -> list[Stream]:
    """The answers at this temperature: those that are there already, else new ones."""
    file = asked.out / f"t{temperature:g}_{STREAMS}"
    if file.exists():
        lines = json.loads(file.read_text())
        return [
            Stream(**{**one, "prompt": tuple(one["prompt"]), "answer": tuple(one["answer"])})
            for one in lines
        ]
    streams = answers(
        setup.decoder,
        setup.tokenizer,
        read_prompts(asked.prompts, limit=asked.limit)[:: asked.every],
        SamplingParams(temperature=temperature, seed=asked.seed, max_tokens=asked.max_tokens),
        asked.write_batch,
    )
    file.write_text(json.dumps([asdict(stream) for stream in streams]))
    return streams


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", action="append", required=True, help="NAME or NAME=SOURCE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--every", type=int, default=1, help="2: every second prompt")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--depth", type=int, nargs="+", default=[], help="else its own")
    parser.add_argument("--topk", type=int, help="rows that go on at a level; children of each")
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--tree", help="a static tree instead of a grown one")
    parser.add_argument("--beta", type=float)
    parser.add_argument("--sigma", type=float)
    parser.add_argument("--value-threshold", type=float)
    parser.add_argument("--entropy-gate", type=float)
    parser.add_argument("--entropy-children", type=float)
    parser.add_argument("--uncoupled", action="store_true", help="trees that know no noise")
    parser.add_argument("--values", action="store_true", help="keep values of the best nodes too")
    parser.add_argument("--roots", type=int, default=256, help="roots of one pass")
    parser.add_argument("--write-batch", type=int, default=256)
    parser.add_argument("--suffix", default="", help="of the files, to keep settings apart")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
