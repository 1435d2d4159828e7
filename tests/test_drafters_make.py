"""A drafter by its name: options it would ignore, and models that could not draft, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runs import tiny_model_in
from tiny_engine import decoder, tokenizer

from furcate.config import DraftOptions
from furcate.drafters.base import Drafter
from furcate.drafters.make import Setting, make_drafter
from furcate.drafters.model import ModelDrafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.errors import BadRequest, UserError
from furcate.kv.cache import CacheShape


def made(which: str | Path, **options: Any) -> Drafter:
    shape = CacheShape(layers=1, kv_heads=1, head_dim=2, pages=8, page_size=16)
    return make_drafter(which, Setting(decoder(), tokenizer(), shape, 1, DraftOptions(**options)))


def test_a_name_makes_its_drafter(tmp_path: Path) -> None:
    assert isinstance(made("off"), OffDrafter)
    assert isinstance(made("ngram", prompt_lookup_max=4), NgramDrafter)
    assert isinstance(made(tiny_model_in(tmp_path)), ModelDrafter)


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


def test_a_drafter_that_drafts_nothing_is_off(tmp_path: Path) -> None:
    assert isinstance(made("ngram", num_draft_tokens=0), OffDrafter)
    assert isinstance(made(tiny_model_in(tmp_path), num_draft_tokens=0), OffDrafter)
