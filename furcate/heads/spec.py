"""What a draft head is, as numbers and flags alone: the same record whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furcate.errors import BadFile
from furcate.models.spec import MAX_LAYERS, DecoderSpec

__all__ = ["EagleSpec", "HeadSpec", "MedusaSpec", "MtpSpec"]

MAX_HEADS = 64  # far above any Medusa, far below what a damaged file may claim


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """EAGLE-1 (arXiv:2401.15077) or EAGLE-3 (arXiv:2503.01840); every flag is always explicit.

    `block` has the sizes of the head's own layers and, as `vocab_size`, the target's vocabulary.
    EAGLE-1 and 2 differ in how trees are grown, not in the network.
    """

    kind: Literal["eagle1", "eagle3"]
    block: DecoderSpec
    target_hidden_size: int
    layers: tuple[int, ...]  # features, counted as transformers' `hidden_states` are
    draft_vocab_size: int  # equal to the target's vocabulary: all of it, in the same order
    own_embedding: bool = False  # false: the target's
    own_output: bool = False  # false: rows of the target's output matrix
    fc_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normed state
    norm_before_fc: bool = False  # EAGLE-3: one norm over all features together
    fc_norm: bool = False  # EAGLE-3: one norm for each layer's features
    norm_output: bool = False  # EAGLE-3: the normed state is fed on

    def __post_init__(self) -> None:
        if not self.layers:
            raise BadFile("a head of this kind needs features", field="layers", value=self.layers)
        if self.norm_before_fc and self.fc_norm:
            raise BadFile("excludes norm_before_fc", field="fc_norm", value=True)
        _check_draft_vocab(self.draft_vocab_size, self.vocab_size)
        if not self.own_embedding and self.block.hidden_size != self.target_hidden_size:
            raise BadFile(
                f"the target's embeddings have {self.target_hidden_size} columns, and the head "
                "has none of its own",
                field="hidden_size",
                value=self.block.hidden_size,
            )

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.block.vocab_size


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), one module reused."""

    block: DecoderSpec
    layers: tuple[int, ...]  # the final state alone: (num_layers,)
    draft_vocab_size: int
    own_output: bool = False
    kind: Literal["mtp"] = "mtp"

    def __post_init__(self) -> None:
        _check_draft_vocab(self.draft_vocab_size, self.vocab_size)
        if self.block.num_layers != 1:
            raise BadFile("must be 1", field="block.num_layers", value=self.block.num_layers)

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.block.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The target's, which is the head's own."""
        return self.block.hidden_size


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """Medusa (arXiv:2401.10774, section 2.1): residual heads on the target's final state."""

    hidden_size: int
    vocab_size: int  # of the target
    num_heads: int
    num_layers: int  # residual blocks of each head
    layers: tuple[int, ...]  # the final state alone
    draft_vocab_size: int
    own_output: bool = False
    bias: bool = True
    kind: Literal["medusa"] = "medusa"

    def __post_init__(self) -> None:
        for name, most in (("num_heads", MAX_HEADS), ("num_layers", MAX_LAYERS)):
            if not 1 <= getattr(self, name) <= most:
                raise BadFile(f"must be 1 to {most}", field=name, value=getattr(self, name))
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise BadFile("must be positive", field=name, value=getattr(self, name))
        _check_draft_vocab(self.draft_vocab_size, self.vocab_size)

    @property
    def target_hidden_size(self) -> int:
        """The target's, which is the head's own."""
        return self.hidden_size


HeadSpec = EagleSpec | MtpSpec | MedusaSpec


def _check_draft_vocab(size: int, vocab: int) -> None:
    if not 1 <= size <= vocab:
        raise BadFile(
            f"must be 1 to {vocab}, the target's vocabulary", field="draft_vocab_size", value=size
        )
