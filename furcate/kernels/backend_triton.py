"""The Triton twins as records; importing this needs triton."""

from __future__ import annotations

from dataclasses import replace

from furcate.kernels import (
    accept_triton,
    arrival_triton,
    attention_looks_triton,
    beside_triton,
    draft_head_triton,
    entries_triton,
    grow_triton,
    joint_tally_triton,
    joint_triton,
    kv_move_triton,
    kv_write_triton,
    lawful_triton,
    ledger_triton,
    ngram_triton,
    pools_triton,
    sample_triton,
    select_triton,
    states_triton,
    tally_triton,
    turn_write_triton,
)
from furcate.kernels.backend import Kernels

__all__ = ["INVARIANT", "TRITON"]

TRITON = Kernels(
    name="triton",
    look=attention_looks_triton.look,
    write=kv_write_triton.write,
    select=select_triton.select,
    accept=accept_triton.accept,
    move_path=kv_move_triton.move_path,
    turn_write=turn_write_triton.turn_write,
    turn_look=attention_looks_triton.turn_look,
    sample=sample_triton.sample,
    limit=lawful_triton.limit,
    draft_head=draft_head_triton.draft_head,
    grow=grow_triton.grow,
    tally=tally_triton.tally,
    beside=beside_triton.beside,
    lookup=ngram_triton.lookup,
    tally_rates=tally_triton.tally_rates,
    join=joint_triton.join,
    most_joined=joint_triton.MOST,
    tail=states_triton.tail,
    keep=states_triton.keep,
    put=pools_triton.put,
    most_put=pools_triton.MOST,
    tally_joint=joint_tally_triton.tally_joint,
    entries=entries_triton.entries,
    settle=ledger_triton.settle,
    arrive=arrival_triton.arrive,
)

INVARIANT = replace(
    TRITON, look=attention_looks_triton.look_invariant, turn_look=None, batch_invariant=True
)
"""All others here treat every row by itself as they are."""
