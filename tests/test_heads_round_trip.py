"""Import, export and import again give the same head, bit for bit, for every pair of formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import head_files as files
import pytest
import torch
from head_files import IDS, LAYERS, C, D, V, config_of, decoder, target, tensors_of

from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.heads.eagle import Eagle3
from furcate.heads.exchange import export_head, import_head, open_head, read_head
from furcate.heads.formats.detect import detect, format_named
from furcate.heads.held import Held
from furcate.heads.spec import EagleSpec
from furcate.heads.store import read_native, write_native
from furcate.models.causal import causal_attend

Make = Callable[..., Path]

PAIRS: list[tuple[Make, dict[str, Any], str]] = [
    (files.eagle1, {}, "eagle1-original"),
    (files.eagle1, {"bias": False}, "eagle1-original"),
    (files.eagle3, {}, "eagle3-original"),
    (files.eagle3, {}, "eagle3-sglang"),
    (files.eagle3, {}, "speculators"),
    (files.sglang, {}, "eagle3-sglang"),
    (files.sglang, {}, "speculators"),
    (files.speculators, {}, "speculators"),
    (files.speculators, {"layers": 2}, "speculators"),
    (files.medusa, {}, "medusa-original"),
]


def same(one: Held, other: Held) -> bool:
    """Spec, ids and every weight, dtypes included."""
    if one.spec != other.spec or one.tensors.keys() != other.tensors.keys():
        return False
    ids = (one.token_D, other.token_D)
    pairs = [(one.tensors[n].read(), other.tensors[n].read()) for n in one.tensors]
    alike = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return alike and (ids == (None, None) or torch.equal(*ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "options", "to"), PAIRS, ids=[f"{m.__name__}-{o}-{to}" for m, o, to in PAIRS]
)
def test_import_export_import_is_bit_equal(
    make: Make, options: dict[str, Any], to: str, tmp_path: Path
) -> None:
    import_head(make(tmp_path / "theirs", **options), tmp_path / "first", target())
    export_head(tmp_path / "first", tmp_path / "out", format_named(to), target())
    assert detect(tmp_path / "out").name == to
    import_head(tmp_path / "out", tmp_path / "second", target())
    assert same(read_native(tmp_path / "first"), read_native(tmp_path / "second"))


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_goes_to_sglang_and_back_when_the_embeddings_are_the_targets(
    bias: bool, tmp_path: Path
) -> None:
    theirs = files.eagle1(tmp_path / "theirs", bias=bias)
    files.change(theirs, embed_tokens__weight=decoder().embedding.bfloat16())
    import_head(theirs, tmp_path / "first", target())
    export_head(tmp_path / "first", tmp_path / "out", format_named("eagle1-sglang"), target())
    assert "bias" not in config_of(tmp_path / "out")  # SGLang would give its attention biases
    assert tensors_of(tmp_path / "out")["fc.bias"].any() == bias
    import_head(tmp_path / "out", tmp_path / "second", target())
    assert same(read_native(tmp_path / "first"), read_native(tmp_path / "second"))


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    import_head(files.eagle3(tmp_path / "a"), tmp_path / "first", target())
    files.change(tmp_path / "a", norm__weight=torch.ones(C, dtype=torch.bfloat16))
    import_head(tmp_path / "a", tmp_path / "second", target())
    assert not same(read_native(tmp_path / "first"), read_native(tmp_path / "second"))


def test_an_exported_original_has_the_very_tensors_that_were_imported(tmp_path: Path) -> None:
    theirs = files.eagle3(tmp_path / "theirs")
    import_head(theirs, tmp_path / "first", target())
    export_head(tmp_path / "first", tmp_path / "out", format_named("eagle3-original"), target())
    before, after = tensors_of(theirs), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_format_is_recognised(tmp_path: Path) -> None:
    made = {
        "eagle1-original": files.eagle1(tmp_path / "1"),
        "eagle1-sglang": files.eagle1(tmp_path / "2", architectures=["LlamaForCausalLMEagle"]),
        "eagle3-original": files.eagle3(tmp_path / "3"),
        "eagle3-sglang": files.sglang(tmp_path / "4"),
        "speculators": files.speculators(tmp_path / "5"),
        "medusa-original": files.medusa(tmp_path / "6"),
        "medusa-vllm": files.medusa_vllm(tmp_path / "7"),
        "mtp-deepseek": files.mtp(tmp_path / "8"),
        "mtp-qwen": files.mtp(tmp_path / "9", "qwen"),
    }
    import_head(made["eagle3-original"], tmp_path / "10", target())
    made["furcate"] = tmp_path / "10"
    assert {name: detect(path).name for name, path in made.items()} == {n: n for n in made}


def test_layers_are_counted_as_each_engine_counts_them(tmp_path: Path) -> None:
    counted = {
        "eagle3": open_head(files.eagle3(tmp_path / "3"), target().spec)[1].spec.layers,
        "sglang": open_head(files.sglang(tmp_path / "4"), target().spec)[1].spec.layers,
        "speculators": open_head(files.speculators(tmp_path / "5"), target().spec)[1].spec.layers,
    }
    assert counted == {
        "eagle3": (2, LAYERS // 2, LAYERS - 3),
        "sglang": (1, 4, 7),  # outputs 0, 3 and 6
        "speculators": (1, 4, 7),
    }


def test_an_export_to_sglang_names_outputs_and_every_flag(tmp_path: Path) -> None:
    import_head(files.eagle3(tmp_path / "theirs"), tmp_path / "first", target())
    export_head(tmp_path / "first", tmp_path / "out", format_named("eagle3-sglang"), target())
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert {name: config[name] for name in flags} == dict.fromkeys(flags, False)
    assert (config["draft_vocab_size"], config["num_aux_hidden_states"]) == (D, 3)


def test_an_export_to_speculators_has_no_model_type_outside(tmp_path: Path) -> None:
    import_head(files.speculators(tmp_path / "theirs"), tmp_path / "first", target())
    export_head(tmp_path / "first", tmp_path / "out", format_named("speculators"), target())
    config = config_of(tmp_path / "out")
    assert "model_type" not in config
    assert (config["norm_before_residual"], config["norm_output"]) == (True, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert tensors_of(tmp_path / "out")["embed_tokens.weight"].shape == (V, C)


def test_shared_rows_are_written_out_with_their_ids(tmp_path: Path) -> None:
    import_head(files.eagle3(tmp_path / "theirs"), tmp_path / "first", target())
    shared = sharing(read_native(tmp_path / "first"))
    write_native(tmp_path / "shared", shared)
    export_head(tmp_path / "shared", tmp_path / "out", format_named("eagle3-sglang"), target(), 7)
    assert shared.frequent_N is not None
    ids = shared.frequent_N[:7].sort().values
    found = tensors_of(tmp_path / "out")
    output = decoder().head
    assert output is not None
    assert torch.equal(found["lm_head.weight"], output.weight[ids].bfloat16())
    assert torch.equal(found["d2t"] + torch.arange(7), ids)
    assert found["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_a_head_with_all_of_the_targets_rows_leaves_them_to_sglang(tmp_path: Path) -> None:
    import_head(files.eagle3(tmp_path / "theirs"), tmp_path / "first", target())
    write_native(tmp_path / "shared", sharing(read_native(tmp_path / "first")))
    export_head(tmp_path / "shared", tmp_path / "out", format_named("eagle3-sglang"), target(), V)
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["draft_vocab_size"] is None
    again = open_head(tmp_path / "out", target().spec)[1]
    assert not again.spec.own_output


def sharing(held: Held) -> Held:
    """The same head scoring with rows of the target's."""
    spec = replace(held.spec, own_output=False)
    kept = {name: each for name, each in held.tensors.items() if name != "lm_head.weight"}
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    return replace(held, spec=spec, tensors=kept, token_D=None, frequent_N=order)


