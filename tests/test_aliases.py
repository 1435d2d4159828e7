"""Options of vLLM and SGLang: each is honoured or refused by name."""

from __future__ import annotations

import pytest

from furcate.aliases import _SGLANG, _VLLM, Drafting, _Dialect, from_sglang, from_vllm
from furcate.errors import BadRequest, Unsupported, UserError

# the keys that the two engines' documents name, as `head_formats` of the field lists them
VLLM_KEYS = """
    method model revision code_revision quantization kv_cache_dtype attention_backend moe_backend
    draft_tensor_parallel_size tensor_parallel_size max_model_len num_speculative_tokens
    speculative_token_tree draft_sample_method rejection_sample_method
    num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min parallel_drafting
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests disable_by_batch_size
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob enforce_eager
""".split()
SGLANG_KEYS = """
    speculative_algorithm speculative_draft_model_path speculative_draft_model
    speculative_draft_model_revision speculative_draft_model_quantization
    speculative_draft_load_format speculative_draft_kv_cache_dtype speculative_token_map
    speculative_draft_attention_backend speculative_draft_window_size speculative_draft_sink_size
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    speculative_use_rejection_sampling speculative_use_block_verification speculative_adaptive
    speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_adaptive_config speculative_ngram_min_match_window_size
    speculative_ngram_max_match_window_size speculative_ngram_min_bfs_breadth
    speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_branch_length
    speculative_ngram_capacity speculative_attention_mode
""".split()
DIALECTS = [(from_vllm, _VLLM, VLLM_KEYS), (from_sglang, _SGLANG, SGLANG_KEYS)]


def test_vllm_counts_leave_the_root_out() -> None:
    asked = from_vllm({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6})
    want = {"num_draft_tokens": 5, "depth": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 6}
    assert asked == Drafting("ngram", want)
    assert asked.draft_options().num_draft_tokens == 5


def test_sglang_counts_take_the_root_in() -> None:
    flags = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": "small",
        "speculative_num_steps": "3",
        "speculative_eagle_topk": "4",
        "speculative_num_draft_tokens": "16",
    }
    want = {"depth": 3, "topk": 4, "num_draft_tokens": 15}
    assert from_sglang(flags) == Drafting("small", want, "model")


def test_a_draft_model_may_be_named_without_a_method() -> None:
    assert from_vllm({"model": "small"}).drafter == "small"
    assert from_vllm({"model": "[ngram]"}).drafter == "ngram"
    assert from_vllm({"num_speculative_tokens": 2}).drafter is None


def test_null_means_unset() -> None:
    assert from_vllm({"method": "ngram", "quantization": None}).options == {}


@pytest.mark.parametrize(("translate", "speech", "keys"), DIALECTS, ids=["vllm", "sglang"])
def test_every_documented_key_is_known(
    translate: object, speech: _Dialect, keys: list[str]
) -> None:
    assert set(keys) <= set(speech.known())


