"""GGUF files: same weights, same network; every quantisation; everything else refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as KIND
from small_models import GgufRecipe, Small, gguf_name, quantised, save_hf, small, write_gguf

from furcate.errors import BadFile, Unsupported
from furcate.models.gguf import QUANTISATIONS
from furcate.models.load import load_decoder
from furcate.models.rope import frequencies
from furcate.models.weights import places

CPU = torch.device("cpu")


def both(tmp_path: Path, entry: Small, recipe: GgufRecipe) -> tuple[Path, Path]:
    """One random model as a directory of safetensors and as a GGUF file."""
    folder, file = tmp_path / "hf", tmp_path / "model.gguf"
    model = save_hf(entry, folder)
    write_gguf(file, model.config, weights_of(model), recipe)
    return folder, file


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def llama(tmp_path: Path, **recipe: Any) -> Path:
    return both(tmp_path, small("llama"), GgufRecipe(**recipe))[1]


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_attention_bias", "llama_mlp_bias"])
def test_a_llama_gguf_equals_its_safetensors(name: str, tmp_path: Path) -> None:
    assert_same(*both(tmp_path, small(name), GgufRecipe()))


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied"])
def test_a_qwen2_gguf_equals_its_safetensors(name: str, tmp_path: Path) -> None:
    assert_same(*both(tmp_path, small(name), GgufRecipe("qwen2")))


def test_the_comparison_with_safetensors_can_fail(tmp_path: Path) -> None:
    # written with the permutation of llama, read without it
    folder, file = both(tmp_path, small("llama"), GgufRecipe())
    raw = file.read_bytes().replace(b"llama", b"qwen2")
    file.write_bytes(raw)
    with pytest.raises(AssertionError):
        assert_same(folder, file)


def assert_same(folder: Path, file: Path) -> None:
    one = load_decoder(folder, torch.float32, CPU)
    two = load_decoder(file, torch.float32, CPU)
    # GGUF keeps eps as float32
    assert two.spec.rms_norm_eps == pytest.approx(one.spec.rms_norm_eps, rel=1e-6)
    assert two.spec.tied_embeddings == one.spec.tied_embeddings
    other = places(two)
    assert other.keys() == places(one).keys()
    for name, weight in places(one).items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("kind", [KIND.F16, KIND.BF16], ids=["F16", "BF16"])
def test_sixteen_bit_weights_are_rounded_once(kind: KIND, tmp_path: Path) -> None:
    folder, file = both(tmp_path, small("llama"), GgufRecipe(kind=kind))
    rounded = torch.float16 if kind == KIND.F16 else torch.bfloat16
    two = places(load_decoder(file, torch.float32, CPU))
    for name, weight in places(load_decoder(folder, torch.float32, CPU)).items():
        wanted = weight if weight.ndim == 1 else weight.to(rounded).float()
        assert torch.equal(two[name], wanted), name


WIDE = Small(
    "wide",
    "qwen2",  # not permuted, so bytes can be compared row by row
    {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 64,
    },
)


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_every_quantisation_is_read(kind: str, tmp_path: Path) -> None:
    folder, file = both(tmp_path, WIDE, GgufRecipe("qwen2", kind=KIND[kind]))
    full = places(load_decoder(folder, torch.float32, CPU))
    read = places(load_decoder(file, torch.float32, CPU))
    for name, weight in full.items():
        if weight.ndim == 1:
            continue
        raw = quantised(weight.numpy(), KIND[kind])
        wanted = dequantised(raw.reshape(-1).view(np.uint8), kind).reshape(weight.shape)
        assert np.abs(read[name].numpy() - wanted).max() <= 1e-7 * np.abs(wanted).max(), name


def dequantised(raw: np.ndarray, kind: str) -> np.ndarray:
    """Written from ggml's description of the formats, one block at a time."""
    if kind in ("F32", "F16"):
        return raw.view({"F32": np.float32, "F16": np.float16}[kind]).astype(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    size = gguf.GGML_QUANT_SIZES[KIND[kind]][1]
    blocks = raw.reshape(-1, size)
    return np.concatenate([_BLOCKS[kind](block) for block in blocks]).astype(np.float32)


def half(block: np.ndarray, at: int) -> np.float64:
    return np.float64(block[at : at + 2].view(np.float16)[0])


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate((packed & 15, packed >> 4)).astype(np.float64)


def block_q4_k(block: np.ndarray, high: np.ndarray | None = None) -> np.ndarray:
    """Eight groups of 32, with scales and minima of six bits each, spread over twelve bytes."""
    d, dmin, s = half(block, 0), half(block, 2), block[4:16].astype(int)
    packed = block[-128:]
    out = []
    for j in range(8):
        if j < 4:
            scale, low = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
            low = (s[j + 4] >> 4) | (s[j] >> 6) << 4
        bits = packed[32 * (j // 2) : 32 * (j // 2) + 32]
        q = (bits >> 4 if j % 2 else bits & 15).astype(np.float64)
        if high is not None:
            q += 16 * (high >> j & 1)
        out.append(d * scale * q - dmin * low)
    return np.concatenate(out)


def block_q6_k(block: np.ndarray) -> np.ndarray:
    """Two halves of 128: low four bits, high two bits, a signed scale per sixteen."""
    d, scales, out = half(block, 208), block[192:208].view(np.int8), np.zeros(256)
    for n in range(256):
        part, i = divmod(n, 128)
        row, col = divmod(i, 32)
        low = block[64 * part + 32 * (row % 2) + col] >> (4 * (row // 2)) & 15
        high = block[128 + 32 * part + col] >> (2 * row) & 3
        out[n] = d * scales[n // 16] * (int(low | high << 4) - 32)
    return out


_BLOCKS = {
    "Q4_0": lambda b: half(b, 0) * (nibbles(b[2:]) - 8),
    "Q4_1": lambda b: half(b, 0) * nibbles(b[4:]) + half(b, 2),
    "Q8_0": lambda b: half(b, 0) * b[2:].view(np.int8),
    "Q4_K": block_q4_k,
    "Q5_K": lambda b: block_q4_k(b, high=b[16:48]),
    "Q6_K": block_q6_k,
}


def test_linear_and_yarn_scaling_are_honoured(tmp_path: Path) -> None:
    for kind, name in (("linear", "llama_linear"), ("yarn", "llama_yarn")):
        folder = tmp_path / kind
        scaling = {
            "rope.scaling.type": kind,
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        }
        hf, file = both(folder, small(name), GgufRecipe(metadata=scaling))
        wanted = load_decoder(hf, torch.float32, CPU).rope(torch.arange(50))
        found = load_decoder(file, torch.float32, CPU).rope(torch.arange(50))
        assert torch.equal(found.cos_T1D, wanted.cos_T1D)
        assert torch.equal(found.sin_T1D, wanted.sin_T1D)


def test_rope_divisors_of_llama_3_are_honoured(tmp_path: Path) -> None:
    entry = small("llama_llama3")
    folder = tmp_path / "hf"
    model = save_hf(entry, folder)
    spec = load_decoder(folder, torch.float32, CPU).spec
    scaled_F = frequencies(spec.rope, spec.head_dim, torch.float64)
    plain_F = spec.rope.theta ** -(torch.arange(0, spec.head_dim, 2).double() / spec.head_dim)
    divisors = (plain_F / scaled_F).float().numpy()
    assert divisors.max() > 2
    file = tmp_path / "model.gguf"
    recipe = GgufRecipe(extra={"rope_freqs.weight": divisors})
    write_gguf(file, model.config, weights_of(model), recipe)
    read = load_decoder(file, torch.float32, CPU).spec
    found_F = frequencies(read.rope, read.head_dim, torch.float64)
    assert torch.allclose(found_F, scaled_F, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"attention.clamp_kqv": 3.0}, "llama.attention.clamp_kqv"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "llama.rope.scaling.type"),
        ({"rope.scaling.factor": 2.0}, "llama.rope.scaling.factor"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"vocab_size": 98}, "llama.vocab_size"),
    ],
)
def test_metadata_that_we_do_not_compute_is_refused_by_name(
    metadata: dict[str, Any], field: str, tmp_path: Path
) -> None:
    file = llama(tmp_path, metadata=metadata)
    with pytest.raises(Unsupported) as caught:
        load_decoder(file, torch.float32, CPU)
    assert caught.value.field == field


def test_an_unused_key_is_harmless_at_zero(tmp_path: Path) -> None:
    load_decoder(llama(tmp_path, metadata={"expert_count": 0}), torch.float32, CPU)


def test_other_architectures_are_refused_with_those_we_know(tmp_path: Path) -> None:
    file = llama(tmp_path, architecture="gemma")
    with pytest.raises(Unsupported, match=r"gemma.*llama, qwen2"):
        load_decoder(file, torch.float32, CPU)


def test_other_quantisations_are_refused_with_those_we_know(tmp_path: Path) -> None:
    file = both(tmp_path, WIDE, GgufRecipe("qwen2", kind=KIND.Q5_0))[1]
    with pytest.raises(Unsupported, match=r"Q5_0.*Q4_1"):
        load_decoder(file, torch.float32, CPU)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = save_hf(small("llama"), tmp_path)
    weights = weights_of(model)
    del weights["model.layers.2.mlp.up_proj.weight"]
    file = tmp_path / "model.gguf"
    write_gguf(file, model.config, weights, GgufRecipe())
    with pytest.raises(BadFile, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_decoder(file, torch.float32, CPU)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    file = llama(tmp_path, extra={"blk.0.attn_sinks.weight": np.ones(6, np.float32)})
    with pytest.raises(BadFile, match=r"blk\.0\.attn_sinks\.weight"):
        load_decoder(file, torch.float32, CPU)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    model = save_hf(small("llama"), tmp_path)
    weights = weights_of(model)
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name][:, :40]
    file = tmp_path / "model.gguf"
    write_gguf(file, model.config, weights, GgufRecipe())
    with pytest.raises(BadFile) as caught:
        load_decoder(file, torch.float32, CPU)
    assert caught.value.field == gguf_name(name)
    assert caught.value.value == (48, 40)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return llama(tmp_path_factory.mktemp("whole")).read_bytes()


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(BadFile) as caught:
        load_decoder(file, torch.float32, CPU)
    assert caught.value.field == str(file)


def test_a_damaged_header_never_ends_in_a_traceback(whole: bytes, tmp_path: Path) -> None:
    """Bytes of the header are overwritten one by one: it loads, or the error is one of ours."""
    file = tmp_path / "damaged.gguf"
    header = whole.index(b"output_norm.weight") + 100
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, header, 150):
        raw = bytearray(whole)
        raw[at] = rng.integers(0, 256)
        file.write_bytes(raw)
        try:
            load_decoder(file, torch.float32, CPU)
        except (BadFile, Unsupported):
            refused += 1
    assert refused > 50


def test_lengths_beyond_the_file_are_refused_at_once(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "huge.gguf"
    for at in (8, 16, 24):  # tensors, metadata pairs, length of the first key
        file.write_bytes(whole[:at] + struct.pack("<Q", 2**60) + whole[at + 8 :])
        with pytest.raises(BadFile):
            load_decoder(file, torch.float32, CPU)


def test_a_big_endian_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "big.gguf"
    file.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(Unsupported, match="little-endian"):
        load_decoder(file, torch.float32, CPU)


def test_a_model_split_over_files_is_refused(whole: bytes, tmp_path: Path) -> None:
    model = save_hf(small("llama"), tmp_path)
    file = tmp_path / "model.gguf"
    write_gguf(file, model.config, weights_of(model), GgufRecipe(keys={"split.count": 3}))
    with pytest.raises(Unsupported, match="split"):
        load_decoder(file, torch.float32, CPU)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = save_hf(small("llama"), tmp_path)
    weights = {name: weight.detach().clone() for name, weight in weights_of(model).items()}
    weights["model.norm.weight"][3] = torch.inf
    file = tmp_path / "model.gguf"
    write_gguf(file, model.config, weights, GgufRecipe())
    with pytest.raises(BadFile, match=r"output_norm\.weight.*not finite"):
        load_decoder(file, torch.float32, CPU)
