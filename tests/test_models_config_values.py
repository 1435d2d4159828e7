"""A config.json may hold any JSON under any key: what cannot be meant is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadFile, FurcateError
from furcate.models.hf_config import _NOPE, _ONLY, _SHARED, ARCHITECTURES, spec_from_hf_config
from furcate.models.hf_rope import _EVERYWHERE, _KEYS

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "sliding_window": None,
}
KEYS = sorted(_SHARED | set(_ONLY) | _NOPE | set().union(*(a.keys for a in ARCHITECTURES.values())))
ROPE = sorted(_EVERYWHERE.union(*_KEYS.values()))
FEW = [
    "yarn",
    "llama3",
    "linear",
    "default",
    "full_attention",
    "smollm3",
    "silu",
    "LlamaForCausalLM",
]

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 4, 10**400, -(10**400)])
    | st.floats()
    | st.sampled_from(FEW)
    | st.text(max_size=3)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
scalings = st.dictionaries(st.sampled_from(ROPE), values, max_size=5)


def config(kind: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": kind, **changes}


def read_or_refused(asked: dict[str, Any]) -> bool:
    """Any other error passes through; a refusal counts only if it names a field."""
    try:
        spec_from_hf_config(asked)
    except FurcateError as err:
        return err.field is not None
    return True


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_base_of_these_tests_is_read(kind: str) -> None:
    assert spec_from_hf_config(config(kind)).num_layers == 2


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    dropped=st.sets(st.sampled_from(sorted(BASE)), max_size=1),
)
def test_any_json_under_any_key_is_read_or_refused(
    kind: str, changes: dict[str, Any], dropped: set[str]
) -> None:
    asked = {key: value for key, value in config(kind).items() if key not in dropped} | changes
    assert read_or_refused(asked)


@settings(max_examples=400, deadline=None)
@given(
    style=st.sampled_from(["rope_scaling", "rope_parameters"]),
    rope_type=st.sampled_from(sorted(_KEYS)),
    scaling=scalings,
)
def test_any_json_in_a_rope_scaling_is_read_or_refused(
    style: str, rope_type: str, scaling: dict[str, Any]
) -> None:
    asked = {"rope_type": rope_type, "factor": 2.0, **scaling}
    assert read_or_refused(config("llama", **{style: asked}))


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("qwen2", {"layer_types": 5}, "layer_types"),
        ("qwen2", {"layer_types": [["a"]]}, "layer_types"),
        ("mistral", {"sliding_window": "x"}, "sliding_window"),
        ("mistral", {"sliding_window": [4]}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"rope_scaling": {"rope_type": ["a"]}}, "rope_scaling.rope_type"),
        ("llama", {"rope_scaling": False}, "rope_scaling"),
        ("llama", {"rope_parameters": []}, "rope_parameters"),
        ("llama", {"rope_theta": float("nan")}, "rope_scaling.rope_theta"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("llama", {"hidden_size": 10**400}, "hidden_size"),
        ("llama", {"num_attention_heads": 0, "head_dim": 8}, "num_heads"),
        ("smollm3", {"no_rope_layers": [[1], [0]]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": {"0": 1, "1": 1}}, "no_rope_layers"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(
    kind: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadFile) as caught:
        spec_from_hf_config(config(kind, **changes))
    assert caught.value.field == field
