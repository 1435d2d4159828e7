"""Checks each kernel of a round against its torch reference in float32, and times it.

    python benchmarks/kernels_gpu.py --out kernels.json

What a kernel leaves unwritten is NaN. Inputs are random; times are medians of recorded calls,
bandwidth is set beside that of a large copy measured in the same run. Without a GPU `--tiny` runs
the same code on the torch references, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gpu_timing import REPEATS, case, ceilings, distance, median_ms, proposal
from torch import Tensor

from furcate.engine.birth import birth
from furcate.files import write_json
from furcate.kernels import accept as accepting
from furcate.kernels import select as selecting
from furcate.kernels import tree_attention as attending
from furcate.kernels.backend import Kernels, kernels_of
from furcate.kernels.draft import Verdict
from furcate.kernels.draft_head import draft_head
from furcate.kernels.draws import Draws
from furcate.kernels.kv_move import move_path
from furcate.kernels.tree_attention import Keys, Sight, behind
from furcate.tree.calibration import DepthScale
from furcate.verify.noise import gumbel_noise

SCALE = DepthScale(beta=1.1, sigma=0.9, floor=0.6)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative distance that is rounding


@dataclass(frozen=True)
class Shape:
    """Sizes of a target."""

    name: str
    layers: int
    heads: int
    kv: int
    size: int
    vocab: int


SHAPES = (
    Shape("smollm2-135m", 30, 9, 3, 64, 49152),
    Shape("llama-8b", 32, 32, 8, 128, 128256),
)
TINY = (Shape("tiny", 2, 4, 2, 16, 512),)


@dataclass(frozen=True)
class Timed:
    """One kernel at one size; `gb_per_s` counts every byte that must be read or written once."""

    kernel: str
    size: str
    sound: bool
    error: float | None
    ms: float
    gb_per_s: float | None = None
    share_of_copy: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where and how all kernels are measured."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    copy: float

    def timed(
        self, kernel: str, size: str, error: float | bool, call: Callable[[], Any], moved: int = 0
    ) -> Timed:
        """`error` is a distance, or whether results are equal; `moved` are bytes."""
        torch.use_deterministic_algorithms(False)
        ms = median_ms(call, self.device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        exact = isinstance(error, bool)
        sound = bool(error) if exact else error <= LIMIT[self.dtype]
        speed = moved / ms / 1e6 if moved else None
        share = None if speed is None else speed / self.copy
        return Timed(kernel, size, sound, None if exact else error, ms, speed, share)

    def draws(self, batch: int, rows: int) -> Draws:
        """Of warm requests."""
        seed_B = torch.randint(-(2**63), 2**63 - 1, (batch,), device=self.device)
        position_T = torch.randint(0, 9999, (batch * rows,), device=self.device)
        warm_B = torch.full((batch,), 0.8, device=self.device)
        return Draws(warm_B, seed_B, torch.zeros_like(seed_B), position_T)


def attention(bench: Bench, shape: Shape, batch: int, length: int, rows: int) -> Timed:
    """One layer; pages that nobody owns are NaN."""
    made = case(batch, length, rows, bench.device)
    q_THD = torch.randn(batch * rows, shape.heads, shape.size, device=bench.device)
    q_THD = q_THD.to(bench.dtype)
    # layers enough that each one's keys come from memory, as they do in a round
    count = 1 if bench.device.type == "cpu" else REPEATS
    layers = [Keys(*(_random(bench, (made.slots, shape.kv, shape.size)) for _ in "kv"))]
    layers += [Keys(layers[0].k_SKD.clone(), layers[0].v_SKD.clone()) for _ in range(count - 1)]
    keys, turns = layers[0], cycle(layers)
    sight = behind(made.places, made.draft.end_BR, made.draft.live_B)
    group = shape.heads // shape.kv
    told = attending.look(sight, group, torch.float32)
    expected = told(q_THD.float(), Keys(keys.k_SKD.float(), keys.v_SKD.float()))
    look = bench.kernels.look(sight, group, bench.dtype)
    error = distance(look(q_THD, keys), expected)
    moved = 2 * batch * (length + rows) * shape.kv * shape.size * bench.dtype.itemsize
    moved += 2 * q_THD.nbytes
    size = f"{shape.name} batch={batch} length={length} rows={rows}"
    return bench.timed("tree attention", size, error, lambda: look(q_THD, next(turns)), moved)


def drafting(bench: Bench, shape: Shape, batch: int, length: int) -> Timed:
    """Attention of one level of a draft: ten rows over sixty nodes and the root."""
    made, rows = case(batch, length, 61, bench.device), 10
    plain = behind(made.places, made.draft.end_BR, made.draft.live_B)
    sees_BRN = torch.rand(batch, rows, 61, device=bench.device) < 0.3
    sees_BRN[:, :, 0] = True
    sight = Sight(made.places, plain.slot_BN, plain.slot_BN, plain.live_B, sees_BRN, first=1)
    q_THD = _random(bench, (batch * rows, shape.heads, shape.size))
    keys = Keys(*(_random(bench, (made.slots, shape.kv, shape.size)) for _ in "kv"))
    group = shape.heads // shape.kv
    told = attending.look(sight, group, torch.float32)
    expected = told(q_THD.float(), Keys(keys.k_SKD.float(), keys.v_SKD.float()))
    look = bench.kernels.look(sight, group, bench.dtype)
    error = distance(look(q_THD, keys), expected)
    moved = 2 * batch * (length + 61) * shape.kv * shape.size * bench.dtype.itemsize
    size = f"{shape.name} batch={batch} length={length} rows={rows}"
    return bench.timed("draft attention", size, error, lambda: look(q_THD, keys), moved)


def writing(bench: Bench, shape: Shape, rows: int) -> Timed:
    """Of one layer."""
    pools = [torch.zeros(4096, shape.kv, shape.size, device=bench.device) for _ in "kvkv"]
    pools = [x.to(bench.dtype) for x in pools]
    new = [torch.randn(rows, shape.kv, shape.size, device=bench.device) for _ in "kv"]
    k_TKD, v_TKD = (x.to(bench.dtype) for x in new)
    slot_T = torch.randperm(4095, device=bench.device)[:rows] + 1
    keys = Keys(*pools[:2])
    bench.kernels.write(keys, slot_T, k_TKD, v_TKD)
    attending.write(Keys(*pools[2:]), slot_T, k_TKD, v_TKD)
    same = all(torch.equal(a[1:], b[1:]) for a, b in zip(pools[:2], pools[2:], strict=True))
    call = lambda: bench.kernels.write(keys, slot_T, k_TKD, v_TKD)  # noqa: E731
    return bench.timed("write", f"{shape.name} rows={rows}", same, call, 4 * k_TKD.nbytes)


def selecting_and_accepting(bench: Bench, batch: int, rows: int) -> Iterator[Timed]:
    """The tree of a round, and the walk down it."""
    pool = proposal(batch, 4 * rows, bench.device)
    root_B = torch.zeros(batch, dtype=torch.int64, device=bench.device)
    allowance_B = torch.full_like(root_B, rows)
    asked = (pool, root_B, rows, allowance_B)
    draft = selecting.select(*asked)
    size = f"batch={batch} rows={rows}"
    same = _same(bench.kernels.select(*asked), draft)
    yield bench.timed("select", size, same, lambda: bench.kernels.select(*asked))
    right_BR = torch.rand(batch, rows, device=bench.device) < 0.7
    child_BR = draft.tokens_BR[:, [*range(1, rows), 0]]  # the likeliest child comes next
    choice_BR = torch.where(right_BR, child_BR, 0)
    broken_BR = torch.zeros_like(right_BR)
    depth = int(draft.depth_BR.max())
    judged = (draft, choice_BR, depth, broken_BR)
    same = _same(bench.kernels.accept(*judged), accepting.accept(*judged))
    yield bench.timed("accept", size, same, lambda: bench.kernels.accept(*judged))


def moving(bench: Bench, shape: Shape, batch: int, rows: int) -> Iterator[Timed]:
    """All layers: a path that must move, and the likeliest one, which need not."""
    made = case(batch, 100, rows, bench.device)
    slot_BR = behind(made.places, made.draft.end_BR, made.draft.live_B).slot_BN
    deepest = min(8, rows)
    for name, path in (("move", range(rows - deepest, rows)), ("stay", range(deepest))):
        path_BD = torch.tensor([0, *path][: deepest + (name == "move")], device=bench.device)
        path_BD = path_BD.expand(batch, -1).contiguous()
        count_B = torch.full((batch,), path_BD.shape[1], device=bench.device)
        verdict = Verdict(path_BD, path_BD, count_B, count_B - 1)
        size = (shape.layers, made.slots, shape.kv, shape.size)
        one, other = ([_random(bench, size) for _ in "kv"] for _ in "ab")
        for a, b in zip(one, other, strict=True):
            b.copy_(a)
        bench.kernels.move_path((one[0], one[1]), slot_BR, verdict)
        move_path((other[0], other[1]), slot_BR, verdict)
        same = all(torch.equal(a[:, 1:], b[:, 1:]) for a, b in zip(one, other, strict=True))
        moved = 4 * batch * (path_BD.shape[1] - 1) * shape.layers * shape.kv * shape.size
        moved = moved * bench.dtype.itemsize if name == "move" else 0
        pools = (one[0], one[1])
        call = lambda p=pools, v=verdict: bench.kernels.move_path(p, slot_BR, v)  # noqa: E731
        yield bench.timed(f"kv move: {name}", f"{shape.name} batch={batch}", same, call, moved)


def choosing(bench: Bench, shape: Shape, batch: int, rows: int) -> Iterator[Timed]:
    """Noise and argmax of the target; children of a draft head's rows."""
    sample, head = bench.kernels.sample, bench.kernels.draft_head
    if sample is None or head is None:
        return
    total, draws = batch * rows, bench.draws(batch, rows)
    logits_TV = torch.randn(total, shape.vocab, device=bench.device).mul_(3).to(bench.dtype)
    broken_T = torch.empty(total, dtype=torch.bool, device=bench.device)
    each = [x.repeat_interleave(rows) for x in (draws.seed_B, draws.choice_B)]
    noise_TV = gumbel_noise(each[0], draws.position_T[:, None], each[1], shape.vocab)[:, 0]
    score_TV = logits_TV.float() + 0.8 * noise_TV
    best_T = score_TV.gather(1, sample(logits_TV, draws, broken_T)[:, None])[:, 0]
    sound = bool((score_TV.amax(1) - best_T <= 1e-4).all()) and not bool(broken_T.any())
    size = f"{shape.name} batch={batch} rows={rows}"
    call = lambda: sample(logits_TV, draws, broken_T)  # noqa: E731
    yield bench.timed("sample", size, sound, call, logits_TV.nbytes)
    told = draft_head(logits_TV, torch.full((total,), 0.8, device=bench.device), noise_TV, SCALE, 8)
    found = head(logits_TV, draws, SCALE, 8)
    worst = float((found.weight_NC - told.weight_NC).abs().max())
    call = lambda: head(logits_TV, draws, SCALE, 8)  # noqa: E731
    yield bench.timed("draft head", size, worst <= 1e-4, call, logits_TV.nbytes)