def test_draft_ids_in_no_order_are_sorted_with_their_rows(tmp_path: Path) -> None:
    theirs = files.eagle3(tmp_path / "theirs")
    ordered = open_head(theirs, target().spec)[1]
    rows = tensors_of(theirs)["lm_head.weight"]
    files.change(theirs, lm_head__weight=rows.flip(0).contiguous(), **files.maps(IDS.flip(0)))
    mixed = open_head(theirs, target().spec)[1]
    assert same(ordered, mixed)
    assert mixed.remarks == ("d2t does not ascend: rows are put in order",)


def test_medusas_of_vllm_are_sorted_too(tmp_path: Path) -> None:
    theirs = files.medusa_vllm(tmp_path / "theirs")
    head = read_head(theirs, decoder())
    assert head.token_D is not None and head.token_D.tolist() == IDS.tolist()
    rows = tensors_of(theirs)["medusa_heads.lm_heads.1.weight"].float()
    assert torch.equal(head.outputs[1].weight, rows.flip(0))  # type: ignore[union-attr, index]


def test_medusa_heads_are_counted_in_the_file(tmp_path: Path) -> None:
    held = open_head(files.medusa(tmp_path / "m", heads=5, told=2), target().spec)[1]
    assert held.spec.num_heads == 5  # type: ignore[union-attr]
    assert held.remarks == ("config.json says 2 heads, the file has 5",)


@pytest.mark.parametrize("names", ["deepseek", "qwen"])
def test_mtp_is_read_from_inside_its_target(names: str, tmp_path: Path) -> None:
    head = read_head(files.mtp(tmp_path / "m", names), decoder())
    stored = tensors_of(tmp_path / "m")
    name = f"model.layers.{LAYERS}.eh_proj.weight" if names == "deepseek" else "mtp.fc.weight"
    assert torch.equal(head.project.weight, stored[name].float())  # type: ignore[union-attr]
    assert not head.spec.own_output


