"""Rotary angles of one row in Triton, for kernels that lay out what a pass begins with.

Twin of a row of the models' `Rope`. Legend: D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["lay_angles"]


@triton.jit
def lay_angles(
    position, row, freq_ptr, cos_ptr, sin_ptr, factor, F: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Cosines and sines of a position into a row of [T, 1, D] each, as a `Turn` has them.

    Angles are float32, and results are rounded from that. A launch turns fusion of products and
    sums off, so that it rounds as the torch path does. LANES is F padded to a power of two.
    """
    pair_F = tl.arange(0, LANES)
    freq_F = tl.load(freq_ptr + pair_F, mask=pair_F < F, other=0.0)
    angle_F = position.to(tl.float32) * freq_F
    cos_F, sin_F = tl.cos(angle_F) * factor, tl.sin(angle_F) * factor
    at_F = row * (2 * F) + pair_F
    tl.store(cos_ptr + at_F, cos_F, mask=pair_F < F)
    tl.store(cos_ptr + at_F + F, cos_F, mask=pair_F < F)
    # the first half of the sines has the opposite sign
    tl.store(sin_ptr + at_F, -sin_F, mask=pair_F < F)
    tl.store(sin_ptr + at_F + F, sin_F, mask=pair_F < F)