def everything(bench: Bench, shapes: tuple[Shape, ...], *, tiny: bool) -> Iterator[Timed]:
    """Every kernel at every size."""
    lengths, batches = ((40,), (2,)) if tiny else ((512, 2048, 16384), (1, 8))
    for shape in shapes:
        for batch in batches:
            for length in lengths:
                for rows in (1, 8) if tiny else (1, 4, 16, 64):
                    yield attention(bench, shape, batch, length, rows)
                yield drafting(bench, shape, batch, length)
            yield from moving(bench, shape, batch, 16 if tiny else 64)
            for rows in (1, 8) if tiny else (1, 10, 64):
                yield from choosing(bench, shape, batch, rows)
        for rows in (1, 64):
            yield writing(bench, shape, rows)
    for batch in batches:
        for rows in (8,) if tiny else (8, 32, 64, 128):
            yield from selecting_and_accepting(bench, batch, rows)


def _same(one: Any, other: Any) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _random(bench: Bench, size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, device=bench.device).to(bench.dtype)


@torch.inference_mode()
def main() -> None:
    """Print one JSON object; exit with 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = torch.device("cpu" if asked.tiny else "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    top = ceilings(device, tiny=asked.tiny)
    # from here on what nobody has written is NaN, or the largest whole number
    torch.use_deterministic_algorithms(True, warn_only=True)
    dtype = getattr(torch, asked.dtype)
    bench = Bench(kernels_of(device).fitting(dtype), device, dtype, top["copy_gb_per_s"])
    found = []
    for one in everything(bench, TINY if asked.tiny else SHAPES, tiny=asked.tiny):
        found.append(one)
        speed = "" if one.gb_per_s is None else f"{one.gb_per_s:8.0f} GB/s"
        mark = "" if one.sound else f"  WRONG {one.error}"
        sys.stderr.write(f"{one.kernel:16} {one.size:44} {one.ms * 1e3:9.1f} us {speed}{mark}\n")
    command = "python benchmarks/kernels_gpu.py " + " ".join(sys.argv[1:])
    record = {
        "what": "kernels of a round: checked against float32 references, median times",
        "command": command.strip(),
        **birth(device),
        "kernels": bench.kernels.name,
        "dtype": asked.dtype,
        **top,
        "results": [asdict(one) for one in found],
    }
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    if asked.out is not None:
        write_json(asked.out, record)
    sys.exit(0 if all(one.sound for one in found) else 1)


if __name__ == "__main__":
    main()
