"""What a writer of a format is given, and what it gives back.

Legend: C hidden size, D draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from furcate.errors import Unsupported
from furcate.heads.formats.draft_ids import offsets
from furcate.heads.held import Held
from furcate.heads.output import Shared
from furcate.heads.places import EMBEDDING, OUTPUT
from furcate.heads.tensor_files import WHOLE
from furcate.models.spec import DecoderSpec

__all__ = ["Shipment", "Written", "refuse"]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A head on its way out.

    Args:
        target: what it drafts for.
        shared: reads the target's matrices; asked only where their rows are to be written.
        verifier: the target's name on the hub, for formats that name it.
    """

    held: Held
    target: DecoderSpec
    shared: Callable[[], Shared]
    verifier: str | None = None

    def own(self) -> dict[str, Tensor]:
        """The head's own tensors by our names."""
        return {name: kept.read() for name, kept in self.held.tensors.items()}

    def token_D(self) -> Tensor | None:
        """The target's id of each row of the output matrix; None: all tokens."""
        spec, frequent_N = self.held.spec, self.held.frequent_N
        if spec.own_output or spec.draft_vocab_size == spec.vocab_size:
            return self.held.token_D
        assert frequent_N is not None
        return frequent_N[: spec.draft_vocab_size].sort().values

    def rows(self) -> dict[str, Tensor]:
        """The output matrix [D, C], the head's own or rows of the target's, with d2t and t2d."""
        token_D = self.token_D()
        tensors = {} if token_D is None else offsets(token_D, self.held.spec.vocab_size)
        if OUTPUT in self.held.tensors:
            return tensors | {OUTPUT: self.held.tensors[OUTPUT].read()}
        output_VC = self.shared().output_VC
        rows_DC = output_VC if token_D is None else output_VC[token_D.to(output_VC.device)]
        return tensors | {OUTPUT: rows_DC.to("cpu", self.held.dtype, copy=True)}

    def embedding(self) -> dict[str, Tensor]:
        """The embeddings [V, C], the head's own or the target's."""
        if EMBEDDING in self.held.tensors:
            return {EMBEDDING: self.held.tensors[EMBEDDING].read()}
        table_VC = self.shared().embedding_VC
        return {EMBEDDING: table_VC.to("cpu", self.held.dtype, copy=True)}


@dataclass(frozen=True, slots=True)
class Written:
    """A format's own config and tensors, and the file it keeps them in."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: str = WHOLE


def refuse(where: str, found: Mapping[str, object], hint: str | None = None) -> None:
    """Refuse to write what a format cannot say: every value must be false."""
    for field, value in found.items():
        if value is not False:
            raise Unsupported(f"cannot be written for {where}", field=field, value=value, hint=hint)
