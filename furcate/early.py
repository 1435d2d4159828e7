"""Kernels that begin while the one ahead of them ends: Hopper's programmatic dependent launch.

Between two small kernels that wait for one another lies about a microsecond in which nothing runs.
A kernel launched with `launch_pdl` says at once that the next one may get ready, and waits before
it touches anything that another kernel writes or reads; what lies still, weights, it may fetch
before. All its programs wait, so that whoever waits for it has waited for all before it too.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["early", "take_turn"]

# Off: every kernel waits for the whole of the one ahead, as usual. On, all kernels say the same on
# an H200, in recorded rounds too; whether they are faster has not been measured yet.
_ON = False


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on this device: `PDL` for the kernel, and what Triton is to do."""
    able = _ON and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def take_turn(PDL: tl.constexpr):
    """What a kernel begins with that fetches nothing ahead."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
