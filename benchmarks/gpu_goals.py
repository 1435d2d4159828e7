"""What the figures of `all_gpu.py` are held against: each goal, and where its figure stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GOALS", "Goal", "judged"]

Record = Mapping[str, Any]
VLLM = {1: 431, 8: 3627, 32: 12948}  # tokens/s of vLLM 0.24, measured apart on such a machine
DENSE_STEP = 1.44 / 0.89  # a pass of 16 tokens over one with a dense mask, compiled: measured apart
TOKENS = 100_000
REQUESTS = 1_000


@dataclass(frozen=True)
class Goal:
    """A figure of a part; `read` gives None, or raises LookupError, where it is not there."""

    what: str
    part: str
    read: Callable[[Record], float | None]
    bound: float
    at_least: bool = False

    def judge(self, record: Record | None) -> dict[str, Any]:
        """Whether it is met; None: there is no figure."""
        try:
            figure = None if record is None else self.read(record)
        except (LookupError, ValueError, TypeError):  # the row that has it failed
            figure = None
        met = None
        if figure is not None:
            met = figure >= self.bound if self.at_least else figure <= self.bound
        sign = "at least" if self.at_least else "at most"
        return {
            "goal": self.what,
            "part": self.part,
            "figure": figure,
            "wanted": f"{sign} {self.bound:g}",
            "met": met,
        }


def judged(records: Mapping[str, Record | None]) -> list[dict[str, Any]]:
    """All goals, with what there is by part."""
    return [goal.judge(records.get(goal.part)) for goal in GOALS]


def _rows(record: Record, **wanted: Any) -> list[Mapping[str, Any]]:
    """Rows with these fields, but those that failed."""
    return [
        row
        for row in record["results"]
        if "failed" not in row and all(row.get(name) == value for name, value in wanted.items())
    ]


def _one(figure: str, **wanted: Any) -> Callable[[Record], float | None]:
    return lambda record: float(_rows(record, **wanted)[0][figure])


def _best_way(over: str) -> Callable[[Record], float | None]:
    """Of the trees."""
    own = ("off", "eager", "static", "vllm")
    return lambda record: max(row[over] for row in _rows(record) if row["way"] not in own)


def _over_vllm(batch: int) -> Callable[[Record], float | None]:
    """By the same run if it was there, else by what was measured apart."""

    def read(record: Record) -> float:
        rows = [row for row in _rows(record) if row["way"] not in ("eager", "static", "vllm")]
        beside = [row["over_vllm"] for row in rows if "over_vllm" in row]
        return max(beside or [row["tokens_per_second"] / VLLM[batch] for row in rows])

    return read


def _worst_way(record: Record) -> float:
    peers = ("off", "eager", "static", "vllm")
    return min(row["over_off"] for row in _rows(record) if row["way"] not in peers)


def _kept_speed(record: Record) -> float:
    """TB/s of keys and values where nodes times group is at most 64, from 16k on; the slowest."""
    rows = _rows(record, kernel="tree attention", batch=1)
    found = [r["kv_gb_per_s"] for r in rows if r["length"] >= 16384 and r["rows"] <= 16]
    return min(found) / 1e3


def _over_dense(record: Record) -> float:
    """The slowest of all trees, against whichever dense mask is the faster; a lone row is none."""
    ratios: dict[tuple[int, int], float] = {}
    for row in _rows(record):
        if "dense mask" in str(row.get("peer")) and row["length"] >= 8192 and row["rows"] > 1:
            at = row["length"], row["rows"]
            ratios[at] = min(ratios.get(at, float("inf")), row["ratio"])
    return min(ratios.values())


def _step(record: Record) -> float:
    """A round of four rows over one of one row."""
    ms = {row["rows"]: row["ms_per_round"] for row in _rows(record, curve="nodes")}
    return float(ms[4] / ms[1])


def _least_lanes(record: Record) -> float:
    rows = _rows(record, row="lanes")
    return min(row["lanes"] for row in rows if "enough" in row)


def _count(rows: Iterable[Mapping[str, Any]]) -> float:
    return float(sum(1 for _ in rows))


def _unsound(record: Record) -> float | None:
    """Rows that are wrong, failed, or were not reached; None: there are none at all."""
    bad = [r for r in record["results"] if "failed" in r or r.get("sound") is False]
    return _count([*bad, *record.get("left_out", [])]) if record["results"] else None


def _unreached(record: Record) -> float:
    return float(len(record["shortcomings"]))


_SMALL, _LARGE = {"row": "speed", "target": "smollm2-135m"}, {"row": "speed", "target": "llama-8b"}

GOALS = (
    Goal(
        "SmolLM2 plain, ms a token",
        "round_smollm2",
        _one("plain_ms_per_token", drafter="off", **_SMALL),
        0.60,
    ),
    Goal(
        "the same, the second goal",
        "round_smollm2",
        _one("plain_ms_per_token", drafter="off", **_SMALL),
        0.40,
    ),
    Goal(
        "8B shape at 2k: plain, ms a token",
        "round_8b",
        _one("plain_ms_per_token", drafter="off", **_LARGE),
        4.4,
    ),
    Goal(
        "8B shape at 2k: scoring 64 rows over a plain pass",
        "round_8b",
        _one("verify_over_plain", row="waterfall", drafter="eagle3@5"),
        1.12,
    ),
    Goal(
        "8B shape at 2k: an EAGLE-3 round, ms",
        "round_8b",
        _one("ms_per_round", drafter="eagle3@5", **_LARGE),
        6.2,
    ),
    Goal("trees over plain, batch 1", "versus_1", _best_way("over_off"), 2.0, True),
    Goal("the same, the second goal", "versus_1", _best_way("over_off"), 2.5, True),
    Goal("over vLLM plain, batch 1", "versus_1", _over_vllm(1), 8, True),
    Goal("over vLLM plain, batch 8", "versus_8", _over_vllm(8), 5, True),
    Goal("over vLLM plain, batch 32", "versus_32", _over_vllm(32), 3, True),
    Goal("the slowest drafter over plain, batch 1", "versus_1", _worst_way, 0.97, True),
    Goal("the slowest drafter over plain, batch 8", "versus_8", _worst_way, 0.97, True),
    Goal("the slowest drafter over plain, batch 32", "versus_32", _worst_way, 0.97, True),
    Goal("four rows over one, SmolLM2", "growth_small", _step, DENSE_STEP),
    Goal("four rows over one, 8B shape", "growth_nodes", _step, DENSE_STEP),
    Goal("attention from 16k on, TB/s of keys and values", "attention", _kept_speed, 3.3, True),
    Goal(
        "attention over a tree and over a chain, the worst ratio",
        "attention",
        lambda record: max(row["tree_over_chain"] for row in _rows(record)),
        1.03,
    ),
    Goal("attention over SDPA with a dense mask, from 8k on", "peers", _over_dense, 5, True),
    Goal(
        "select, accept and move, 64 rows, µs",
        "bookkeeping",
        _one("us", kernel="select, accept, kv move", batch=1),
        60,
    ),
    Goal("lanes at work, the fewest", "lanes", _least_lanes, 0.96, True),
    Goal("first token of a cold start, s", "startup", _one("first_token", state="cold"), 60),
    Goal("float32 streams: tokens compared", "streams", lambda r: r["compared"], TOKENS, True),
    Goal(
        "float32 streams: differences on chains",
        "streams",
        lambda r: r["differences_on_chains"],
        0,
    ),
    Goal("float32 streams: differences that are no ties", "streams", lambda r: r["wrong"], 0),
    Goal("float32 streams: shortcomings", "streams", _unreached, 0),
    Goal("bf16 streams, flips are known", "flips", _unreached, 0),
    Goal("bf16 streams, row by row, flips are known", "flips_invariant", _unreached, 0),
    Goal(
        "memory over what was stated",
        "memory",
        _one("allocated_over_stated", part="memory"),
        1.05,
    ),
    Goal(
        "requests without growth",
        "memory",
        lambda r: max(row["requests"] for row in _rows(r, part="memory", holds_still=True)),
        REQUESTS,
        True,
    ),
    Goal("waits and moves that are wrong", "waits", _unsound, 0),
    Goal("kernel tests that a sanitizer finds fault with", "sanitize", _unsound, 0),
    Goal("sampling laws that are not kept", "law", _unsound, 0),
    Goal("growth with context: rows that failed", "growth_context", _unsound, 0),
    Goal("growth with batch: rows that failed", "growth_batch", _unsound, 0),
)