def test_an_imported_eagle3_computes_what_its_authors_wrote_down(tmp_path: Path) -> None:
    """A plain rewriting of one step at position 3, against the network."""
    head = read_head(files.eagle3(tmp_path / "e"), decoder())
    w = {name: tensor.float() for name, tensor in tensors_of(tmp_path / "e").items()}
    rng = torch.Generator().manual_seed(1)
    features_TF = torch.randn(1, 3 * C, generator=rng)
    tokens_T, at_T = torch.tensor([7]), torch.tensor([3])
    assert isinstance(head, Eagle3)
    out_TC = head(tokens_T, head.fuse(features_TF), at_T, causal_attend)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

    g = features_TF @ w["fc.weight"].T
    embedded = decoder().embedding[tokens_T]
    both = torch.cat(
        (norm(embedded, "midlayer.input_layernorm"), norm(g, "midlayer.hidden_norm")), 1
    )
    # a lone row attends to itself alone, so only its value counts
    value = (both @ w["midlayer.self_attn.v_proj.weight"].T).view(1, 2, 8).repeat_interleave(2, 1)
    x = g + value.reshape(1, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm")
    gate = torch.nn.functional.silu(y @ w["midlayer.mlp.gate_proj.weight"].T)
    inner = gate * (y @ w["midlayer.mlp.up_proj.weight"].T)
    x = x + inner @ w["midlayer.mlp.down_proj.weight"].T
    logits = norm(x, "norm") @ w["lm_head.weight"].T
    # 4e-7 is the rounding seen; a swapped pair of norms moves logits by more than 0.1
    assert torch.allclose(head.logits(out_TC), logits, atol=1e-5)


REFUSED: list[tuple[Make, dict[str, Any], str, str]] = [
    (files.speculators, {}, "eagle3-sglang", "norm_before_residual"),
    (files.speculators, {"layers": 2}, "eagle3-sglang", "more than one layer"),
    (files.speculators, {}, "eagle3-original", "norm_before_residual"),
    (files.sglang, {}, "eagle3-original", "layers"),
    (files.eagle1, {}, "eagle1-sglang", "own_embedding"),
]


@pytest.mark.parametrize(
    ("make", "options", "to", "field"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x)[:30])
)
def test_what_a_format_cannot_say_is_refused(
    make: Make, options: dict[str, Any], to: str, field: str, tmp_path: Path
) -> None:
    theirs = make(tmp_path / "theirs", **options)
    with pytest.raises(Unsupported) as caught:
        export_head(theirs, tmp_path / "out", format_named(to), target())
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("outputs", "to"),
    [
        ([0, 3, LAYERS - 1], "eagle3-sglang"),  # the final state
        ([-1, 3, 6], "eagle3-sglang"),  # the embeddings
        ([3, 3, 6], "speculators"),
    ],
)
def test_features_that_an_engine_does_not_hand_out_are_refused(
    outputs: list[int], to: str, tmp_path: Path
) -> None:
    theirs = files.sglang(tmp_path / "e")
    files.edit(theirs, eagle_config={"eagle_aux_hidden_state_layer_ids": outputs})
    with pytest.raises(Unsupported) as caught:
        export_head(theirs, tmp_path / "out", format_named(to), target())
    assert caught.value.field == "layers"


def test_a_format_of_another_kind_is_refused(tmp_path: Path) -> None:
    for make, to in ((files.medusa, "speculators"), (files.eagle1, "medusa-original")):
        theirs = make(tmp_path / to)
        with pytest.raises((BadFile, Unsupported)) as caught:
            export_head(theirs, tmp_path / "out", format_named(to), target())
        assert caught.value.field == "kind"


def test_mtp_is_read_and_not_written(tmp_path: Path) -> None:
    theirs = files.mtp(tmp_path / "m")
    with pytest.raises(Unsupported, match="read and not written"):
        export_head(theirs, tmp_path / "out", format_named("mtp-deepseek"), target())


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    theirs = files.eagle3(tmp_path / "theirs")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(BadRequest, match="holds something else"):
        export_head(theirs, tmp_path / "out", format_named("eagle3-sglang"), target())
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_embeddings_equal_to_the_targets_are_shared_on_import(tmp_path: Path) -> None:
    theirs = files.sglang(tmp_path / "theirs")
    files.change(theirs, embed_tokens__weight=decoder().embedding.bfloat16())
    _, held = import_head(theirs, tmp_path / "a", target())
    assert isinstance(held.spec, EagleSpec) and not held.spec.own_embedding
    files.change(theirs, embed_tokens__weight=decoder().embedding.bfloat16() + 1)
    _, held = import_head(theirs, tmp_path / "b", target())
    assert isinstance(held.spec, EagleSpec) and held.spec.own_embedding


def test_every_flag_is_explicit_after_import(tmp_path: Path) -> None:
    import_head(files.eagle3(tmp_path / "theirs"), tmp_path / "ours", target())
    spec = json.loads((tmp_path / "ours" / "config.json").read_text())["spec"]
    assert {name: spec[name] for name in ("norm_before_residual", "norm_output", "fc_bias")} == {
        "norm_before_residual": False,
        "norm_output": False,
        "fc_bias": False,
    }
    assert spec["layers"] == [2, 4, 5]
