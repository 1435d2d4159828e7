"""Programmatic dependent launch: a kernel's programs begin while the one ahead of it still runs.

A kernel that takes part says `let_next_begin` first, reads what no kernel of a round ever writes
(weights), then says `wait_for_last`, and only behind that reads or writes anything else. All of its
programs must wait: whoever comes next trusts that all that is ahead of its own predecessor is over.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["LAUNCH", "ON", "let_next_begin", "wait_for_last"]

# Off: on an H200 a plain pass of SmolLM2 gains 6 % by it and one of Llama-8B's sizes loses 12 %
# (`benchmarks/results/early_launches_*_h200.json`).
ON = tl.constexpr(False)

LAUNCH: dict[str, bool] = {"launch_pdl": True} if ON.value else {}
"""What such a kernel is launched with."""


@triton.jit
def let_next_begin():
    """The programs of the next kernel may begin once all of this one's have."""
    if ON:
        gdc_launch_dependents()


@triton.jit
def wait_for_last():
    """What the kernel ahead has written can be read from here on."""
    if ON:
        gdc_wait()
