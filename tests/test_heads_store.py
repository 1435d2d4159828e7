"""furcate's own format of heads: whole or not at all, and nothing wrong goes unnamed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import change, edit, target_spec, tensors_of
from safetensors.torch import save_file
from small_models import fill_randomly
from tiny_engine import VOCAB, decoder
from tiny_heads import KINDS, SMALL_VOCAB, network

from furcate.errors import BadFile, BadRequest, StorageFailed
from furcate.heads import directory as directory_module
from furcate.heads import store
from furcate.heads.build import build
from furcate.heads.held import Held
from furcate.heads.spec_json import spec_from_json, spec_to_json
from furcate.heads.store import (
    add_calibration,
    load_head,
    new_head,
    read_native,
    save_head,
    shipped,
    shipped_heads,
    write_native,
)
from furcate.heads.tensor_files import held as held_in_memory
from furcate.models.decoder import Decoder

FREQUENT = torch.tensor(SMALL_VOCAB)[torch.randperm(len(SMALL_VOCAB), generator=torch.Generator())]


def saved(folder: Path, kind: str = "eagle3", small: bool = True, **options: Any) -> Path:
    """A random head as furcate keeps it."""
    options = {"provenance": {"seed": 1}, **options}
    save_head(folder, network(kind, small), frequent_N=FREQUENT, **options)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [False, True], ids=["all-tokens", "few-tokens"])
def test_a_head_comes_back_as_it_was(kind: str, small: bool, tmp_path: Path) -> None:
    head = network(kind, small)
    again = load_head(saved(tmp_path / "h", kind, small), decoder())
    assert again.spec == head.spec
    before, after = head.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    if small:
        assert torch.equal(head.token_D, again.token_D)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_is_built_empty_and_trainable(kind: str) -> None:
    head = new_head(network(kind, True).spec, decoder(), torch.tensor([1, 2, 5]))
    assert head.spec.draft_vocab_size == 3
    own = list(head.parameters())
    assert own and all(p.requires_grad and p.isnan().all() for p in own)


def test_the_most_frequent_tokens_are_taken_in_ascending_order(tmp_path: Path) -> None:
    head = load_head(saved(tmp_path / "h"), decoder(), draft_vocab=5)
    assert head.token_D is not None
    assert head.token_D.tolist() == sorted(FREQUENT[:5].tolist())
    assert head.spec.draft_vocab_size == 5


@pytest.mark.parametrize("asked", [VOCAB, VOCAB + 1])
def test_a_draft_vocabulary_as_large_as_the_targets_is_all_of_it(
    asked: int, tmp_path: Path
) -> None:
    head = load_head(saved(tmp_path / "h"), decoder(), draft_vocab=asked)
    assert head.token_D is None and head.spec.draft_vocab_size == VOCAB


@pytest.mark.parametrize("asked", [0, -1, len(SMALL_VOCAB) + 1])
def test_a_draft_vocabulary_that_is_not_listed_is_refused(asked: int, tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as caught:
        load_head(saved(tmp_path / "h"), decoder(), draft_vocab=asked)
    assert caught.value.field == "draft_vocab"


def test_a_default_draft_vocabulary_is_written_beside_a_head_trained_on_all(tmp_path: Path) -> None:
    head = load_head(saved(tmp_path / "h", small=False, draft_vocab=9), decoder())
    assert head.spec.draft_vocab_size == 9


def test_ids_and_frequencies_that_disagree_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="frequent"):
        save_head(tmp_path / "h", network("mtp", True), frequent_N=torch.arange(200), provenance={})
    assert list(tmp_path.iterdir()) == []


def test_weights_keep_their_dtype_on_disk_and_get_the_targets_in_memory(tmp_path: Path) -> None:
    held = read_native(saved(tmp_path / "h"))
    halved = {n: torch.Tensor(k.read()).bfloat16() for n, k in held.tensors.items()}
    save_file({**halved, "frequent": FREQUENT.to(torch.uint16)}, tmp_path / "h/model.safetensors")
    (tmp_path / "h/manifest.json").unlink()
    assert tensors_of(tmp_path / "h")["fc.weight"].dtype == torch.bfloat16
    assert load_head(tmp_path / "h", decoder()).dtype == torch.float64


def test_token_ids_take_two_bytes_up_to_65536_tokens(tmp_path: Path) -> None:
    assert tensors_of(saved(tmp_path / "h"))["frequent"].dtype == torch.uint16


Harm = Callable[[Path], object]


def _spec(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    spec = {k: v for k, v in (config["spec"] | changes).items() if v is not ...}
    edit(folder, spec=spec)


def _block(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    _spec(folder, block=config["spec"]["block"] | changes)


NAN = torch.full((32,), float("nan"), dtype=torch.float64)
HARMS: dict[str, tuple[Harm, str]] = {
    "missing": (lambda f: change(f, drop=("fc.weight",)), "fc.weight"),
    "extra": (lambda f: change(f, bonus__weight=torch.ones(3)), "bonus.weight"),
    "misshapen": (lambda f: change(f, norm__weight=torch.ones(31)), "norm.weight"),
    "nan": (lambda f: change(f, norm__weight=NAN), "norm.weight"),
    "inf": (lambda f: change(f, norm__weight=NAN.nan_to_num(torch.inf)), "norm.weight"),
    "integers": (lambda f: change(f, norm__weight=torch.ones(32).int()), "norm.weight"),
    "no-ids": (lambda f: change(f, drop=("frequent",)), "draft_vocab_size"),
    "ids-float": (lambda f: change(f, frequent=FREQUENT.float()), "frequent"),
    "ids-outside": (lambda f: change(f, frequent=FREQUENT.int() + 9), "frequent"),
    "ids-negative": (lambda f: change(f, frequent=FREQUENT.int() - 9), "frequent"),
    "ids-twice": (lambda f: change(f, frequent=FREQUENT.int() * 0), "frequent"),
    "ids-square": (lambda f: change(f, frequent=FREQUENT.int()[:, None]), "frequent"),
    "no-config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no-json": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), ""),
    "cut": (lambda f: (f / "model.safetensors").write_bytes(b"12345678"), "model.safetensors"),
    "format": (lambda f: edit(f, format="other"), "format"),
    "version": (lambda f: edit(f, version=2), "version"),
    "key": (lambda f: edit(f, bonus=1), "bonus"),
    "no-spec": (lambda f: edit(f, without=("spec",)), "spec"),
    "spec-list": (lambda f: edit(f, spec=[]), "spec"),
    "kind": (lambda f: _spec(f, kind="eagle9"), "spec.kind"),
    "flag-missing": (lambda f: _spec(f, norm_output=...), "spec.norm_output"),
    "flag-unknown": (lambda f: _spec(f, norm_everything=True), "spec.norm_everything"),
    "flag-number": (lambda f: _spec(f, norm_output=1), "spec.norm_output"),
    "flags-both": (lambda f: _spec(f, norm_before_fc=True), "fc_norm"),
    "layers-words": (lambda f: _spec(f, layers=["a"]), "spec.layers"),
    "layers-none": (lambda f: _spec(f, layers=[]), "layers"),
    "layers-high": (lambda f: _spec(f, layers=[0, 1, 3]), "layers"),
    "layers-low": (lambda f: _spec(f, layers=[-1, 1, 2]), "layers"),
    "hidden": (lambda f: _block(f, hidden_size=64), "hidden_size"),
    "vocab": (lambda f: _block(f, vocab_size=VOCAB + 1), "vocab_size"),
    "sizes": (lambda f: _block(f, num_layers=10**9), "spec.block.num_layers"),
    "eps": (lambda f: _block(f, rms_norm_eps=-1.0), "rms_norm_eps"),
    "huge": (lambda f: _block(f, intermediate_size=2**40), ""),
    "draft-vocab": (lambda f: _spec(f, draft_vocab_size=VOCAB + 1), "draft_vocab_size"),
    "fingerprint": (lambda f: edit(f, fingerprint=3), "fingerprint"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_head_is_refused_by_name(harm: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    (folder / "manifest.json").unlink()
    spoil, field = HARMS[harm]
    spoil(folder)
    with pytest.raises(BadFile) as caught:
        load_head(folder, decoder())
    assert field in str(caught.value.field)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "provenance.json"])
def test_a_file_that_changed_is_noticed(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(BadFile) as caught:
        load_head(folder, decoder())
    assert str(folder) in str(caught.value.field)


def test_a_file_that_the_manifest_names_must_be_there(tmp_path: Path) -> None:
    (saved(tmp_path / "h") / "provenance.json").unlink()
    with pytest.raises(BadFile, match="absent"):
        load_head(tmp_path / "h", decoder())


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_target_is_refused(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "h", kind)
    for field, change_ in (
        ("hidden_size", {"hidden_size": 64, "num_heads": 8}),
        ("vocab_size", {"vocab_size": VOCAB + 1}),
        ("layers", {"num_layers": 1}),
    ):
        sizes = {"vocab_size": VOCAB, "num_layers": 2, **change_}
        other = Decoder(target_spec(**sizes), torch.float32, torch.device("meta"))
        with pytest.raises(BadFile) as caught:
            load_head(tmp_path / "h", other)
        assert caught.value.field == field


def test_a_head_for_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h", fingerprint="ours")
    load_head(folder, decoder(), fingerprint="ours")
    load_head(folder, decoder())
    with pytest.raises(BadFile, match="another vocabulary"):
        load_head(folder, decoder(), fingerprint="theirs")


def test_numbers_too_large_for_the_target_say_so(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h", small=False)
    held = read_native(folder)
    large = held_in_memory("norm.weight", torch.full((32,), 1e6).double())
    big = {**held.tensors, "norm.weight": large}
    spec = target_spec(vocab_size=VOCAB, num_layers=2)
    target = Decoder(spec, torch.float16, torch.device("cpu"))
    fill_randomly(dict(target.named_parameters()), 0)
    with pytest.raises(BadFile, match="too large") as caught:
        build(Held(held.spec, big), target)
    assert caught.value.field == "norm.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_specs_survive_json(kind: str) -> None:
    spec = network(kind, True).spec
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_an_older_head_is_replaced_and_strangers_stay(tmp_path: Path) -> None:
    saved(tmp_path / "h", "mtp")
    (tmp_path / "h" / "curves.png").write_text("mine")
    (tmp_path / "h" / "checkpoints").mkdir()
    saved(tmp_path / "h", "eagle3")
    assert load_head(tmp_path / "h", decoder()).spec.kind == "eagle3"
    assert (tmp_path / "h" / "curves.png").read_text() == "mine"
    assert (tmp_path / "h" / "checkpoints").is_dir()
    assert [entry.name for entry in tmp_path.iterdir()] == ["h"]


def test_a_place_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "thesis.txt").write_text("years of work")
    with pytest.raises(BadRequest, match="something else"):
        saved(tmp_path / "h")
    assert [entry.name for entry in (tmp_path / "h").iterdir()] == ["thesis.txt"]


def test_a_full_disk_keeps_the_last_good_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "h", "mtp")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_tensors", full)
        with pytest.raises(StorageFailed, match="no space left"):
            saved(tmp_path / "h", "eagle3")
    assert load_head(tmp_path / "h", decoder()).spec.kind == "mtp"
    assert [entry.name for entry in tmp_path.iterdir()] == ["h"]


def test_a_failed_swap_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "h", "mtp")
    renamed, real = [], directory_module.os.rename

    def second_fails(source: Path, place: Path) -> None:
        renamed.append(place)
        if len(renamed) == 2:
            raise OSError(errno.EIO, "no")
        real(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(directory_module.os, "rename", second_fails)
        with pytest.raises(StorageFailed):
            saved(tmp_path / "h", "eagle3")
    assert load_head(tmp_path / "h", decoder()).spec.kind == "mtp"


def test_files_are_as_readable_as_their_directory(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    mode = folder.stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {mode}


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    head = new_head(network("mtp").spec, decoder(), None)
    with pytest.raises(BadFile, match="not finite"):
        save_head(tmp_path / "h", head, frequent_N=None, provenance={})
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_stays_with_its_weights_and_no_others(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    (folder / "calibration.json").write_text('{"scales": []}')
    assert read_native(folder).calibration == {"scales": []}
    saved(folder, provenance={"seed": 2})
    assert read_native(folder).calibration == {"scales": []}
    assert read_native(folder).provenance == {"seed": 2}
    saved(folder, "mtp")
    assert read_native(folder).calibration is None


def test_a_calibration_is_carried_to_another_place(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    (folder / "calibration.json").write_text('{"scales": []}')
    write_native(tmp_path / "copy", read_native(folder))
    assert read_native(tmp_path / "copy").calibration == {"scales": []}


def test_a_shipped_head_is_found_by_name_and_vocabulary(tmp_path: Path) -> None:
    path = saved(tmp_path / "tiny" / "eagle3", fingerprint="ours")
    saved(tmp_path / "tiny" / "mtp", "mtp", fingerprint="ours")
    assert shipped("eagle3", "ours", tmp_path) == path
    assert shipped("eagle3", "theirs", tmp_path) is None
    assert shipped("medusa", "ours", tmp_path) is None
    assert [(h.target, h.name) for h in shipped_heads(tmp_path)] == [
        ("tiny", "eagle3"),
        ("tiny", "mtp"),
    ]


def test_every_shipped_head_is_whole() -> None:
    for head in shipped_heads():
        stored = read_native(head.path)
        assert stored.provenance and stored.fingerprint
        assert (head.path / "manifest.json").is_file()


def test_a_calibration_that_is_added_is_part_of_the_manifest(tmp_path: Path) -> None:
    folder = saved(tmp_path / "h")
    records: list[dict[str, list[int]]] = [{"scales": []}, {"scales": [1]}]
    for record in records:
        add_calibration(folder, record, folder)
        assert read_native(folder).calibration == record
        assert "calibration.json" in json.loads((folder / "manifest.json").read_text())["files"]
    (folder / "calibration.json").write_text("{}")
    with pytest.raises(BadFile, match=r"calibration\.json"):
        read_native(folder)


def test_a_calibration_goes_beside_the_same_weights_only(tmp_path: Path) -> None:
    folder, twin = saved(tmp_path / "h"), saved(tmp_path / "twin", provenance={"seed": 2})
    add_calibration(twin, {"scales": []}, folder)
    assert read_native(twin).calibration == {"scales": []}
    other = saved(tmp_path / "other", "mtp")
    with pytest.raises(BadRequest, match="another head"):
        add_calibration(other, {"scales": []}, folder)
    assert read_native(other).calibration is None
    saved(twin, "mtp")
    assert read_native(twin).calibration is None
