"""Where the tests of Triton kernels run: on the GPU if there is one, else in the interpreter.

Import this before any `*_triton` module: Triton decides when a kernel is defined. A test file that
sets `pytestmark = MARKS` belongs to `make gpu` on a machine with a GPU and to `make test` on one
without.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

__all__ = ["DEVICE", "MARKS"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARKS: list[pytest.MarkDecorator] = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


def _interpret() -> None:
    """Turn the interpreter on, and let triton 3.6's work with numpy 2.4.

    That numpy refuses `int` of an array of one, which loop bounds are there (triton issue 9171).
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_as_shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_as_shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if DEVICE.type == "cpu":
    _interpret()
