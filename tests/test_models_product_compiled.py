"""Products as the compiler takes them, which the interpreter does not judge by: types of branches.

Compiled for an H200, in a process where launches do nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmark_scripts import HOME

COMPILED = """
import no_device; no_device.absent()
import torch
from furcate.models.blocks import Stream
from furcate.models.blocks_triton import Fused
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm
from furcate.models.product_cut import Tile
from furcate.models.product_triton import tiled

x_TI = torch.zeros(5, 64, dtype=torch.bfloat16)
by = Linear(64, 32, bias=True, like=x_TI).requires_grad_(False)
norm = RmsNorm(64, 1e-5, like=x_TI).requires_grad_(False)
for splits in (1, 2):
    blocks = Fused(tiled(lambda _: Tile(16, 16, 16, 4, 3, splits)))
    blocks.norm_linear(Stream(x_TI), norm, by)
    blocks.gate_linear(Stream(x_TI), norm, by)
    blocks.linear_add(x_TI, by, torch.zeros_like(x_TI[:, :32])).whole()
print("all compiled")
"""


def test_products_compile_with_and_without_splits_whatever_stands_around_them() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HOME), str(HOME.parent)])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], check=False, capture_output=True, text=True, env=env
    )
    assert done.stdout.strip() == "all compiled", done.stderr
