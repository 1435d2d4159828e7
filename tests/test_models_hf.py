"""Hugging Face directories: sharded or whole, damaged or strange, each refusal by name."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import change_config, save_hf, small, tiny_decoder
from torch import Tensor

from furcate.errors import BadFile, BadRequest, Unsupported, UserError
from furcate.models.hf_config import spec_from_hf_config
from furcate.models.load import load_decoder
from furcate.models.weights import Stored, build, places

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_hf(small("llama"), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_decoder(folder, dtype, CPU)


def refused(folder: Path, kind: type[UserError] = BadFile) -> UserError:
    with pytest.raises(kind) as caught:
        load(folder)
    return caught.value


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> Path:
    """Split the weights over two files, as large checkpoints are; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    for file, half in zip(files, halves, strict=True):
        save_file(half, folder / file)
    weight_map = {name: files[part] for part in (0, 1) for name in halves[part]}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


# -- what loads --------------------------------------------------------------------------------


def test_sharded_and_whole_checkpoints_are_equal(folder: Path) -> None:
    whole = places(load(folder))
    shard(folder)
    parts = places(load(folder))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_loaded_weights_need_no_gradient(saved: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load(saved).parameters())


def test_only_one_tensor_is_in_memory_beside_the_decoder() -> None:
    model = tiny_decoder()
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def read(view: Tensor) -> Tensor:
        nonlocal most
        copy = view.clone()
        alive.add(copy)
        most = max(most, len(alive))
        return copy

    stored = {
        name: Stored(name, tuple(view.shape), partial(read, view))
        for name, view in places(model).items()
    }
    again = places(build(model.spec, stored, torch.float32, CPU))
    assert all(torch.equal(again[name], view) for name, view in places(model).items())
    assert most == 1


def test_frequencies_that_old_checkpoints_store_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(folder)


def test_a_head_stored_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    save_hf(small("llama_tied"), tmp_path)
    same = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": same}))
    load(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(1.5))
    assert refused(tmp_path).field == "lm_head.weight"


# -- files -------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").field == str(tmp_path / "nowhere")


