"""`furcate heads`: what each subcommand prints, where it writes, how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_files as files
import pytest
import torch
from cli_runs import Ran, furcate
from head_files import LLAMA, eagle3_shapes, randomly, write
from small_models import Small, save_hf
from tiny_vocab import tokens, write_folder

from furcate.heads import desk
from furcate.heads.store import is_native, read_native

WIDTH, VOCAB = 48, len(tokens())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURCATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """An EAGLE-3 of SpecForge for the model below."""
    shapes = {
        name: tuple(WIDTH * size // files.C if size in (32, 64, 96) else size for size in shape)
        for name, shape in eagle3_shapes("layers.0.").items()
    }
    shapes["layers.0.self_attn.q_proj.weight"] = (32, 2 * WIDTH)
    shapes["layers.0.self_attn.o_proj.weight"] = (WIDTH, 32)
    for name in ("gate_proj", "up_proj"):
        shapes[f"layers.0.mlp.{name}.weight"] = (files.INNER, WIDTH)
    shapes["layers.0.mlp.down_proj.weight"] = (WIDTH, files.INNER)
    mask_V = torch.zeros(VOCAB, dtype=torch.bool)
    mask_V[files.IDS] = True
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "draft_vocab_size": files.D,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        "max_position_embeddings": 128,
    }
    return write(tmp_path / "theirs", config, randomly(shapes) | files.maps() | {"t2d": mask_V})


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with enough layers for three features."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    write_folder(folder)
    save_hf(Small("deep", "llama", {"vocab_size": VOCAB, "num_hidden_layers": 8}), folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], deep_model: Path) -> Any:
    """`furcate heads WORDS --target DEEP`."""

    def call(*words: str) -> Ran:
        return furcate(capsys, "heads", *words, "--target", str(deep_model))

    return call


def test_without_heads_the_list_says_how_to_make_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(desk, "SHIPPED", tmp_path / "nothing")
    assert "furcate train" in furcate(capsys, "heads").out
    assert json.loads(furcate(capsys, "heads", "list", "--json").out) == {"heads": []}


def test_an_imported_head_is_listed_and_found_by_its_name(
    theirs: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    done = json.loads(run("import", str(theirs), "--json").out)
    assert done["imported_from"] == "eagle3-sglang" and is_native(Path(done["path"]))
    mine = [row for row in _listed(capsys) if row["where"] == "cache"]
    assert [(row["name"], row["kind"], row["fault"]) for row in mine] == [
        ("theirs", "eagle3", None)
    ]
    told = json.loads(run("info", mine[0]["target"] + "/theirs", "--json").out)
    assert told["format"] == "furcate" and told["spec"]["layers"] == [1, 4, 7]
    assert told["provenance"] == {"imported_from": "eagle3-sglang", "directory": "theirs"}
    assert "theirs" in furcate(capsys, "heads").out


def test_a_damaged_head_in_the_cache_does_not_break_the_list(
    theirs: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(json.loads(run("import", str(theirs), "--json").out)["path"])
    (path / "model.safetensors").write_bytes(b"")
    mine = [row for row in _listed(capsys) if row["where"] == "cache"]
    assert "manifest" in mine[0]["fault"]
    assert "damaged" in furcate(capsys, "heads").out


def test_an_export_prints_where_the_head_is_and_can_be_read(theirs: Path, run: Any) -> None:
    run("import", str(theirs), "ours")
    for to, named in (("sglang", "eagle3-sglang"), ("speculators", "speculators")):
        words = ("export", "ours", f"out-{to}", "--format", to, "--verifier", "some/one", "--json")
        done = json.loads(run(*words).out)
        assert (done["format"], done["file"]) == (named, "model.safetensors")
        assert done["tensors"]["lm_head.weight"] == [files.D, WIDTH]
        assert json.loads(run("info", f"out-{to}", "--json").out)["spec"]["layers"] == [1, 4, 7]
    named = files.config_of(Path("out-speculators"))["speculators_config"]["verifier"]
    assert named["name_or_path"] == "some/one"
    assert "eagle3-sglang: out-2" in run("export", "ours", "out-2", "-f", "sglang").out


def test_an_export_that_a_format_cannot_say_fails_and_writes_nothing(
    theirs: Path, run: Any, tmp_path: Path
) -> None:
    run("import", str(theirs), "ours")
    failed = run("export", "ours", "out", "--format", "original")
    assert failed.code == 2 and "layers: cannot be written for original" in failed.err
    assert "unknown format" in run("export", "ours", "out", "--format", "onnx").err
    assert not (tmp_path / "out").exists()


def test_lint_fails_where_there_is_an_error_and_lists_all(theirs: Path, run: Any) -> None:
    clean = run("lint", str(theirs))
    assert clean.code == 0 and "0 errors, 1 warnings" in clean.out
    files.change(files.edit(theirs, mystery=1), drop=("norm.weight",))
    told = run("lint", str(theirs))
    assert told.code == 1
    assert "error: mystery: " in told.out and "error: norm.weight: " in told.out
    found = json.loads(run("lint", str(theirs), "--json").out)
    assert (found["errors"], found["warnings"]) == (2, 1)


def test_an_import_never_overwrites(theirs: Path, run: Any) -> None:
    run("import", str(theirs), "ours")
    before = read_native(Path("ours")).provenance
    again = run("import", str(theirs), "ours")
    assert again.code == 2 and "is there already" in again.err
    assert read_native(Path("ours")).provenance == before


def test_info_without_json_is_a_table(theirs: Path, run: Any) -> None:
    shown = run("info", str(theirs))
    assert "spec.norm_before_residual" in shown.out and "eagle3-sglang" in shown.out


@pytest.mark.parametrize("words", [("info", "nowhere"), ("lint", "nowhere"), ("import", "nowhere")])
def test_an_unknown_head_is_a_mistake_of_the_caller(words: tuple[str, ...], run: Any) -> None:
    failed = run(*words)
    assert failed.code == 2 and "no such head or directory" in failed.err


def test_layers_must_be_numbers(theirs: Path, run: Any) -> None:
    failed = run("lint", str(theirs), "--layers", "2;3")
    assert failed.code == 2 and "--layers" in failed.err


def test_a_head_of_another_target_is_refused(tmp_path: Path, run: Any) -> None:
    failed = run("import", str(files.eagle3(tmp_path / "other")), "ours")
    assert failed.code == 2 and "hidden_size" in failed.err


def _listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    heads: list[dict[str, Any]] = json.loads(furcate(capsys, "heads", "--json").out)["heads"]
    return heads
