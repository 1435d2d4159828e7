"""What a user's word for a model stands for; nothing here ever goes online."""

from __future__ import annotations

from pathlib import Path

import pytest

from furcate.errors import BadFile, BadRequest
from furcate.models import zoo

ARTIFACT = zoo.SMOLLM2_135M.artifact
LONG_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"FURCATE_CACHE": str(tmp_path / "ours"), "HF_HUB_CACHE": str(tmp_path / "hub")}


def pretend_fetched(environ: dict[str, str]) -> Path:
    """A file of the right size (the cheap check looks at no more), without its bytes on disk."""
    path = zoo.known_models(environ)[0].path
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(ARTIFACT.file_bytes)
    return path


def pretend_snapshot(environ: dict[str, str], name: str = "org/model") -> Path:
    repo = Path(environ["HF_HUB_CACHE"]) / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    return snapshot


def test_a_folder_and_a_gguf_file_stand_for_themselves(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    assert zoo.resolve(tmp_path, environ) == tmp_path
    assert zoo.resolve(str(tmp_path / "m.GGUF"), environ) == tmp_path / "m.GGUF"


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "SmolLM2-135M", "SmolLM2-135M-Instruct", LONG_NAME]
)
def test_a_known_name_stands_for_its_fetched_file(environ: dict[str, str], name: str) -> None:
    path = pretend_fetched(environ)
    assert zoo.resolve(name, environ) == path
    assert [(m.record.name, m.fetched) for m in zoo.known_models(environ)] == [
        ("smollm2-135m", True)
    ]


def test_a_known_name_that_is_not_fetched_says_how(environ: dict[str, str]) -> None:
    with pytest.raises(BadFile) as err:
        zoo.resolve("smollm2-135m", environ)
    assert (err.value.field, err.value.value) == ("model", "smollm2-135m")
    assert err.value.hint == "run `furcate models fetch smollm2-135m`"
    assert not zoo.known_models(environ)[0].fetched


def test_a_fetched_file_of_the_wrong_size_is_not_used(environ: dict[str, str]) -> None:
    pretend_fetched(environ).write_bytes(b"GGUF")
    with pytest.raises(BadFile, match="wrong size"):
        zoo.resolve("smollm2-135m", environ)


def test_a_hub_name_stands_for_its_cached_snapshot(environ: dict[str, str]) -> None:
    snapshot = pretend_snapshot(environ)
    assert zoo.resolve("org/model", environ) == snapshot


def test_a_cached_snapshot_goes_before_the_fetched_file(environ: dict[str, str]) -> None:
    path = pretend_fetched(environ)
    snapshot = pretend_snapshot(environ, LONG_NAME)
    assert zoo.resolve(LONG_NAME, environ) == snapshot
    assert zoo.resolve("smollm2-135m", environ) == path


def test_a_hub_name_that_is_not_cached_is_never_fetched(environ: dict[str, str]) -> None:
    with pytest.raises(BadFile) as err:
        zoo.resolve("org/model", environ)
    assert err.value.value == "org/model"
    assert "hf download org/model" in str(err.value.hint)


def test_half_a_snapshot_is_not_used(environ: dict[str, str]) -> None:
    (pretend_snapshot(environ) / "config.json").unlink()
    with pytest.raises(BadFile, match="no whole snapshot"):
        zoo.resolve("org/model", environ)


@pytest.mark.parametrize("name", ["", "  ", "smolm2-135m", "gpt9", "a\0b", "x" * 5000])
def test_a_word_that_stands_for_nothing_is_refused(environ: dict[str, str], name: str) -> None:
    with pytest.raises(BadRequest) as err:
        zoo.resolve(name, environ)
    assert (err.value.field, err.value.value) == ("model", name)


def test_a_slip_of_the_pen_is_met_with_the_right_name(environ: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="did you mean 'smollm2-135m'"):
        zoo.resolve("smolm2-135m", environ)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~nobody/x", "gone.gguf"])
def test_a_path_that_is_not_there_is_a_bad_file(environ: dict[str, str], name: str) -> None:
    with pytest.raises(BadFile) as err:
        zoo.resolve(name, environ)
    assert (err.value.field, err.value.value) == ("model", name)


def test_a_path_that_is_no_model_is_a_bad_file(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(BadFile) as err:
            zoo.resolve(path, environ)
        assert err.value.value == str(path)


def test_caches_lie_where_the_environment_says() -> None:
    home = Path.home() / ".cache"
    assert zoo.cache_dir({}) == home / "furcate"
    assert zoo.cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/furcate")
    assert zoo.cache_dir({"XDG_CACHE_HOME": "relative"}) == home / "furcate"
    assert zoo.cache_dir({"XDG_CACHE_HOME": "/x", "FURCATE_CACHE": "/y"}) == Path("/y")
    assert zoo.hub_cache_dir({}) == home / "huggingface" / "hub"
    assert zoo.hub_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert zoo.hub_cache_dir({"HF_HOME": "/h"}) == Path("/h/hub")
    assert zoo.hub_cache_dir({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}) == Path("/c")
