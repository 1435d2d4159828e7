"""Drafters around networks: a small model, a trained head, or one of them beside n-gram matches."""

from __future__ import annotations

from furcate.config import DraftOptions
from furcate.drafters.draft_cache import Room
from furcate.drafters.hybrid import HybridDrafter
from furcate.drafters.manner import Habit, manner_of
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.model import ModelNetwork
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.plausible import PRIOR
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.heads.medusa import Medusa
from furcate.heads.recurrent import Recurrent
from furcate.models.decoder import Decoder
from furcate.tree.calibration import Calibration

__all__ = ["CPU_WORDS", "around_head", "around_model", "beside_matches"]

MODEL_DEPTH = 5
MODEL_WIDTH = 4  # rows that go on at each level, and children of each
HEAD_WIDTH = 10
CPU_DEPTH = 4  # a level costs the same whatever it adds, and deep ones add little
GPU_DEPTH = 7
CPU_WORDS = 8192  # tokens that a head scores: each level reads as many rows of the output matrix


def around_model(
    decoder: Decoder, options: DraftOptions, room: Room, longest: int | None = None
) -> RecurrentDrafter:
    """A drafter around a whole small model with the target's tokens.

    `longest` is the most nodes that a round may accept, where others draft deeper than it does.
    Raises BadRequest for a tree that it cannot grow.
    """
    network = ModelNetwork(decoder)
    words = min(room.vocab, network.vocab)
    habit = Habit(MODEL_DEPTH, MODEL_WIDTH, words=words, longest=longest)
    return RecurrentDrafter(network, manner_of(options, habit, room.device), room)


def around_head(
    head: Recurrent | Medusa,
    options: DraftOptions,
    room: Room,
    fitted: Calibration = PRIOR,
    longest: int | None = None,
) -> RecurrentDrafter | MedusaDrafter:
    """A drafter around a trained head; `fitted` says how its scores predict the target's choice.

    Raises BadRequest for a tree that the head cannot grow.
    """
    habit = Habit(
        depth=CPU_DEPTH if room.device.type == "cpu" else GPU_DEPTH,
        width=HEAD_WIDTH,
        deepest=head.depth if isinstance(head, Medusa) else None,
        calibration=fitted,
        words=room.vocab if head.token_D is None else len(head.token_D),
        longest=longest,
    )
    manner = manner_of(options, habit, room.device)
    if isinstance(head, Medusa):
        return MedusaDrafter(head, manner, room)
    return RecurrentDrafter(head, manner, room)


def beside_matches(
    ngram: NgramDrafter, network: RecurrentDrafter | MedusaDrafter, room: Room
) -> HybridDrafter:
    """A network's tree and n-gram matches in one; `longest` of the network must be their depth."""
    return HybridDrafter(
        ngram, network, capacity=room.capacity, device=room.device, kernels=room.kernels
    )
