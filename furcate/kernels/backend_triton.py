"""The Triton twins as one record; importing this needs triton."""

from __future__ import annotations

from furcate.kernels import (
    accept_triton,
    draft_head_triton,
    kv_move_triton,
    kv_write_triton,
    sample_triton,
    select_triton,
    tree_attention_triton,
    turn_write_triton,
)
from furcate.kernels.backend import Kernels

__all__ = ["TRITON"]

TRITON = Kernels(
    name="triton",
    look=tree_attention_triton.look,
    write=kv_write_triton.write,
    select=select_triton.select,
    accept=accept_triton.accept,
    move_path=kv_move_triton.move_path,
    turn_write=turn_write_triton.turn_write,
    sample=sample_triton.sample,
    draft_head=draft_head_triton.draft_head,
)
