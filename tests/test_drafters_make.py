"""A drafter by its name: options it would ignore, and models that could not draft, are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import tiny_model_in
from tiny_engine import VOCAB, decoder, tokenizer
from tiny_heads import KINDS, network

from furcate.config import DraftOptions
from furcate.drafters.base import Drafter
from furcate.drafters.described import described
from furcate.drafters.hybrid import HybridDrafter
from furcate.drafters.make import Setting, make_drafter
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.errors import BadRequest, UserError
from furcate.heads.store import save_head
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.tree.calibration import Calibration, DepthScale

CPU = torch.device("cpu")


def made(which: str | Path, **options: Any) -> Drafter:
    shape = CacheShape(layers=1, kv_heads=1, head_dim=2, pages=8, page_size=16)
    return make_drafter(which, Setting(decoder(), tokenizer(), shape, 1, DraftOptions(**options)))


def test_a_name_makes_its_drafter(tmp_path: Path) -> None:
    assert isinstance(made("off"), OffDrafter)
    assert isinstance(made("ngram", prompt_lookup_max=4), NgramDrafter)
    assert isinstance(made(tiny_model_in(tmp_path)), RecurrentDrafter)


@pytest.mark.parametrize("options", [{"prompt_lookup_max": 4}, {"prompt_lookup_min": 1}], ids=str)
@pytest.mark.parametrize("which", ["off", "model"])
def test_a_lookup_option_equal_to_its_default_is_refused_where_nothing_looks_up(
    which: str, options: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(BadRequest) as caught:
        made(tiny_model_in(tmp_path) if which == "model" else which, **options)
    assert caught.value.field in options


@pytest.mark.parametrize("which", ["no-such-drafter", "/no/such.gguf", ""])
def test_a_drafter_that_is_not_there_is_refused_even_if_it_would_draft_nothing(which: str) -> None:
    with pytest.raises(UserError):
        made(which, num_draft_tokens=0)


def saved(folder: Path, kind: str = "eagle3", **changes: Any) -> Path:
    """A head of the tiny target as furcate keeps it."""
    frequent_N = torch.arange(VOCAB).flip(0)
    given = {"fingerprint": tokenizer().fingerprint(), "provenance": {}, **changes}
    save_head(folder / kind, network(kind), frequent_N=frequent_N, **given)
    return folder / kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_folder_makes_a_drafter_with_its_calibration(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, kind)
    fitted = Calibration(scales=(DepthScale(1.3, 0.8, 0.5),))
    (folder / "calibration.json").write_text(json.dumps(fitted.to_dict()))
    drafter = made(folder, draft_vocab=40, depth=2)
    assert isinstance(drafter, MedusaDrafter if kind == "medusa" else RecurrentDrafter)
    assert drafter.depth == 2
    assert drafter.layers == network(kind).layers
    assert drafter.plausible.calibration == fitted
    beside = made(f"ngram+{folder}", prompt_lookup_max=3)
    assert isinstance(beside, HybridDrafter)
    assert beside.network.depth < beside.depth == beside.ngram.depth
    assert isinstance(made(folder, num_draft_tokens=0), OffDrafter)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_a_head_scores_only_the_most_frequent_tokens_unless_asked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, kind, draft_vocab=40)
    assert words_of(made(folder)) == 40
    monkeypatch.setattr("furcate.drafters.make.CPU_WORDS", 16)
    assert words_of(made(folder)) == 16
    assert words_of(made(folder, draft_vocab=30)) == 30
    assert words_of(made(saved(tmp_path / "few", kind, draft_vocab=9))) == 9


def words_of(drafter: Drafter) -> int:
    details = described(drafter)
    assert isinstance(details["draft_vocab"], int)
    return details["draft_vocab"]


def test_matches_may_stand_beside_a_model(tmp_path: Path) -> None:
    assert isinstance(made(f"ngram+{tiny_model_in(tmp_path)}"), HybridDrafter)


@pytest.mark.parametrize("which", ["eagle3", "mtp", "medusa", "hybrid", "ngram+mtp"])
def test_a_head_that_does_not_come_with_furcate_is_refused_by_name(which: str) -> None:
    with pytest.raises(BadRequest, match="no head of this name comes with furcate"):
        made(which)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another vocabulary"):
        made(saved(tmp_path, fingerprint="other"))
    folder = saved(tmp_path, "mtp")
    wide = Decoder(replace(decoder().spec, hidden_size=64), torch.float64, CPU)
    shape = CacheShape(layers=1, kv_heads=1, head_dim=2, pages=8, page_size=16)
    with pytest.raises(UserError, match="hidden_size"):
        make_drafter(folder, Setting(wide, tokenizer(), shape, 1, DraftOptions()))


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("off", {"topk": 3}),
        ("off", {"tree": [[0]]}),
        ("ngram", {"draft_vocab": 9}),
        ("ngram", {"tree": [[0]]}),
        ("ngram", {"beta": 1.0}),
        ("model", {"draft_vocab": 9}),
        ("head", {"prompt_lookup_max": 4}),
    ],
    ids=str,
)
def test_an_option_that_a_drafter_would_ignore_is_refused(
    which: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if which == "model":
        which = str(tiny_model_in(tmp_path))
    if which == "head":
        which = str(saved(tmp_path))
    with pytest.raises(BadRequest, match="means nothing") as caught:
        made(which, **options)
    assert caught.value.field in options


def test_a_drafter_that_drafts_nothing_is_off(tmp_path: Path) -> None:
    assert isinstance(made("ngram", num_draft_tokens=0), OffDrafter)
    assert isinstance(made(tiny_model_in(tmp_path), num_draft_tokens=0), OffDrafter)