@pytest.mark.parametrize(
    ("translate", "key"),
    [(t, key) for t, speech, _ in DIALECTS for key in speech.refused],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_refused_key_is_named(translate: object, key: str) -> None:
    with pytest.raises(Unsupported) as caught:
        translate({key: "anything"})  # type: ignore[operator]
    assert caught.value.field == key
    assert caught.value.hint


@pytest.mark.parametrize(
    ("translate", "key"),
    [(t, key) for t, speech, _ in DIALECTS for key in speech.harmless],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_harmless_key_is_harmless_at_one_value_only(translate: object, key: str) -> None:
    speech = _VLLM if key in _VLLM.harmless else _SGLANG
    assert translate({key: speech.harmless[key][0]}).options == {}  # type: ignore[operator]
    with pytest.raises(Unsupported, match=key):
        translate({key: "fly"})  # type: ignore[operator]


def test_each_key_stands_in_one_table() -> None:
    for _, speech, _ in DIALECTS:
        tables = [speech.options, speech.harmless, speech.refused, speech.switches]
        keys = [key for table in tables for key in table]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("method", ["dflash", "deepseek_mtp", "suffix"])
def test_a_method_that_is_not_here_is_refused_by_name(method: str) -> None:
    with pytest.raises(Unsupported, match=method):
        from_vllm({"method": method, "model": "head"})
    with pytest.raises(Unsupported, match="DSPARK"):
        from_sglang({"speculative_algorithm": "DSPARK"})


HEADS = [("eagle", "eagle1"), ("eagle3", "eagle3"), ("medusa", "medusa"), ("mtp", "mtp")]
ALGORITHMS = [("EAGLE", "eagle1"), ("EAGLE3", "eagle3"), ("NEXTN", "mtp")]


@pytest.mark.parametrize(("method", "kind"), HEADS)
def test_vllms_count_is_the_depth_of_a_head(method: str, kind: str) -> None:
    config = {"method": method, "num_speculative_tokens": 4}
    assert from_vllm(config | {"model": "dir"}) == Drafting("dir", {"depth": 4}, kind)
    assert from_vllm(config) == Drafting(kind, {"depth": 4}, kind), "the head that is furcate's own"


@pytest.mark.parametrize(("algorithm", "kind"), ALGORITHMS)
def test_sglangs_counts_of_a_head_take_the_root_in(algorithm: str, kind: str) -> None:
    flags = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": "5",
        "speculative_eagle_topk": "8",
        "speculative_num_draft_tokens": "64",
    }
    want = {"depth": 5, "topk": 8, "num_draft_tokens": 63}
    assert from_sglang(flags) == Drafting(kind, want, kind)
    named = from_sglang(flags | {"speculative_draft_model_path": "dir"})
    assert named == Drafting("dir", want, kind)


def test_a_method_that_contradicts_what_is_found_is_refused() -> None:
    asked = from_vllm({"method": "eagle3", "model": "dir"})
    asked.check_kind("eagle3")
    asked.check_kind("off")  # where nothing is to be drafted
    with pytest.raises(BadRequest, match="dir is of the kind medusa") as caught:
        asked.check_kind("medusa")
    assert (caught.value.field, caught.value.value) == ("method", "eagle3")
    with pytest.raises(BadRequest, match="name the method 'eagle'"):
        from_vllm({"method": "draft_model", "model": "dir"}).check_kind("eagle1")
    from_sglang({"speculative_algorithm": "EAGLE"}).check_kind("mtp")  # as SGLang has it
    from_vllm({"model": "dir"}).check_kind("anything")


@pytest.mark.parametrize(
    "config",
    [
        {"method": "eagle", "model": "dir"},
        {"method": "draft_model", "model": "dir"},
        {"method": "mtp"},
        {"method": "ngram"},
        {"model": "dir"},
        {},
    ],
    ids=str,
)
def test_who_drafts_is_told_in_vllms_words_again(config: dict[str, object]) -> None:
    assert from_vllm(from_vllm(config).who()) == from_vllm(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"methods": "ngram"}, "methods"),
        ({"method": "telepathy"}, "method"),
        ({"method": "draft_model"}, "model"),
        ({"method": "ngram", "model": "small"}, "model"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 999}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_max": 99}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_min": 99}, "prompt_lookup_min"),
        ({"model": ""}, "model"),
        ({"model": ["small"]}, "model"),
        ({"parallel_drafting": "false"}, "parallel_drafting"),
        ({"parallel_drafting": 0}, "parallel_drafting"),
        ({"draft_tensor_parallel_size": True}, "draft_tensor_parallel_size"),
        ({"model": "small", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "eagle", "num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"method": "medusa", "model": ""}, "model"),
        ({"method": "eagle3", "speculative_token_tree": "[(0,)]"}, "speculative_token_tree"),
    ],
)
def test_a_mistake_is_told_under_the_users_own_key(config: dict[str, object], field: str) -> None:
    with pytest.raises(UserError) as caught:
        from_vllm(config)
    assert caught.value.field == field


def test_two_widths_that_disagree_are_refused() -> None:
    flags = {"speculative_eagle_topk": 2, "speculative_ngram_max_bfs_breadth": 3}
    with pytest.raises(BadRequest, match="two values"):
        from_sglang(flags)


def test_the_adaptive_switch_is_taken() -> None:
    assert from_sglang({"speculative_adaptive": True}).options == {"adaptive": True}


@pytest.mark.parametrize(
    ("given", "meant"),
    [(True, True), ("true", True), ("True", True), (False, False), ("false", False)],
)
def test_the_word_false_turns_a_switch_off(given: object, meant: bool) -> None:
    assert from_sglang({"speculative_adaptive": given}).options == {"adaptive": meant}


@pytest.mark.parametrize("given", ["", "no", "1", 1, 0, [], "ture"])
def test_a_switch_takes_true_and_false_alone(given: object) -> None:
    with pytest.raises(BadRequest, match="speculative_adaptive"):
        from_sglang({"speculative_adaptive": given})


@pytest.mark.parametrize("key", ["prompt_lookup_max", "prompt_lookup_min"])
def test_one_bound_of_vllms_lookup_stands_for_both(key: str) -> None:
    both = {"prompt_lookup_max": 5, "prompt_lookup_min": 5}
    assert from_vllm({"method": "ngram", key: 5}).options == both


def test_both_bounds_of_vllms_lookup_stay_as_given() -> None:
    both = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
    assert from_vllm({"method": "ngram", **both}).options == both
    flags = {"speculative_ngram_max_match_window_size": 5}
    assert from_sglang(flags).options == {"prompt_lookup_max": 5}
