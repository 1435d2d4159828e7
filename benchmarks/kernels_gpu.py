"""Checks each kernel of a round against its torch reference, and times it beside the ceilings.

    python benchmarks/kernels_gpu.py --out kernels.json
    python benchmarks/kernels_gpu.py --only attention peers --shapes llama-8b

What a kernel leaves unwritten is NaN when it is checked. Inputs are random; times are medians of
recorded calls. What a round finds in memory (keys, weights) comes from memory here: calls take
turns with buffers that together are three times the cache. What a round has just written (trees,
logits) is in the cache if it fits. Every row is written as soon as it is there, and one that fails
says so. Without a GPU `--tiny` runs the same code on the torch references, at sizes that say
nothing.
"""

from __future__ import annotations

import sys

import kernels_attention as attention
import kernels_layer as layer
import kernels_round as rounds
import kernels_vocabulary as vocabulary
import torch
from gpu_report import Report, asked_of, begin, parser_of
from gpu_timing import ceilings
from kernels_bench import Bench
from targets import OWN, SPECS

from furcate.kernels.backend import kernels_of

GROUPS = ("attention", "peers", "draft", "round", "vocabulary", "layer")
LONGEST = {OWN: 8192}  # tokens of a request


def attending(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """The tree's attention, by context, rows and batch."""
    for batch, length, rows in attention.sizes(tiny, LONGEST.get(shape, 1 << 20)):
        head = _head("tree attention", shape, batch=batch, length=length, rows=rows)
        report.run(
            head,
            lambda at=(batch, length, rows): attention.verifying(bench, SPECS[shape], *at),
        )


def beside_peers(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """The same against torch's attention."""
    lengths = (40,) if tiny else (2048, 8192) if shape == OWN else (2048, 8192, 32768)
    for length in lengths:
        for rows in (8,) if tiny else (1, 16, 64):
            for name in attention.PEERS:
                head = _head("tree attention", shape, length=length, rows=rows, peer=name)
                report.run(
                    head,
                    lambda at=(length, rows, name): attention.peer(bench, SPECS[shape], *at),
                )


def drafting(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """Attention of one level of a draft."""
    for batch, length in ((2, 40),) if tiny else ((1, 2048), (1, 8192), (32, 2048)):
        head = _head("draft attention", shape, batch=batch, length=length, rows=10)
        report.run(head, lambda at=(batch, length): attention.drafting(bench, SPECS[shape], *at))


def around(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """Trees, paths and pages."""
    spec = SPECS[shape]
    for batch in (2,) if tiny else (1, 8, 32):
        for rows in (8,) if tiny else (8, 32, 64, 128, 256):
            size = {"batch": batch, "rows": rows}
            report.run(
                _head("select", shape, **size),
                lambda at=(batch, rows): rounds.selecting_rows(bench, *at),
            )
            report.run(
                _head("accept", shape, **size), lambda at=(batch, rows): rounds.walking(bench, *at)
            )
        rows = 16 if tiny else 64
        for name, stays in (("kv move", False), ("kv move, likeliest path", True)):
            report.run(
                _head(name, shape, batch=batch, rows=rows),
                lambda b=batch, r=rows, s=stays: rounds.moving(bench, spec, b, r, stays=s),
            )
        report.run(
            _head("select, accept, kv move", shape, batch=batch, rows=rows),
            lambda at=(batch, rows): rounds.bookkeeping(bench, spec, *at),
        )
    for pages in (2,) if tiny else (16, 512):
        report.run(
            _head("wipe", shape, pages=pages), lambda n=pages: rounds.wiping_pages(bench, spec, n)
        )


def over_words(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """Noise, filters and children of draft rows."""
    vocab = SPECS[shape].vocab_size
    kernels = {
        "sample": vocabulary.choosing,
        "filters": vocabulary.filtering,
        "draft head": vocabulary.proposing,
    }
    for batch, rows in ((2, 3),) if tiny else ((1, 1), (1, 10), (1, 64), (8, 64), (32, 16)):
        for name, kernel in kernels.items():
            at = (bench, vocab, batch, rows)
            report.run(_head(name, shape, batch=batch, rows=rows), lambda k=kernel, at=at: k(*at))


def in_layers(bench: Bench, report: Report, shape: str, *, tiny: bool) -> None:
    """Products by way and rows; norms; turns and writes."""
    spec = SPECS[shape]
    for rows in (1, 5) if tiny else (1, 8, 32, 64, 256):
        for way in layer.ways(bench):
            for name in layer.PRODUCTS:
                report.run(
                    _head(name, shape, rows=rows, way=way),
                    lambda at=(name, rows, way): layer.multiplying(bench, spec, *at),
                )
            report.run(
                _head("norm of a sum", shape, rows=rows, way=way),
                lambda at=(rows, way): layer.norming(bench, spec, *at),
            )
        report.run(
            _head("turn and write", shape, rows=rows),
            lambda n=rows: layer.turning(bench, spec, n),
        )


def _head(kernel: str, shape: str, **size: int | str) -> dict[str, int | str]:
    return {"kernel": kernel, "shape": shape, **size}


MEASURES = dict(
    zip(GROUPS, (attending, beside_peers, drafting, around, over_words, in_layers), strict=True)
)


@torch.inference_mode()
def main() -> None:
    """Print one JSON object; exit with 1 if a kernel is wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--shapes", nargs="+", default=[OWN, "llama-8b"], choices=list(SPECS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    asked, device = asked_of(parser, {"shapes": ["tiny"]})
    torch.manual_seed(0)
    what = "kernels of a round: checked against torch references, median times"
    report = Report.of("kernels_gpu.py", what, device, asked)
    top = ceilings(device, tiny=asked.tiny)
    dtype = getattr(torch, asked.dtype)
    bench = Bench(kernels_of(device).fitting(dtype), device, dtype, top)
    report.note(**top, kernels=bench.kernels.name, dtype=asked.dtype)
    for group in asked.only:
        for shape in asked.shapes:
            MEASURES[group](bench, report, shape, tiny=asked.tiny)
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)
