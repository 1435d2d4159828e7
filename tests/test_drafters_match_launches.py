"""How many launches matches cost a recorded round, by themselves and beside a network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from drafter_views import view_of
from test_models_blocks import Operations
from tiny_engine import DRAFT, VOCAB
from tiny_heads import network
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.config import DraftOptions
from furcate.drafters.around import around_head, beside_matches
from furcate.drafters.base import Drafter, Tokens, View
from furcate.drafters.draft_cache import Room
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.plausible import PRIOR, Plausible
from furcate.kernels import joint_tally_triton, joint_triton, ngram_triton, tally_triton
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.backend_triton import TRITON
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.select import select

pytestmark = MARKS

TEXTS = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7]]
OURS = (
    (ngram_triton, "_matches"),
    (ngram_triton, "_chains"),
    (joint_triton, "_join"),
    (joint_tally_triton, "_tally_joint"),
    (tally_triton, "_tally"),
    (tally_triton, "_tally_rates"),
)


class Launched(Operations):
    """Launches of torch and of Triton; what the interpreter does in torch inside is not counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for module, name in OURS:
            patch.setattr(module, name, _Noted(module, name, self))


class _Noted:
    def __init__(self, module: ModuleType, name: str, seen: Launched) -> None:
        self._kernel, self._name, self._seen = getattr(module, name), name, seen

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            before = list(self._seen.names)
            self._kernel[grid](*args, **options)
            self._seen.names[:] = [*before, self._name]

        return launch


class Silent:
    """A network that proposes what it did before, and learns no more than what it is worth."""

    def __init__(self, drafter: Any, kernels: Kernels, view: View) -> None:
        self._real = drafter
        self._made = drafter.propose(view, drafter.depth)
        self._plausible = Plausible(PRIOR, DEVICE, kernels.tally)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def propose(self, view: View, levels: int) -> Proposal:
        return self._made

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        self._plausible.learn(view, draft, verdict, 4)


def there(view: View) -> View:
    law = view.law
    return View(
        slot_B=view.slot_B.to(DEVICE),
        tokens=Tokens(view.tokens_BW.to(DEVICE)),
        length_B=view.length_B.to(DEVICE),
        table_BS=view.table_BS.to(DEVICE),
        law=type(law)(*(_moved(getattr(law, name)) for name in law.__slots__)),
    )


def _moved(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def drafter_of(kind: str, kernels: Kernels, view: View) -> Drafter:
    ngram = NgramDrafter(DraftOptions(), capacity=4, device=DEVICE, kernels=kernels)
    if kind == "ngram":
        return ngram
    room = Room(4, 32, 16, VOCAB, DEVICE, kernels)
    plain = replace(room, kernels=TORCH)  # the head is of float64
    head = around_head(network("eagle3", True).to(DEVICE), DraftOptions(**DRAFT), plain, longest=16)
    alone: Any = Silent(head, kernels, view)
    return beside_matches(ngram, alone, room)


def launches(kind: str, kernels: Kernels, patch: pytest.MonkeyPatch) -> tuple[Counter[str], ...]:
    """Of propose, and of learn."""
    view = there(view_of(TEXTS))
    drafter = drafter_of(kind, kernels, view)
    with patch.context() as within, Launched(within) as proposing:
        made = drafter.propose(view, drafter.depths[-1])
    root_B = view.tokens_BW.gather(1, view.length_B[:, None])[:, 0]
    draft = select(made, root_B, 8, torch.full_like(root_B, 8))
    assert int(draft.live_B.min()) > 3
    path_BD = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    verdict = Verdict(path_BD, path_BD, path_BD[:, 0] + 1, path_BD[:, 0])
    features_BRF = torch.zeros(2, 8, 0, device=DEVICE)
    with patch.context() as within, Launched(within) as learning:
        drafter.learn(view, draft, verdict, features_BRF)
    return counted(proposing), counted(learning)


def counted(seen: Launched) -> Counter[str]:
    """What was launched; several views at once are none."""
    return Counter(name for name in seen.names if not name.startswith("unbind"))


def test_matches_take_two_launches_and_their_learning_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposing, learning = launches("ngram", TRITON, monkeypatch)
    assert proposing == {"_matches": 1, "_chains": 1}
    assert learning == {"_tally_rates": 1}


def test_beside_a_network_they_take_one_more_each(monkeypatch: pytest.MonkeyPatch) -> None:
    proposing, learning = launches("hybrid", TRITON, monkeypatch)
    assert proposing == {"_matches": 1, "_chains": 1, "_join": 1}
    assert learning == {"_tally_joint": 1, "_tally": 1}


@pytest.mark.parametrize(("kind", "most"), [("ngram", 80), ("hybrid", 250)])
def test_torchs_own_launches_are_seen(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposing, learning = launches(kind, TORCH, monkeypatch)
    assert sum(proposing.values()) > most and sum(learning.values()) > 10
