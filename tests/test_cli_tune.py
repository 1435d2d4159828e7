"""`furcate tune calibrate`: fits a head to the target's own answers and keeps the fit beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Ran, furcate
from small_models import fill_randomly

from furcate.drafters.manner import calibration_of
from furcate.heads.spec import MedusaSpec
from furcate.heads.store import new_head, read_native, save_head
from furcate.train.prepare import Target

Capsys = pytest.CaptureFixture[str]
FEW = ["--conversations", "2", "--answer-tokens", "8", "--temperature", "0", "--temperature", "1"]


@pytest.fixture(scope="module")
def head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Medusa heads with random weights for the tiny model."""
    return _saved(tiny_model, tmp_path_factory.mktemp("heads") / "medusa", seed=1)


@pytest.fixture
def own(head: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(head, tmp_path / "own"))


def _saved(model: Path, folder: Path, seed: int) -> Path:
    target = Target.load(str(model), "float32", "cpu")
    spec = target.decoder.spec
    vocab, last = spec.vocab_size, (spec.num_layers,)
    made = new_head(MedusaSpec(spec.hidden_size, vocab, 2, 1, last, vocab), target.decoder, None)
    fill_randomly(dict(made.named_parameters()), seed)
    fingerprint = target.tokenizer.fingerprint()
    save_head(folder, made, frequent_N=None, provenance={}, fingerprint=fingerprint)
    return folder


@pytest.fixture
def run(capsys: Capsys, tiny_model: Path) -> Any:
    def call(*words: str) -> Ran:
        options = ("--target", str(tiny_model), "--device", "cpu", *FEW)
        return furcate(capsys, "tune", "calibrate", *words, *options)

    return call


def test_a_calibration_lands_beside_its_head_and_in_its_manifest(run: Any, own: Path) -> None:
    done = run("--drafter", str(own), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["path"] == str(own / "calibration.json") and len(found["depths"]) == 2
    assert read_native(own).calibration == calibration_of(own).to_dict()
    assert "calibration.json" in json.loads((own / "manifest.json").read_text())["files"]
    assert {row["temperature"] for row in found["agreement"]} == {0.0, 1.0}
    again = run("--drafter", str(own))
    assert again.code == 0 and "expected" in again.out


def test_prompts_of_a_file_are_answered(run: Any, own: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello world"}\n{"prompt": "hello"}\n')
    out = tmp_path / "fitted.json"
    done = run("--drafter", str(own), "--prompts", str(file), "--out", str(out), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["answers"] == 4
    assert out.exists() and not (own / "calibration.json").exists()


def test_a_calibration_of_another_head_is_refused_before_the_work(
    run: Any, own: Path, tiny_model: Path, tmp_path: Path
) -> None:
    other = _saved(tiny_model, tmp_path / "other", seed=2)
    done = run("--drafter", str(own), "--out", str(other / "calibration.json"))
    assert done.code == 2 and "holds another head" in done.err
    twin = Path(shutil.copytree(own, tmp_path / "twin"))
    assert run("--drafter", str(own), "--out", str(twin / "calibration.json")).code == 0
    assert read_native(twin).calibration is not None


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--drafter", "ngram"), "no such head"),
        (("--drafter", "{own}", "--out", "nowhere/there/file.json"), "cannot be written"),
        (("--drafter", "{own}", "--depth", "3"), "see 2 levels ahead"),
        (("--drafter", "{own}", "--prompts", "{dev}"), "left no answer"),
    ],
)
def test_what_cannot_be_is_refused(run: Any, own: Path, words: tuple[str, ...], what: str) -> None:
    dev = Path(__file__).parents[1] / "benchmarks" / "data" / "spec_bench_dev.jsonl"
    done = run(*(word.format(own=own, dev=dev) for word in words))
    assert done.code == 2 and what in done.err


def test_a_fit_depends_on_its_seed_alone(run: Any, own: Path) -> None:
    fits = []
    for seed in ("5", "5", "6"):
        assert run("--drafter", str(own), "--seed", seed).code == 0
        fits.append(calibration_of(own))  # the second one finds the first one there
    one, same, other = fits
    assert one == same != other
