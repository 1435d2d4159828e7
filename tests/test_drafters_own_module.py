"""An MTP module inside its target: the target loads without it, and the module drafts for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import tiny_model_in
from safetensors.torch import load_file, save_file
from small_models import change_config, fill_randomly
from torch import Tensor

from furcate.config import SamplingParams
from furcate.drafters.described import kind_of
from furcate.drafters.hybrid import HybridDrafter
from furcate.engine.engine import Engine
from furcate.engine.naive import naive
from furcate.errors import BadFile, BadRequest, UserError
from furcate.models.load import load_decoder
from furcate.models.weights import places

CPU = torch.device("cpu")
NAMES = ("deepseek", "qwen")
LAYERS = 2
DEEPSEEK = f"model.layers.{LAYERS}."
AROUND = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_in(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def homes(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same target with a random module beside it, under either engine's names."""
    root = tmp_path_factory.mktemp("homes")
    return {names: with_module(plain, root / names, names) for names in NAMES}


def module(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random tensors of a module by DeepSeek's names, without their prefix."""
    inner = {k.removeprefix("model.layers.1."): v for k, v in tensors.items() if "layers.1." in k}
    hidden = tensors["model.norm.weight"].shape[0]
    around = {f"{name}.weight": torch.empty(hidden) for name in AROUND}
    around["eh_proj.weight"] = torch.empty(hidden, 2 * hidden)
    found = around | {name: torch.empty_like(tensor) for name, tensor in inner.items()}
    fill_randomly(found, seed=8)
    return found


def with_module(plain: Path, folder: Path, names: str) -> Path:
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    found = module(tensors)
    if names == "deepseek":
        tensors |= {DEEPSEEK + name: tensor for name, tensor in found.items()}
        tensors[f"{DEEPSEEK}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{DEEPSEEK}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        change_config(folder, num_nextn_predict_layers=1)
    else:
        for name, tensor in found.items():
            stem = name.removesuffix(".weight")
            new = f"{AROUND[stem]}.weight" if stem in AROUND else f"layers.0.{name}"
            tensors[f"mtp.{new}"] = tensor
        change_config(folder, mtp_num_hidden_layers=1)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("names", NAMES)
def test_the_target_is_the_same_with_its_module_beside_it(
    names: str, plain: Path, homes: dict[str, Path]
) -> None:
    alone, beside = (places(load_decoder(f, torch.float32, CPU)) for f in (plain, homes[names]))
    assert alone.keys() == beside.keys()
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_a_module_in_a_type_that_no_target_may_have_is_left_aside_too(
    homes: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(homes["qwen"], tmp_path / "copy"))
    change_weights(folder, lambda t: t.update({"mtp.fc.weight": torch.ones(2, dtype=torch.int8)}))
    assert load_decoder(folder, torch.float32, CPU).spec.num_layers == LAYERS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_nextn_predict_layers": 0}, f"{DEEPSEEK}eh_proj.weight"),
        ({"num_nextn_predict_layers": None}, f"{DEEPSEEK}eh_proj.weight"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers"),
    ],
    ids=str,
)
def test_only_a_module_that_the_config_speaks_of_is_left_aside(
    changes: dict[str, Any], field: str, homes: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(homes["deepseek"], tmp_path / "copy"))
    change_config(folder, **changes)
    with pytest.raises(BadFile) as caught:
        load_decoder(folder, torch.float32, CPU)
    assert str(caught.value.field).startswith(field[:15])


def test_layers_past_the_module_are_not_left_aside(homes: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(homes["deepseek"], tmp_path / "copy"))
    change_weights(folder, lambda t: t.update({"model.layers.3.x.weight": torch.ones(2)}))
    with pytest.raises(BadFile, match=r"model\.layers\.3\.x\.weight"):
        load_decoder(folder, torch.float32, CPU)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def asked() -> Iterator[tuple[list[int], SamplingParams]]:
    for seed, temperature in ((1, 0.0), (2, 0.8), (3, 1.0)):
        rng = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, 200, (9 * seed,), generator=rng).tolist()
        law = {"temperature": temperature, "seed": seed, "max_tokens": 24, "ignore_eos": True}
        yield prompt, SamplingParams(**law)


@pytest.mark.parametrize("drafter", ["mtp", "ngram+mtp", "HOME", "ngram+HOME"])
@pytest.mark.parametrize("names", NAMES)
def test_the_module_drafts_and_changes_no_token(
    names: str, drafter: str, homes: dict[str, Path]
) -> None:
    home = homes[names]
    word = drafter.replace("HOME", str(home))
    draft = {"num_draft_tokens": 12, "depth": 3, "topk": 3, "adaptive": False}
    with Engine.load(home, word, draft=draft, dtype="float64", device="cpu", max_batch=3) as engine:
        outputs = [engine.collect(engine.submit(*ask)) for ask in asked()]
        used = engine.built.round.drafter
        inner: Any = used.network if isinstance(used, HybridDrafter) else used
        assert isinstance(used, HybridDrafter) == drafter.startswith("ngram+")
        assert kind_of(inner) == "mtp"
        assert inner.network.layers == (LAYERS,)
    judge = load_decoder(home, torch.float64, CPU)
    want = [naive(judge, prompt, params, ()) for prompt, params in asked()]
    assert [list(output.token_ids) for output in outputs] == want
    assert sum(output.stats.drafted for output in outputs) > 0


def test_a_target_without_a_module_has_none_to_draft_with(plain: Path) -> None:
    with pytest.raises(BadRequest, match="no head of this name comes with furcate"):
        Engine.load(plain, "mtp", device="cpu")


def test_a_module_that_was_not_uploaded_is_missed(plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "copy"))
    change_config(folder, num_nextn_predict_layers=1)
    assert load_decoder(folder, torch.float32, CPU).spec.num_layers == LAYERS
    with pytest.raises(UserError, match="promised by the config"):
        Engine.load(folder, "mtp", device="cpu")
    change_config(folder, num_nextn_predict_layers=0)
    with Engine.load(folder, folder, device="cpu") as engine:  # itself as a small model
        assert kind_of(engine.built.round.drafter) == "model"
