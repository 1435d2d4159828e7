"""Small heads in the formats of others, written here by hand and not by furcate.

The target has 8 layers, so that the customary features are its states 2, 4 and 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_models import fill_randomly
from torch import Tensor

from furcate.heads.exchange import Target
from furcate.models.decoder import Decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.weights import places

C, V, D, INNER, LAYERS = 32, 60, 20, 48, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
IDS = torch.tensor([2 * i + (i > 4) + (i > 9) for i in range(D)])  # ascending, not all even

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": C,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
Shapes = dict[str, tuple[int, ...]]


def target_spec(**changes: Any) -> DecoderSpec:
    """Of the target below."""
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": C,
        "intermediate_size": 64,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "max_position": 128,
        "rope": RopeSpec(10000.0),
    }
    sizes = {**sizes, **changes}
    return DecoderSpec(**sizes, rope_layers=(True,) * sizes["num_layers"])


@cache
@torch.inference_mode(False)  # tests of training get the same one
def decoder() -> Decoder:
    """A random target in float32; its numbers fit bfloat16, as those of most checkpoints do."""
    made = Decoder(target_spec(), torch.float32, torch.device("cpu"))
    found = places(made)
    fill_randomly(found, 3)
    for view in found.values():
        view.copy_(view.bfloat16())
    return made.requires_grad_(False)


def target() -> Target:
    """The same as heads are imported for."""
    return Target(decoder().spec, lambda _: decoder(), None, "someone/target")


def layer(width: int = C) -> Shapes:
    """One of Llama's layers without its first norm; attention reads `width` columns."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (C, q),
        "post_attention_layernorm.weight": (C,),
        "mlp.gate_proj.weight": (INNER, C),
        "mlp.up_proj.weight": (INNER, C),
        "mlp.down_proj.weight": (C, INNER),
    }


def under(prefix: str, shapes: Shapes) -> Shapes:
    """The same names behind a prefix."""
    return {prefix + name: shape for name, shape in shapes.items()}


def randomly(
    shapes: Shapes, seed: int = 1, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Tensors of these shapes."""
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill_randomly(tensors, seed)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def eagle3_shapes(prefix: str = "midlayer.", features: int = 3, rows: int = D) -> Shapes:
    """Of an EAGLE-3 head with an output matrix of its own."""
    first = {**layer(2 * C), "hidden_norm.weight": (C,), "input_layernorm.weight": (C,)}
    around = {"fc.weight": (C, features * C), "norm.weight": (C,), "lm_head.weight": (rows, C)}
    return {**around, **under(prefix, first)}


def maps(ids_D: Tensor = IDS) -> dict[str, Tensor]:
    """d2t and t2d."""
    mask_V = torch.zeros(V, dtype=torch.bool)
    mask_V[ids_D] = True
    return {"d2t": ids_D - torch.arange(len(ids_D)), "t2d": mask_V}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A directory with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def eagle1(folder: Path, *, bias: bool = True, **changes: Any) -> Path:
    """The authors' EAGLE-1, which carries embeddings."""
    shapes = {"fc.weight": (C, 2 * C), **under("layers.0.", layer()), "embed_tokens.weight": (V, C)}
    tensors = randomly(shapes | ({"fc.bias": (C,)} if bias else {}))
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": bias} | changes
    return write(folder, config, tensors)


def eagle3(folder: Path, **changes: Any) -> Path:
    """The authors' EAGLE-3."""
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": D} | changes
    return write(folder, config, randomly(eagle3_shapes()) | maps())


def sglang(folder: Path, **changes: Any) -> Path:
    """SpecForge's EAGLE-3, its layers named by their outputs."""
    named = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": D,
        "eagle_config": named,
        "target_hidden_size": C,
    }
    return write(folder, config | changes, randomly(eagle3_shapes("layers.0.")) | maps())


def speculators(folder: Path, *, layers: int = 1, **changes: Any) -> Path:
    """An EAGLE-3 of speculators, with norms for each feature, and perhaps more layers."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "someone/target", "architectures": []},
        },
        "transformer_layer_config": LLAMA | {"num_hidden_layers": layers},
        "draft_vocab_size": D,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        "norm_before_residual": True,
        "fc_norm": True,
    }
    shapes = eagle3_shapes("layers.0.") | {f"fc_norm.{i}.weight": (C,) for i in range(3)}
    for index in range(1, layers):
        shapes |= under(f"layers.{index}.", {**layer(), "input_layernorm.weight": (C,)})
    return write(folder, config | changes, randomly(shapes) | maps())


def medusa(folder: Path, *, heads: int = 3, layers: int = 2, told: int | None = None) -> Path:
    """The authors' Medusa: a pickle of torch."""
    shapes: Shapes = {}
    for head in range(heads):
        for block in range(layers):
            shapes[f"{head}.{block}.linear.weight"] = (C, C)
            shapes[f"{head}.{block}.linear.bias"] = (C,)
        shapes[f"{head}.{layers}.weight"] = (V, C)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": told or heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "someone/target",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(randomly(shapes), folder / "medusa_lm_head.pt")
    return folder


def medusa_vllm(folder: Path, *, heads: int = 3, **changes: Any) -> Path:
    """vLLM's former Medusa, over a few tokens in no order."""
    shapes: Shapes = {}
    for head in range(heads):
        shapes[f"medusa_heads.blocks.{head}.layers.0.weight"] = (C, C)
        shapes[f"medusa_heads.lm_heads.{head}.weight"] = (D, C)
    config = {
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": 1,
        "hidden_size": C,
        "vocab_size": V,
        "truncated_vocab_size": D,
        "medusa_fc_bias": False,
    }
    return write(folder, config | changes, randomly(shapes) | {"token_map": IDS.flip(0)})


def mtp(folder: Path, names: str = "deepseek", **changes: Any) -> Path:
    """The part of a target's directory that matters to its MTP module."""
    around: Shapes = {"enorm": (C,), "hnorm": (C,), "eh_proj": (C, 2 * C), "shared_head.norm": (C,)}
    inner = {**layer(), "input_layernorm.weight": (C,)}
    shapes = {f"{name}.weight": shape for name, shape in around.items()} | inner
    config = LLAMA | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    tensors = randomly(under(f"model.layers.{LAYERS}.", shapes), seed=4)
    tensors |= randomly({"model.embed_tokens.weight": (V, C), "lm_head.weight": (V, C)}, seed=5)
    if names == "deepseek":
        prefix = f"model.layers.{LAYERS}."
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        return write(folder, config | changes, tensors)
    del config["num_nextn_predict_layers"]
    renamed = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    found = {
        f"mtp.{new}.weight": tensors[f"model.layers.{LAYERS}.{old}.weight"]
        for old, new in renamed.items()
    }
    found |= {f"mtp.layers.0.{name}": tensors[f"model.layers.{LAYERS}.{name}"] for name in inner}
    return write(folder, config | {"mtp_num_hidden_layers": 1} | changes, found)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What lies in a directory, read without furcate."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    return found


def change(folder: Path, *, drop: tuple[str, ...] = (), **tensors: Tensor) -> Path:
    """The same directory with some tensors gone, and others in their place; __ stands for a dot."""
    kept = {name: each for name, each in tensors_of(folder).items() if name not in drop}
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**kept, **named}, folder / "model.safetensors")
    return folder


def edit(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """The same directory with another config."""
    path = folder / "config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    path.write_text(json.dumps({**kept, **changes}))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
