"""What travels between the stages of a round, as tensors of fixed shape.

Legend: B requests, P nodes of a drafter's pool, R rows of a draft (root included), D deepest level,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Draft", "Proposal", "Verdict"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter would like to see scored: a pool of candidate nodes below each root.

    Parents come before their children, a child's value is at most its parent's, siblings differ
    in their token. A dead slot has value -inf and is never kept.
    """

    tokens_BP: Tensor  # int64
    parent_BP: Tensor  # int64, index into the pool; -1: child of the root
    depth_BP: Tensor  # int64, 1..D
    value_BP: Tensor  # float32, log of the calibrated probability that the path is accepted
    tag_BP: Tensor | None = None  # int64, the drafter's own note on where a node came from


@dataclass(frozen=True, slots=True)
class Draft:
    """A filled tree in DFS preorder, most valuable child first; row 0 is the last committed token.

    Row j is an ancestor of row i, or i itself, exactly if `j <= i < end[j]`. Pads stand at the end:
    `end` = own index + 1, `parent` 0, `depth` 0, value -inf, and they are known by index alone.
    """

    tokens_BR: Tensor  # int64
    parent_BR: Tensor  # int64, row index; 0 at the root and at pads
    depth_BR: Tensor  # int64, 0 at the root
    end_BR: Tensor  # int64, one past the subtree; the root's is `live`
    value_BR: Tensor  # float32, log; 0 at the root
    live_B: Tensor  # int64, rows in use, root included: 1..R
    tag_BR: Tensor | None = None  # int64, copied from the proposal; -1 at root and pads


@dataclass(frozen=True, slots=True)
class Verdict:
    """The longest path that the target's own choices follow, and the tokens to emit.

    `emitted[k]` for k < count are the accepted nodes' tokens and then the bonus; entries from
    `count` on have no meaning. `path[k]` is the row whose choice is `emitted[k]`.
    """

    path_BD: Tensor  # int64 [B, D + 1], path[0] = 0; entries past the path repeat its last row
    emitted_BD: Tensor  # int64 [B, D + 1]
    count_B: Tensor  # int64, accepted + 1 unless a stop rule cut it shorter
    accepted_B: Tensor  # int64, accepted drafted nodes before any stop rule
