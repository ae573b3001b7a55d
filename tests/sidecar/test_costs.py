"""What a byte costs is estimated from config.json as the connector writes it; what cannot be read counts as average."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_sidecar.costs import operations_per_byte, operations_per_token, parse_model, read_costs, relative_costs

LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"intermediate_size": 14336}
LLAMA_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_70B |= {"intermediate_size": 28672}
DEEPSEEK_V3 = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "head_dim": 64}
DEEPSEEK_V3 |= {"num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048}
DEEPSEEK_V3 |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512}


def identity(model, *, layers, ranks=1, heads=8, page=None):
    """Return an identity as identity.py describes one: values of the model's configuration as text, 16-bit KV."""
    return {
        "model": "some/model",
        "engine": {"hf_config": {name: repr(value) for name, value in model.items()}, "tensor_parallel": ranks},
        "layout": {"page_sizes_bytes": [page or 2 * heads * 128 * 2 * 16 // ranks] * layers, "gpu_blocks": 16},
        "hashing": {"block_tokens": 256},
    }


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (LLAMA_8B, 14.0),  # 8.03 billion parameters, 1.05 of them embeddings
        (LLAMA_70B, 136.9),
        (DEEPSEEK_V3, 74.0),  # 37 billion active
        (
            {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "activation_function": "gelu_new"},
            0.17,
        ),  # GPT-2
    ],
    ids=["llama 8b", "llama 70b", "deepseek v3", "gpt2"],
)
def test_operations_are_about_two_a_parameter_that_a_token_meets(model, billions):
    assert operations_per_token(model) == pytest.approx(billions * 1e9, rel=0.1)


def test_a_large_model_costs_more_a_byte_than_a_small_one():
    costs = relative_costs({"a": identity(LLAMA_8B, layers=32), "b": identity(LLAMA_70B, layers=80)})
    assert costs["b"] / costs["a"] == pytest.approx(3.92, abs=0.01)
    assert sum(costs.values()) / 2 == 1.0


def test_tensor_parallel_ranks_share_work_and_bytes():
    one, four = (operations_per_byte(identity(LLAMA_70B, layers=80, ranks=ranks)) for ranks in (1, 4))
    assert one == four


def test_one_rank_that_writes_for_all_stands_for_the_work_of_all():
    one, eight = (operations_per_byte(identity(DEEPSEEK_V3, layers=61, ranks=ranks, page=18432)) for ranks in (1, 8))
    assert one == eight


def test_the_language_part_of_a_model_for_pictures_counts():
    nested = {"text_config": repr(LLAMA_8B), "hidden_size": "77"}
    assert operations_per_token(parse_model(nested)) == operations_per_token(LLAMA_8B)


def test_groups_of_a_hybrid_model_add_up():
    plain = identity(LLAMA_8B, layers=32)
    hybrid = identity(LLAMA_8B, layers=32)
    pages = plain["layout"]["page_sizes_bytes"]
    hybrid["layout"]["page_sizes_bytes"] = [pages[:16], pages[16:]]
    hybrid["hashing"]["block_tokens"] = [256, 256]
    assert operations_per_byte(hybrid) == operations_per_byte(plain)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_model_that_does_not_tell_enough_has_no_cost(missing):
    model = {name: value for name, value in LLAMA_8B.items() if name != missing}
    assert operations_per_byte(identity(model, layers=32)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@pytest.mark.slow
@given(
    engine=json_values,
    layout=json_values,
    sizes=json_values,
    tokens=json_values,
    model=st.dictionaries(st.sampled_from([*LLAMA_8B, *DEEPSEEK_V3, "text_config"]), json_values),
)
def test_whatever_config_json_holds_a_cost_is_positive_or_unknown(engine, layout, sizes, tokens, model):
    good = identity(LLAMA_8B, layers=2)
    for changed in (
        {"engine": engine},
        {"layout": layout},
        {"layout": {**good["layout"], "page_sizes_bytes": sizes}},
        {"hashing": {"block_tokens": tokens}},
        {"engine": {"hf_config": {**good["engine"]["hf_config"], **model}}},
    ):
        cost = operations_per_byte({**good, **changed})
        assert cost is None or cost > 0


def test_costs_are_bounded_whatever_was_misread():
    tiny = {**LLAMA_8B, "hidden_size": 1, "intermediate_size": 1}
    huge = {**LLAMA_8B, "hidden_size": 10**9}
    models = {"tiny": tiny, "usual": LLAMA_8B, "huge": huge}
    costs = relative_costs({name: identity(model, layers=32) for name, model in models.items()})
    assert costs == {"tiny": 1 / 16, "usual": 1.0, "huge": 16.0}


def test_costs_of_a_pool_leave_out_what_cannot_be_read(tmp_path):
    for name, text in (
        ("a" * 12, json.dumps({"identity": identity(LLAMA_8B, layers=32)})),
        ("b" * 12, '{"identity": '),
        ("c" * 12, '{"identity": 3}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / ("d" * 12)).mkdir()
    assert read_costs(str(tmp_path)) == {"a" * 12: 1.0}


def test_a_pool_without_models_has_no_costs(tmp_path):
    assert read_costs(str(tmp_path)) == {}
