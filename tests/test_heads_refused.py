"""Heads of others that are wrong, unsafe, lossy or not understood are refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_files as files
import pytest
import torch
from head_files import IDS, LAYERS, C, D, V, change, decoder, edit, target, target_spec
from tiny_vocab import write_folder

from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.heads.exchange import Finding, Target, import_head, lint_head, open_head, read_head
from furcate.heads.formats.pickles import open_pickle

Make = Callable[[Path], Path]


def _speculators(**changes: Any) -> Make:
    """One whose only proposal differs."""

    def make(folder: Path) -> Path:
        path = files.speculators(folder)
        asked = files.config_of(path)["speculators_config"]
        asked["proposal_methods"][0] |= changes
        return edit(path, speculators_config=asked)

    return make


def _ids(ids_D: torch.Tensor, **tensors: torch.Tensor) -> Make:
    """An EAGLE-3 whose draft ids are these."""
    return lambda f: change(files.eagle3(f), d2t=ids_D - torch.arange(len(ids_D)), **tensors)


TWICE = torch.cat((IDS[:-1], IDS[:1]))
OUTSIDE = torch.cat((IDS[:-1], torch.tensor([V])))
HOLLOW = torch.full((C,), float("nan"), dtype=torch.bfloat16)

WRONG: dict[str, tuple[Make, str, str]] = {
    # draft vocabularies
    "no-d2t": (
        lambda f: change(files.eagle3(f), drop=("d2t", "t2d")),
        "draft_vocab_size",
        "needs d2t",
    ),
    "d2t-twice": (_ids(TWICE), "d2t", "two draft ids to one token"),
    "d2t-outside": (_ids(OUTSIDE), "d2t", "leads out"),
    "d2t-negative": (_ids(IDS - 1), "d2t", "leads out"),
    "d2t-holds-ids": (_ids(IDS + 3 + torch.arange(D)), "d2t", "seems to hold target ids"),
    "d2t-holds-ids-inside": (_ids(IDS + torch.arange(D)), "t2d", "seems to hold target ids"),
    "d2t-short": (_ids(IDS[:-1]), "d2t", "must have shape"),
    "d2t-float": (lambda f: change(files.eagle3(f), d2t=torch.ones(D)), "d2t", "whole numbers"),
    "t2d-other": (_ids(IDS + 1), "t2d", "disagrees with d2t"),
    "t2d-short": (_ids(IDS, t2d=torch.ones(D, dtype=torch.bool)), "t2d", "booleans"),
    # tensors
    "missing": (lambda f: change(files.eagle3(f), drop=("norm.weight",)), "norm.weight", "missing"),
    "extra": (lambda f: change(files.eagle3(f), more__weight=HOLLOW), "more.weight", "not have"),
    "nan": (lambda f: change(files.eagle3(f), norm__weight=HOLLOW), "norm.weight", "not finite"),
    "misshapen": (
        lambda f: change(files.eagle3(f), fc__weight=torch.ones(C, 2 * C)),
        "fc.weight",
        "shape",
    ),
    "fc-of-four": (lambda f: edit(files.sglang(f), num_aux_hidden_states=4), "num_aux", "3 layers"),
    # one generation under another's name
    "eagle3-as-eagle1": (
        lambda f: edit(files.eagle3(f), without=("draft_vocab_size",)),
        "",
        "belongs to EAGLE-3",
    ),
    "eagle3-as-eagle1-sglang": (
        lambda f: edit(files.sglang(f), architectures=["LlamaForCausalLMEagle"]),
        "",
        "belongs to EAGLE-3",
    ),
    "eagle1-as-eagle3": (
        lambda f: edit(files.eagle1(f), architectures=["LlamaForCausalLMEagle3"]),
        "layers.0.",
        "missing",
    ),
    "eagle1-without-bias": (
        lambda f: edit(files.eagle1(f, bias=False), without=("bias",)),
        "fc.bias",
        "missing",
    ),
    # configs
    "unknown-key": (lambda f: edit(files.eagle3(f), mystery=1), "mystery", "might change"),
    "unknown-nested": (
        lambda f: edit(files.sglang(f), eagle_config={"mystery": 1}),
        "eagle_config.mystery",
        "not known",
    ),
    "contradiction": (
        lambda f: edit(
            files.sglang(f), norm_before_fc=True, eagle_config={"norm_before_fc": False}
        ),
        "eagle_config.norm_before_fc",
        "contradicts",
    ),
    "both-norms": (
        lambda f: edit(files.sglang(f), norm_before_fc=True, fc_norm=True),
        "fc_norm",
        "excludes",
    ),
    "flag-word": (lambda f: edit(files.sglang(f), norm_output="yes"), "norm_output", "true or"),
    "scaled": (lambda f: edit(files.sglang(f), logit_scale=0.5), "logit_scale", "not scaled"),
    "tied": (lambda f: edit(files.sglang(f), tie_word_embeddings=True), "tie_word", "stored"),
    "one-state": (
        lambda f: edit(files.sglang(f), eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state",
        "several layers",
    ),
    "parallel": (lambda f: edit(files.sglang(f), mask_token_id=3), "mask_token_id", "P-EAGLE"),
    "parallel-tensor": (
        lambda f: change(files.sglang(f), mask_hidden=torch.ones(1, 3 * C)),
        "mask_hidden",
        "P-EAGLE",
    ),
    "two-layers": (lambda f: edit(files.sglang(f), num_hidden_layers=2), "num_hidden", "differ"),
    "ids-unclear": (
        lambda f: edit(files.eagle3(f), eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        "eagle_aux_hidden_state_layer_ids",
        "--layers",
    ),
    "ids-outside": (
        lambda f: edit(
            files.sglang(f), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS]}
        ),
        "layers",
        "states 0 to",
    ),
    "ids-told-twice": (
        lambda f: edit(files.sglang(f), furcate_layers=[0, 3, 6]),
        "furcate_layers",
        "contradicts",
    ),
    "gelu": (lambda f: edit(files.eagle3(f), hidden_act="gelu"), "hidden_act", "silu"),
    "mixtral": (lambda f: edit(files.eagle3(f), model_type="mixtral"), "model_type", "not read"),
    "whole-model": (
        lambda f: change(files.eagle1(f), drop=("fc.weight", "fc.bias")),
        "",
        "no head that furcate knows",
    ),
    # speculators
    "lossy-k": (_speculators(verifier_accept_k=2), "verifier_accept_k", "change what the target"),
    "lossy-tolerance": (_speculators(accept_tolerance=0.1), "accept_tolerance", "change what"),
    "proposal": (_speculators(proposal_type="sample"), "proposal_type", "greedy"),
    "proposal-key": (_speculators(typical=True), "proposal_methods.typical", "might change"),
    "no-flag": (
        lambda f: edit(files.speculators(f), without=("norm_before_residual",)),
        "norm_before_residual",
        "disagree",
    ),
    "peagle": (
        lambda f: edit(files.speculators(f), speculators_model_type="peagle"),
        "speculators_model_type",
        "not read",
    ),
    "speculators-key": (lambda f: edit(files.speculators(f), mystery=1), "mystery", "might"),
    "gemma-layer": (
        lambda f: edit(files.speculators(f), transformer_layer_config={"model_type": "gemma"}),
        "transformer_layer_config.model_type",
        "unknown kind",
    ),
    # Medusa
    "medusa-key": (lambda f: edit(files.medusa(f), mystery=1), "mystery", "might change"),
    "medusa-layers": (lambda f: edit(files.medusa(f), medusa_num_layers=1), "0.1.weight", ""),
    "vllm-map": (
        lambda f: change(files.medusa_vllm(f), token_map=IDS[:3]),
        "token_map",
        "must hold 20",
    ),
    "vllm-no-map": (
        lambda f: change(files.medusa_vllm(f), drop=("token_map",)),
        "draft_vocab_size",
        "stand for",
    ),
    "vllm-twice": (lambda f: change(files.medusa_vllm(f), token_map=IDS * 0), "token_ids", ""),
    # MTP
    "experts": (
        lambda f: change(
            files.mtp(f),
            **{f"model__layers__{LAYERS}__mlp__experts__0__up_proj__weight": torch.ones(2, 2)},
        ),
        "experts",
        "mixture of experts",
    ),
    "mla": (
        lambda f: change(
            files.mtp(f),
            **{f"model__layers__{LAYERS}__self_attn__kv_a_proj_with_mqa__weight": torch.ones(2)},
        ),
        "kv_a_proj",
        "latent attention",
    ),
    "dspark": (
        lambda f: change(files.mtp(f, "qwen"), mtp__0__fc__weight=torch.ones(2)),
        "mtp.0.",
        "DSpark",
    ),
    "mtp-unknown": (
        lambda f: change(files.mtp(f, "qwen"), mtp__gate__weight=torch.ones(2)),
        "mtp.gate.weight",
        "not have",
    ),
    "mtp-two": (
        lambda f: edit(files.mtp(f), num_nextn_predict_layers=2),
        "num_nextn_predict_layers",
        "chained",
    ),
    "mtp-none": (
        lambda f: edit(files.eagle1(f), num_nextn_predict_layers=1, num_hidden_layers=LAYERS),
        "model.layers.8.",
        "there are none",
    ),
    "mtp-embedding": (
        lambda f: change(
            files.mtp(f),
            **{f"model__layers__{LAYERS}__embed_tokens__weight": torch.zeros(V, C).bfloat16()},
        ),
        "embed_tokens",
        "copy",
    ),
    "deepseek": (lambda f: edit(files.mtp(f), model_type="deepseek_v3"), "model_type", "not read"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_head_is_refused_by_name_and_told_by_lint(wrong: str, tmp_path: Path) -> None:
    make, field, words = WRONG[wrong]
    folder = make(tmp_path / "theirs")
    with pytest.raises((BadFile, Unsupported)) as caught:
        import_head(folder, tmp_path / "ours", target())
    assert field in str(caught.value.field) and words in str(caught.value)
    assert not (tmp_path / "ours").exists()
    told = [each for each in lint_head(folder, target()) if each.level == "error"]
    assert any(field in str(each.field) and words in each.text for each in told)


@pytest.mark.parametrize(
    "make", [files.eagle1, files.eagle3, files.medusa], ids=lambda m: m.__name__
)
def test_a_sound_head_has_no_errors(make: Make, tmp_path: Path) -> None:
    found = lint_head(make(tmp_path / "h"), target())
    assert {each.level for each in found} == {"warning"}


def test_lint_tells_everything_at_once(tmp_path: Path) -> None:
    theirs = edit(files.eagle3(tmp_path / "h"), mystery=1, riddle=2)
    change(theirs, drop=("norm.weight",), fc__weight=torch.ones(C, C), d2t=TWICE)
    fields = {each.field for each in lint_head(theirs, target()) if each.level == "error"}
    assert fields == {"mystery", "riddle", "norm.weight", "fc.weight", "d2t"}


def test_lint_warns_of_what_costs_acceptance(tmp_path: Path) -> None:
    theirs = edit(files.medusa(tmp_path / "m", heads=3, told=2))
    assert Finding("warning", None, "config.json says 2 heads, the file has 3") in lint_head(
        theirs, target()
    )
    short = edit(files.eagle3(tmp_path / "e"), max_position_embeddings=64)
    zeros = torch.zeros(C, 3 * C, dtype=torch.bfloat16)
    told = {each.field for each in lint_head(change(short, fc__weight=zeros), target())}
    assert told == {"max_position", "fc.weight", "fingerprint"}


def test_layers_may_be_told_where_the_files_leave_them_open(tmp_path: Path) -> None:
    theirs = edit(files.eagle3(tmp_path / "e"), eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    _, held = import_head(theirs, tmp_path / "ours", target(), (0, 2, 6))
    assert held.spec.layers == (0, 2, 6)
    with pytest.raises(BadRequest, match="layers"):
        open_head(files.eagle1(tmp_path / "1"), target().spec, (1,))
    with pytest.raises(BadRequest, match="layers"):
        open_head(tmp_path / "ours", target().spec, (1, 2, 3))


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    wide = Target(target_spec(hidden_size=64, num_heads=8), target().load)
    for make in (files.eagle1, files.eagle3, files.medusa):
        with pytest.raises(BadFile) as caught:
            import_head(make(tmp_path / make.__name__), tmp_path / "ours", wide)
        assert caught.value.field == "hidden_size"


def test_a_head_with_its_own_vocabulary_cannot_have_another(tmp_path: Path) -> None:
    theirs = files.eagle3(tmp_path / "e")
    assert read_head(theirs, decoder(), D).token_D is not None
    with pytest.raises(BadRequest, match="matrix of its own"):
        read_head(theirs, decoder(), D - 1)


def test_a_tokenizer_that_lies_beside_a_head_must_be_the_targets(tmp_path: Path) -> None:
    theirs = tmp_path / "e"
    write_folder(theirs)
    files.eagle3(theirs)
    other = Target(target().spec, target().load, fingerprint="another")
    with pytest.raises(BadFile, match="another vocabulary"):
        import_head(theirs, tmp_path / "ours", other)
    assert "fingerprint" in {each.field for each in lint_head(theirs, other)}


def test_a_directory_without_weights_or_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no such directory"):
        open_head(tmp_path / "none", target().spec)
    theirs = files.eagle3(tmp_path / "e")
    (theirs / "model.safetensors").unlink()
    with pytest.raises(BadFile, match="no weights"):
        open_head(theirs, target().spec)
    (theirs / "config.json").unlink()
    with pytest.raises(BadFile, match="no such file"):
        open_head(theirs, target().spec)


def test_shards_are_read_as_their_index_says(tmp_path: Path) -> None:
    theirs = files.eagle3(tmp_path / "e")
    whole = files.tensors_of(theirs)
    (theirs / "model.safetensors").rename(theirs / "a.safetensors")
    index = {"weight_map": dict.fromkeys(whole, "a.safetensors")}

    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_head(theirs, target().spec)[1].tensors["fc.weight"].shape == (C, 3 * C)
    index["weight_map"]["ghost"] = "a.safetensors"
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadFile, match="in the index only"):
        open_head(theirs, target().spec)


class Bomb:
    """What a hostile pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


def test_a_pickle_with_code_in_it_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = files.medusa(tmp_path / "m")
    torch.save({"0.0.linear.weight": Bomb()}, theirs / "medusa_lm_head.pt")
    with pytest.raises(BadFile, match="could run any code"):
        read_head(theirs, decoder())
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"a": 3}, {3: torch.ones(2)}, {"a": torch.ones(1).expand(10**9)}],
    ids=["list", "number", "name", "view"],
)
def test_a_pickle_of_anything_but_plain_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BadFile):
        open_pickle(tmp_path / "x.pt")


def test_a_pickle_that_is_damaged_old_or_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1000)}, path)
    with pytest.raises(BadFile, match="at most 100 bytes"):
        open_pickle(path, most_bytes=100)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises((BadFile, Unsupported)):
        open_pickle(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(Unsupported, match=r"torch 1\.6"):
        open_pickle(path)


def test_an_eagle_of_its_authors_may_lie_in_a_pickle(tmp_path: Path) -> None:
    theirs = files.eagle1(tmp_path / "e")
    torch.save(files.tensors_of(theirs), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    assert read_head(theirs, decoder()).spec.kind == "eagle1"
