"""Compiles, several at once, the kernels that the other scripts will launch; needs no GPU.

    python benchmarks/compile_ahead.py --out compiled.json
    TRITON_CACHE_DIR=cache python benchmarks/compile_ahead.py --only off eagle3 --batches 1

Rounds of all kinds are played in processes where launches do nothing (`no_device.py`): the target
and its heads have their real sizes, and each kernel is compiled for the arguments that it would
get on an H200. What is found in Triton's cache is not compiled again, and what is compiled stays
there, for a run on a device with the same Triton. `seconds_by_name` says what compiling costs;
`kernels` how many each combination needs beside those before it in its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from json import dumps, loads
from typing import Any

import torch
from gpu_report import CannotRun, Report, begin, parser_of
from torch import Tensor

MARK = "compiled: "
ROWS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = 4  # of the large shape: its layers are all alike
CHUNK = 256  # rows of a stretch of prompt
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
}
WAYS = ("off", "ngram", "eagle3", "hybrid", "mtp", "medusa")


@dataclass(frozen=True)
class Job:
    """Rounds of one engine."""

    target: str
    way: str
    batch: int
    context: int
    nodes: int
    law: str = "greedy"
    dtype: str = "bfloat16"
    invariant: bool = False

    @property
    def name(self) -> dict[str, Any]:
        """As rows begin."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def jobs(ways: list[str], batches: list[int], shapes: list[str]) -> Iterator[Job]:
    """What the scripts of `all_gpu.py` play, the longest first."""
    for target in shapes:
        small = target == "smollm2-135m"
        for way in ways if small else [one for one in ("off", "eagle3") if one in ways]:
            for batch in sorted(batches if small else [1], reverse=True):
                for context, nodes in ((720, 63), (720, 31)) if small else ((2320, 63),):
                    yield Job(target, way, batch, context, nodes)
    if "smollm2-135m" in shapes and "ngram" in ways:
        for law in ("warm", "filtered", "penalties"):
            yield Job("smollm2-135m", "hybrid", 8, 1024, 31, law)
        for dtype in ("float32", "bfloat16"):
            for batch in (1, 8):
                yield Job("smollm2-135m", "ngram", batch, 8192, 15, "warm", dtype, True)


@torch.inference_mode()
def play(job: Job) -> dict[str, Any]:
    """In a process where nothing is launched: every kind of round once, and stretches of prompt."""
    seconds, count = _watched()
    built = _built(job)
    needs = _needs(job, built)
    for kind in _kinds(job, built, needs):
        built.round.play(kind, at_work=True)
    _prefill(built, needs)
    return {"kernels": count.total(), "by_name": dict(count), "seconds_by_name": dict(seconds)}


