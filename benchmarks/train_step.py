"""Times a step of training on this device: tokens per second, and where the time goes.

    python benchmarks/train_step.py --tokens 32768 --steps 20 --profile

The target has the sizes of SmolLM2-135M-Instruct and random weights, the text is random: neither
changes what is computed. Parts are timed by events on the device, one step after another; the
speed is that of whole steps, launched as training launches them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from targets import OWN, SPECS

from furcate.heads.build import new_head
from furcate.models.decoder import Decoder
from furcate.train.batches import Batch, lay_out
from furcate.train.corpus import Conversation, Kind, Part
from furcate.train.learner import Learner
from furcate.train.pace import Pace
from furcate.train.recipe import Recipe
from furcate.train.shapes import KINDS, Shape, plans
from furcate.train.start import start
from furcate.train.step import Lessons

LENGTHS, QUESTION = (100, 1000), 0.2  # of a conversation; share of it that is no answer


class Timer:
    """Milliseconds of each part, by events on the device where it has them."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._spans: dict[str, list[Any]] = defaultdict(list)

    def run(self, name: str, part: Callable[[], Any]) -> Any:
        """Do a part and remember when it began and ended."""
        began = self._mark()
        found = part()
        self._spans[name].append((began, self._mark()))
        return found

    def means(self) -> dict[str, float]:
        """Of each part."""
        if self._gpu:
            torch.cuda.synchronize()
            between = {n: [a.elapsed_time(b) for a, b in s] for n, s in self._spans.items()}
        else:
            between = {n: [(b - a) * 1e3 for a, b in s] for n, s in self._spans.items()}
        return {name: round(sum(each) / len(each), 3) for name, each in between.items()}

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def conversations(tokens: int, vocab: int, rng: np.random.Generator) -> list[Conversation]:
    """Random ones, of so many tokens in all."""
    talks = []
    while tokens > 0:
        length = min(int(rng.integers(*LENGTHS)), tokens)
        ids = rng.integers(0, vocab, length, dtype=np.int64)
        talks.append(Conversation(ids, (Part(int(length * QUESTION), length, Kind.ANSWER),)))
        tokens -= length
    return talks


def lessons_of(recipe: Recipe, target: Decoder, batch: Batch) -> Lessons:
    """New heads with their optimisers."""
    learners = []
    for plan in recipe.heads:
        head = new_head(plan.spec, target, None)
        width = target.spec.hidden_size * len(head.layers)
        features_TF = torch.randn(64, width, device=target.device)
        start(plan, head, target, features_TF, seed=0)
        learners.append(Learner(plan, head, recipe))
    return Lessons(target, learners, recipe, np.arange(target.spec.vocab_size))


def parts_of(lessons: Lessons, batch: Batch, number: int, timer: Timer) -> None:
    """One step, part by part."""
    watched = timer.run("target", lambda: lessons.watch(batch))
    teacher = timer.run("teacher", lambda: lessons.teacher(watched, batch, number))
    for learner in lessons.learners:
        name = learner.plan.name
        features_TF = timer.run(
            f"{name}: features", lambda one=learner: watched.features(one.head.layers)
        )
        timer.run(
            f"{name}: learn",
            lambda one=learner, x=features_TF: one.learn(x, batch, teacher),
        )
        timer.run(f"{name}: optimizer", lambda one=learner: one.masters.step(1e-4))


def whole_steps(lessons: Lessons, talks: list[Conversation], recipe: Recipe, steps: int) -> float:
    """Seconds per step, launched as in training; laying out included."""
    device = lessons_device(lessons)
    pace = Pace(device)
    began = time.perf_counter()
    for number in range(steps):
        batch = lay_out(talks, recipe.lookahead, device)
        lessons.step(batch, number, 1e-4)
        pace.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def lessons_device(lessons: Lessons) -> torch.device:
    """Where the heads are."""
    return next(lessons.learners[0].head.parameters()).device


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--heads", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--unroll", type=int, default=6)
    parser.add_argument("--loss-vocab", type=int, default=16384)
    parser.add_argument("--loss-rows", type=int, default=8192)
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take longest")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Decoder(SPECS[OWN], dtype, device).requires_grad_(False)
    for name, weight in target.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.05)
    recipe = Recipe(
        plans(asked.heads, SPECS[OWN], Shape(steps=asked.unroll, medusa_layers=2)),
        minutes=1.0,
        batch_tokens=asked.tokens,
        loss_vocab=asked.loss_vocab,
        loss_rows=asked.loss_rows,
        optimizer=asked.optimizer,
        compile=asked.compile,
    )
    talks = conversations(asked.tokens, SPECS[OWN].vocab_size, np.random.default_rng(0))
    batch = lay_out(talks, recipe.lookahead, device)
    lessons = lessons_of(recipe, target, batch)
    whole_steps(lessons, talks, recipe, 3)
    timer = Timer(device)
    for number in range(asked.steps):
        parts_of(lessons, batch, number, timer)
    means = timer.means()
    seconds = whole_steps(lessons, talks, recipe, asked.steps)
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "asked": vars(asked),
        "conversations": len(talks),
        "rows_with_a_loss": len(batch.at_N),
        "milliseconds": means,
        "milliseconds_of_parts": round(sum(means.values()), 3),
        "milliseconds_of_a_step": round(seconds * 1e3, 3),
        "tokens_per_second": round(asked.tokens / seconds),
    }
    if device.type == "cuda":
        found["peak_gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if asked.profile:
        sys.stdout.write(profiled(lessons, talks, recipe) + "\n")


def profiled(lessons: Lessons, talks: list[Conversation], recipe: Recipe) -> str:
    """A table of three steps, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if lessons_device(lessons).type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        whole_steps(lessons, talks, recipe, 3)
    key = "self_cuda_time_total" if len(activities) > 1 else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=70)
    return table


if __name__ == "__main__":
    main()
