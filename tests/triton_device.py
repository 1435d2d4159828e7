"""Where the tests of Triton kernels run: on the GPU if there is one, else in the interpreter.

Import this before any `*_triton` module: Triton decides when a kernel is defined. A test file that
sets `pytestmark = MARKS` belongs to `make gpu` on a machine with a GPU and to `make test` on one
without.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["DEVICE", "MARKS"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARKS: list[pytest.MarkDecorator] = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


def _interpret() -> None:
    """Turn the interpreter on, let triton 3.6's work with numpy 2.4, and spare it most of its time.

    That numpy refuses `int` of an array of one, which loop bounds are there (triton issue 9171).
    Half of the time is what the interpreter does anew for each kernel, and for each call of a
    function in one: make triton.language its own, and list which dtypes of numpy stand for
    triton's.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    patch_as_shipped, numpy_as_shipped = interpreter._patch_lang_tensor, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def patch(tensor: Any, scope: Any) -> None:
        patch_as_shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def numpy_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_as_shipped(dtype)
        return known[name]

    interpreter._patch_lang_tensor, interpreter._get_np_dtype = patch, numpy_of
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    # sums are looked at for overflow, and without `debug` nobody is told
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    _name_no_types(tl.core)


def _name_no_types(core: Any) -> None:
    """Tuples tell their type when they are asked: every shape is one, and nobody asks for it.

    A quarter of the rest of the time went into types and their names.
    """
    make_as_shipped, unwrap_as_shipped = core.tuple.__init__, core._unwrap_if_constexpr
    field_as_shipped = core.tuple.__getattr__

    def make(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002 (triton's name)
        if type is None:
            self.values = list(args)
        else:
            make_as_shipped(self, args, type)

    def missing(self: Any, name: str) -> Any:
        if name != "type":
            return field_as_shipped(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    def unwrap(one: Any) -> Any:
        if isinstance(one, core.constexpr):
            return one.value
        return one if isinstance(one, int | core.tensor) else unwrap_as_shipped(one)

    core.tuple.__init__, core.tuple.__getattr__ = make, missing
    core._unwrap_if_constexpr = unwrap


if DEVICE.type == "cpu":
    _interpret()