def _watched() -> tuple[Counter[str], Counter[str]]:
    """(seconds, how many) that the compiler is busy, by kernel, from now on."""
    compiler: Any = import_module("triton.compiler")
    compile_as_shipped = compiler.compile
    seconds: Counter[str] = Counter()
    count: Counter[str] = Counter()

    def timed(source: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        made = compile_as_shipped(source, *args, **kwargs)
        seconds[source.name] += time.perf_counter() - began  # type: ignore[assignment]
        count[source.name] += 1
        return made

    compiler.compile = timed
    return seconds, count


def _built(job: Job) -> Any:
    """An engine's parts on the CPU, with the kernels and blocks of a GPU."""
    backends = import_module("furcate.kernels.backend_triton")
    blocks = import_module("furcate.models.blocks_triton")
    kernels = backends.INVARIANT if job.invariant else backends.TRITON
    for module in ("furcate.engine.build", "furcate.drafters.make", "targets"):
        if hasattr(import_module(module), "kernels_of"):
            setattr(import_module(module), "kernels_of", lambda *_, **__: kernels)  # noqa: B010
    around: Any = import_module("furcate.drafters.around")
    make: Any = import_module("furcate.drafters.make")
    around.CPU_DEPTH, make.CPU_WORDS = around.GPU_DEPTH, None
    target = _target(job)
    decoder = target.decoder.on(blocks.INVARIANT if job.invariant else blocks.TRITON)
    for name in ("empty", "empty_like"):
        setattr(torch, name, _zeroed(getattr(torch, name)))
    Tensor.new_empty = _zeroed(Tensor.new_empty)  # type: ignore[method-assign]
    target = replace(target, decoder=decoder)
    config, build = import_module("furcate.config"), import_module("furcate.engine.build").build
    drafter: Any = job.way
    if job.way == "eagle3" and job.target != "smollm2-135m":
        drafter = target.drafter(job.way, job.context + job.nodes + 1, job.batch)
    options = config.EngineOptions(
        max_batch=job.batch, max_context=job.context, kv_tokens=job.batch * job.context
    )
    how = config.DraftOptions(num_draft_tokens=None if job.way == "off" else job.nodes)
    return build(decoder, target.tokenizer, drafter, options, how)


def _target(job: Job) -> Any:
    """Of its real sizes; a large one has few layers, and weights that nobody fills."""
    targets: Any = import_module("targets")
    zoo = import_module("furcate.models.zoo")
    tokenizer = import_module("furcate.text.tokenizer").load_tokenizer(zoo.resolve(targets.OWN))
    dtype, cpu = getattr(torch, job.dtype), torch.device("cpu")
    if job.target == targets.OWN:
        load = import_module("furcate.models.load").load_decoder
        decoder = load(zoo.resolve(targets.OWN), dtype, cpu)
    else:
        spec = targets.SPECS[job.target]
        spec = replace(spec, num_layers=LAYERS, rope_layers=(True,) * LAYERS)
        decoder = import_module("furcate.models.decoder").Decoder(spec, dtype, cpu)
        targets.fill = lambda module: None
    return targets.Target(job.target, decoder.requires_grad_(False), tokenizer)


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Nothing is written, so what is read must be numbers that point somewhere."""

    @wraps(make)
    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        made = make(*args, **kwargs)
        return made if made.device.type == "meta" else made.zero_()

    return zeroed


def _kinds(job: Job, built: Any, needs: Any) -> Iterator[Any]:
    """Batches of every bucket, as recordings have them."""
    batch_of = import_module("furcate.engine.round").Batch
    rows_of = [n for n in ROWS if n <= built.round.most_nodes] + [built.round.most_nodes + 1]
    sizes = [n for n in ROWS if n < job.batch] + [job.batch]
    widest = job.context + built.round.most_nodes + 2
    columns = [n for n in (512, 1024, 2048, 4096) if n < widest] + [widest]
    for requests in sizes:
        for rows in dict.fromkeys(rows_of):
            for width in columns:
                for levels in (*built.round.drafter.depths, 0):
                    yield batch_of(
                        slot_B=torch.full((requests,), built.round.state.dummy),
                        allowance_B=torch.ones(requests, dtype=torch.int64),
                        rows=rows,
                        columns=width,
                        needs=needs,
                        levels=levels,
                    )


def _needs(job: Job, built: Any) -> Any:
    """What a law asks of a round; a request that has it is taken in, so that its options lie
    there."""
    config, asking = import_module("furcate.config"), import_module("furcate.engine.asking")
    params = config.SamplingParams(max_tokens=8, seed=1, **LAWS[job.law])
    limits = asking.Limits(built.limits.vocab, job.context, ())
    request = import_module("furcate.engine.request").Request(
        asking.settle("r", [5] * 9, params, limits), 0
    )
    built.round.state.admit(0, request)
    return import_module("furcate.verify.law").needs_of([params], built.limits.vocab)


def _prefill(built: Any, needs: Any) -> None:
    """Stretches of a prompt, long and short."""
    target = import_module("furcate.engine.target")
    state = built.round.state
    slot_B = torch.zeros(1, dtype=torch.int64)
    for rows in (CHUNK, 100, 16):
        view = state.view(slot_B, rows, needs)
        chain = target.chain(view.tokens_BW[:, :rows], torch.tensor([rows]))
        built.round.prefill(view, chain, target.Span(rows))


def started(job: Job) -> dict[str, Any]:
    """A job in a process of its own; raises RuntimeError with its last line."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["OMP_NUM_THREADS"] = "1"
    words = [sys.executable, __file__, "--job", dumps(job.name)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        raise RuntimeError((done.stderr.strip() or "it said nothing").splitlines()[-1])
    return dict(loads(told[-1].removeprefix(MARK)))


def main() -> None:
    """Print one JSON object; exit with 1 if a kernel cannot be compiled."""
    if sys.argv[1:2] == ["--job"]:
        import_module("no_device").absent()
        sys.stdout.write(MARK + dumps(play(Job(**loads(sys.argv[2])))) + "\n")
        return
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "llama-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.tiny:
        asked.only, asked.shapes, asked.batches = ["off"], ["tiny"], [1]
    try:
        import_module("triton")
    except ImportError as fault:
        raise CannotRun(f"triton is not there: {fault}") from None
    what = "kernels compiled for an H200, before anything is launched"
    report = Report.of("compile_ahead.py", what, torch.device("cpu"), asked)
    report.note(cache=os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"))
    wanted = [
        (job.name, partial(started, job)) for job in jobs(asked.only, asked.batches, asked.shapes)
    ]
    report.run_side_by_side(wanted, asked.at_once)
    seconds: Counter[str] = Counter()
    for row in report.rows:
        seconds.update(row.get("seconds_by_name", {}))
    report.note(seconds_by_name={name: round(value, 1) for name, value in seconds.most_common()})
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)
