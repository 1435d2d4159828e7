"""How fast the target writes data: plain decoding of very many random scripts at once."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from furcate.engine.birth import birth
from furcate.engine.build import device_of, dtype_of
from furcate.engine.bulk import Progress, Script, Stage, Written, write
from furcate.files import write_json
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import load_tokenizer

FIRST, LATER = 24, 6  # tokens fed to a first and to a later stage
MOST = 400


@dataclass(frozen=True)
class Mark:
    """A moment at which the device had done all that it was given."""

    seconds: float
    progress: Progress


def main() -> None:
    """Print a JSON object; exit after the asked number of seconds."""
    asked = _asked()
    device = device_of(asked.device)
    dtype = dtype_of(asked.dtype, device)
    path = resolve(asked.target)
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, dtype, device)
    marks: list[Mark] = []
    began = time.perf_counter()

    def mark(progress: Progress) -> None:
        marks.append(Mark(time.perf_counter() - began, progress))

    lines = write(
        decoder,
        _scripts(tokenizer.vocab_size, asked.seed),
        stop_ids=tokenizer.eos_ids,
        batch=asked.batch,
        context=asked.context,
        on_progress=mark,
    )
    written: list[Written] = []
    for line in lines:
        written.append(line)
        if marks[-1].seconds > asked.warm_up + asked.seconds:
            break
    steady = [m for m in marks if m.seconds > asked.warm_up]
    record = {
        "what": "bulk decoding of random scripts, tokens fed and sampled; steady state",
        "command": "python benchmarks/bulk_decode.py "
        + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in vars(asked).items() if v is not None),
        **birth(device),
        "dtype": str(dtype).removeprefix("torch."),
        "batch": asked.batch,
        "context": asked.context,
        **_speed(steady[0], steady[-1]),
        **_lengths(written),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else None,
    }
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    if asked.out is not None:
        write_json(asked.out, record)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="known name, folder or .gguf")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--context", type=int, default=1280)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--warm-up", type=float, default=15, help="until rows are out of step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes, too")
    return parser.parse_args()


def _scripts(vocab: int, seed: int) -> Iterator[Script]:
    """Two or four stages of random tokens and lengths, without end."""
    rng = random.Random(seed)
    while True:
        feeds = [FIRST, *[LATER] * rng.choice([1, 3])]
        yield Script(
            tuple(
                Stage(
                    tuple(rng.choices(range(vocab), k=feed)),
                    rng.choice([0.0, 0.7, 1.0]),
                    rng.randint(MOST // 8, MOST),
                )
                for feed in feeds
            ),
            rng.getrandbits(63),
        )


def _speed(first: Mark, last: Mark) -> dict[str, Any]:
    seconds = last.seconds - first.seconds
    steps = last.progress.steps - first.progress.steps
    return {
        "tokens_per_second": (last.progress.tokens - first.progress.tokens) / seconds,
        "ms_per_step": 1000 * seconds / steps,
        "steps": steps,
        "seconds": seconds,
    }


def _lengths(written: list[Written]) -> dict[str, Any]:
    sampled = sum(span.end - span.start for line in written for span in line.spans)
    tokens = sum(len(line.tokens) for line in written)
    return {"mean_length": tokens / len(written), "sampled_share": sampled / tokens}


if __name__ == "__main__":
    main()