def test_a_directory_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refused(folder).field == str(folder / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refused(folder).field == str(folder / "config.json")


def test_a_directory_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refused(folder).what


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unopened(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    err = refused(folder, Unsupported)
    assert err.field == str(folder / name)
    assert "save" in str(err.hint)
    assert refused(folder / name, Unsupported).field == str(folder / name)


def test_a_single_safetensors_file_is_answered_with_its_directory(folder: Path) -> None:
    assert "directory" in str(refused(folder / "model.safetensors").hint)


@pytest.mark.parametrize("keep", [0, 4, 9, 200, -1])
def test_a_truncated_checkpoint_is_refused(keep: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(folder).field == str(file)


def test_an_index_naming_an_absent_file_is_refused(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(folder).field == str(folder / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "nonsense"])
def test_an_index_without_a_map_is_refused(text: str, folder: Path) -> None:
    index = shard(folder)
    index.write_text(text)
    assert refused(folder).field == str(index)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3, ""])
def test_an_index_cannot_point_elsewhere(file: object, folder: Path) -> None:
    index = shard(folder)
    entries = json.loads(index.read_text())
    entries["weight_map"][NAME] = file
    index.write_text(json.dumps(entries))
    assert refused(folder).field == f"weight_map.{NAME}"


def test_an_index_that_disagrees_with_its_files_is_refused(folder: Path) -> None:
    index = shard(folder)
    entries = json.loads(index.read_text())
    entries["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(entries))
    assert refused(folder).field == "model.ghost.weight"


# -- tensors -----------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop(NAME))
    assert refused(folder).field == NAME


def test_an_extra_tensor_is_named(folder: Path) -> None:
    extra = "model.layers.0.self_attn.q_proj.bias"
    change_weights(folder, lambda tensors: tensors.update({extra: torch.ones(48)}))
    assert refused(folder).field == extra


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({NAME: torch.ones(48, 80)}))
    err = refused(folder)
    assert err.field == NAME
    assert err.value == (48, 80)
    assert "(80, 48)" in err.what


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(number: float, folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors[NAME][7].fill_(number))
    err = refused(folder)
    assert err.field == NAME
    assert "not finite" in err.what


def test_numbers_too_large_for_float16_are_told_from_damage(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors[NAME][7, 7].fill_(1e5))
    load(folder)
    with pytest.raises(BadFile, match="too large for torch") as caught:
        load(folder, torch.float16)
    assert "bfloat16" in str(caught.value.hint)


def test_whole_number_weights_are_refused(folder: Path) -> None:
    eight_bit = torch.ones(80, 48, dtype=torch.int8)
    change_weights(folder, lambda tensors: tensors.update({NAME: eight_bit}))
    assert refused(folder, Unsupported).field == NAME


def test_a_dtype_of_whole_numbers_is_refused(saved: Path) -> None:
    with pytest.raises(BadRequest, match="float32"):
        load(saved, torch.int64)


def test_files_stay_readable_after_loading(folder: Path) -> None:
    load(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert opened.get_slice(NAME).get_shape() == [80, 48]


# -- configs -----------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def config(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": kind, **changes}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (config("gemma"), "model_type"),
        (config(None), "model_type"),
        (config(architectures=["LlamaForSequenceClassification"]), "architectures"),
        (config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (config(logit_scale=0.5), "logit_scale"),
        (config(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (config(auto_map={"AutoModel": "code.Model"}), "auto_map"),
        (config("qwen2", attention_bias=False), "attention_bias"),
        (config("llama", no_rope_layers=[1, 1, 1, 0]), "no_rope_layers"),
        (config(hidden_act="gelu"), "hidden_act"),
        (config(rope_interleaved=True), "rope_interleaved"),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (config(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type"),
        (config(rope_scaling={"rope_type": "longrope"}), "rope_scaling.rope_type"),
        (config(rope_scaling={"type": "linear", "factor": 2.0, "x": 1}), "rope_scaling.x"),
        (config(rope_parameters={"full_attention": {}}), "rope_scaling.full_attention"),
        (config("mistral"), "sliding_window"),  # absent means 4096 in transformers
        (config("mistral", sliding_window=4096), "sliding_window"),
        (config(sliding_window=4096), "sliding_window"),
        (config("qwen2", use_sliding_window=True, max_window_layers=2), "sliding_window"),
        (config("qwen3", use_sliding_window=True, sliding_window=512), "sliding_window"),
        (config("qwen2", layer_types=["sliding_attention"] * 4), "layer_types"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_do_not_compute_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as caught:
        spec_from_hf_config(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (config(hidden_size=None), "hidden_size"),
        (config(hidden_size="48"), "hidden_size"),
        (config(hidden_size=50), "num_attention_heads"),
        (config(num_attention_heads=0), "num_attention_heads"),
        (config(num_attention_heads=True), "num_attention_heads"),
        (config(num_key_value_heads=4), "num_kv_heads"),
        (config(num_hidden_layers=10**9), "num_hidden_layers"),
        (config(num_hidden_layers=0), "num_hidden_layers"),
        (config(head_dim=7), "head_dim"),
        (config(vocab_size=-1), "vocab_size"),
        (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
        (config(rms_norm_eps="small"), "rms_norm_eps"),
        (config(tie_word_embeddings="yes"), "tie_word_embeddings"),
        (config(rope_theta=0), "rope.theta"),
        (config(rope_theta="big"), "rope_scaling.rope_theta"),
        (config(rope_theta=5.0, rope_parameters={"rope_theta": 6.0}), "rope_theta"),
        (config(rope_scaling=[2.0]), "rope_scaling"),
        (config(rope_scaling={"type": "linear"}), "rope_scaling.factor"),
        (config(rope_scaling={"type": "linear", "factor": -2.0}), "rope.factor"),
        (
            config(
                rope_scaling={"type": "linear", "factor": 2.0},
                rope_parameters={"rope_type": "linear", "factor": 3.0},
            ),
            "rope_scaling",
        ),
        (
            config(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            ),
            "rope.low_freq_factor",
        ),
        (config("smollm3", no_rope_layers=[1, 1]), "no_rope_layers"),
        (config("smollm3", no_rope_layers=[1, 1, 2, 0]), "no_rope_layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_be_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(BadFile) as caught:
        spec_from_hf_config(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "given",
    [
        config("mistral", sliding_window=None),
        config("mistral", sliding_window=8192),
        config("qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=2),
        config("qwen2", use_sliding_window=True, max_window_layers=4),
        config("qwen2", layer_types=["full_attention"] * 4),
        config("smollm3", sliding_window=None, use_sliding_window=False),
        config(torch_dtype="bfloat16", transformers_version="4.40.0", use_cache=False),
        config(attention_dropout=0.1, initializer_range=0.02, pretraining_tp=2),
        config(architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=[2, 3]),
        config(rope_interleaved=False, is_llama_config=True, rope_scaling=None),
        config(partial_rotary_factor=1.0, quantization_config=None),
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_accepted(given: dict[str, Any]) -> None:
    assert spec_from_hf_config(given).num_layers == 4


def test_nope_layers_follow_the_interval_or_the_list() -> None:
    assert spec_from_hf_config(config("smollm3")).rope_layers == (True, True, True, False)
    listed = config("smollm3", no_rope_layers=[0, 1, 0, 1])
    assert spec_from_hf_config(listed).rope_layers == (False, True, False, True)


def test_an_unknown_key_in_a_saved_checkpoint_stops_the_load(folder: Path) -> None:
    change_config(folder, attention_multiplier=0.1)
    err = refused(folder, Unsupported)
    assert err.field == "attention_multiplier"
    assert err.value == 0.1
