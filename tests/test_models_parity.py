"""The decoder against transformers, on every architecture and rope scaling that it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import MAX_POSITION, SMALL, Small, change_config, save_hf, small
from torch import Tensor

from furcate.models.causal import causal_attend
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder

CPU = torch.device("cpu")
ROWS = 100  # past the first training's 32 or 64 positions, where scalings differ
# float32, logits of size 5 to 20; worst of these models on 2 seeds: 2e-5
TOLERANCE = 1e-4


def tokens(vocab: int, seed: int = 5) -> Tensor:
    return torch.randint(0, vocab, (ROWS,), generator=torch.Generator().manual_seed(seed))


def our_logits(decoder: Decoder, tokens_T: Tensor, positions_T: Tensor | None = None) -> Tensor:
    positions_T = torch.arange(len(tokens_T)) if positions_T is None else positions_T
    with torch.no_grad():
        return decoder.logits(decoder(tokens_T, positions_T, causal_attend))


def their_logits(model: torch.nn.Module, tokens_T: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens_T[None]).logits[0]
    return found


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.name)
def test_logits_equal_those_of_transformers(entry: Small, tmp_path: Path) -> None:
    model = save_hf(entry, tmp_path)
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    tokens_T = tokens(decoder.spec.vocab_size)
    ours_TV, theirs_TV = our_logits(decoder, tokens_T), their_logits(model, tokens_T)
    assert theirs_TV.std() > 0.5
    assert (ours_TV - theirs_TV).abs().max() < TOLERANCE


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.name)
def test_the_parity_check_can_fail(entry: Small, tmp_path: Path) -> None:
    model = save_hf(entry, tmp_path)
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    tokens_T = tokens(decoder.spec.vocab_size)
    positions_T = torch.arange(ROWS)
    positions_T[-1] += 1  # one row a place too far
    off_TV = our_logits(decoder, tokens_T, positions_T) - their_logits(model, tokens_T)
    assert off_TV[:-1].abs().max() < TOLERANCE
    assert off_TV[-1].abs().max() > 10 * TOLERANCE


def test_a_config_in_the_style_of_transformers_4_gives_the_same_network(tmp_path: Path) -> None:
    for name in ("llama_llama3", "llama_yarn", "llama_linear", "qwen2"):
        folder = tmp_path / name
        save_hf(small(name), folder)
        now = load_decoder(folder, torch.float32, CPU)
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        theta = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        scaling = None if rope["type"] == "default" else rope
        change_config(folder, without=("rope_parameters",), rope_theta=theta, rope_scaling=scaling)
        then = load_decoder(folder, torch.float32, CPU)
        assert then.spec == now.spec


def test_keys_that_a_config_leaves_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    optional = ("head_dim", "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias")
    for name in ("llama", "mistral", "smollm3"):
        folder = tmp_path / name
        save_hf(small(name), folder)
        change_config(folder, without=optional)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        decoder = load_decoder(folder, torch.float32, CPU)
        tokens_T = tokens(97)
        off_TV = our_logits(decoder, tokens_T) - their_logits(model, tokens_T)
        assert off_TV.abs().max() < TOLERANCE


def test_float64_and_float32_networks_agree(tmp_path: Path) -> None:
    save_hf(small("llama_llama3"), tmp_path)
    exact = load_decoder(tmp_path, torch.float64, CPU)
    rounded = load_decoder(tmp_path, torch.float32, CPU)
    tokens_T = tokens(97)
    off_TV = our_logits(exact, tokens_T) - our_logits(rounded, tokens_T).double()
    assert our_logits(exact, tokens_T).dtype == torch.float64
    assert 0 < off_TV.abs().max() < TOLERANCE


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    save_hf(small("qwen3"), tmp_path)
    coarse = load_decoder(tmp_path, torch.bfloat16, CPU)
    fine = load_decoder(tmp_path, torch.float32, CPU)
    assert coarse.dtype == torch.bfloat16
    tokens_T = tokens(97)
    fine_TV = our_logits(fine, tokens_T)
    off_TV = our_logits(coarse, tokens_T).float() - fine_TV
    assert off_TV.std() < 0.05 * fine_TV.std()  # bfloat16 has 8 bits; measured 0.02


def test_a_tree_of_rows_equals_its_paths_one_by_one(tmp_path: Path) -> None:
    """The caller decides who sees whom: siblings at one position do not disturb each other."""
    save_hf(small("qwen2"), tmp_path)
    decoder = load_decoder(tmp_path, torch.float64, CPU)
    trunk = tokens(97)[:6]
    row = torch.tensor([11, 12])

    def forked(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        left = causal_attend(layer, q[:7], k[:7], v[:7])
        keep = [0, 1, 2, 3, 4, 5, 7]
        right = causal_attend(layer, q[keep], k[keep], v[keep])
        return torch.cat((left, right[-1:]))

    positions_T = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    with torch.no_grad():
        tree_TC = decoder(torch.cat((trunk, row)), positions_T, forked)
        for branch in (0, 1):
            path_T = torch.cat((trunk, row[branch : branch + 1]))
            path_TC = decoder(path_T, torch.arange(7), causal_attend)
            assert (tree_TC[6 + branch] - path_TC[-1]).abs().max() < 1e-10


def test_positions_are_those_given_not_the_row_numbers(tmp_path: Path) -> None:
    save_hf(small("llama"), tmp_path)
    decoder = load_decoder(tmp_path, torch.float64, CPU)
    tokens_T = tokens(97)[:20]
    shifted = our_logits(decoder, tokens_T, torch.arange(20) + MAX_POSITION // 2)
    # rotary attention sees only distances
    assert (shifted - our_logits(decoder, tokens_T)).abs().max() < 1e-9
