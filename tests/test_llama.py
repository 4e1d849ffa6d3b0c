"""The Llama network against transformers: every switch of its config, the same weights, whole sequences."""

from __future__ import annotations

import pytest
import torch
import transformers
from checkpoints import (
    assert_same_logits,
    cast_parameters,
    make_reference,
    model_logits,
    random_tokens,
    reference_logits,
)

from vllm_mini import LLM, SamplingParams
from vllm_mini.config import ACTIVATIONS, ConfigError, LlamaConfig
from vllm_mini.llama import (
    ACTIVATION_FUNCTIONS,
    DUMMY_CONFIG,
    DummyModel,
    LlamaForCausalLM,
    can_pack,
    randomize,
    rope_frequencies,
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def copy_of(reference: transformers.LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Our model with the reference's config and weights."""
    model = LlamaForCausalLM(LlamaConfig.from_dict(reference.config.to_dict()), dtype=dtype)
    weights = reference.state_dict()
    for name, tensor in model.checkpoint_tensors().items():
        tensor.copy_(weights[name])
    return model


def make_config(**changes) -> LlamaConfig:
    return LlamaConfig.from_dict({
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        **changes})


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_logits_equal_transformers_with_any_number_of_kv_heads(num_kv_heads):
    reference = make_reference(num_key_value_heads=num_kv_heads)
    assert_same_logits(copy_of(reference), reference, random_tokens(60))


@pytest.mark.parametrize("shape", [
    {"head_dim": 32},
    {"head_dim": 8},
    {"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16},
    {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2},
])
def test_ML_07_head_dim_of_its_own_is_not_derived_from_the_hidden_size(shape):
    reference = make_reference(**shape)
    model = copy_of(reference)
    config = reference.config
    assert model.checkpoint_tensors()["model.layers.0.self_attn.q_proj.weight"].shape == (
        config.num_attention_heads * shape["head_dim"], config.hidden_size)
    assert_same_logits(model, reference, random_tokens(60))


@pytest.mark.parametrize("switch", [
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    {"rms_norm_eps": 1e-2},
    {"tie_word_embeddings": True},
    {"rope_theta": 500.0},
    {"num_hidden_layers": 5},
    {"pretraining_tp": 2},
    *({"hidden_act": name} for name in ACTIVATIONS),
], ids=str)
def test_ML_10_every_supported_switch_of_the_config_matches_transformers(switch):
    reference = make_reference(**switch)
    assert_same_logits(copy_of(reference), reference, random_tokens(60))


@pytest.mark.parametrize("length", [10, 70, 300])
@pytest.mark.parametrize("scaling", [
    LLAMA3, {**LLAMA3, "factor": 2.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"},
], ids=str)
def test_ML_02_scaled_rope_matches_transformers_at_all_lengths(scaling, length):
    reference = make_reference(rope_theta=500000.0, rope_scaling=scaling)
    assert_same_logits(copy_of(reference), reference, random_tokens(length))


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}], ids=str)
def test_ML_02_scaling_that_is_ignored_would_be_noticed(scaling):
    plain = make_reference(rope_theta=500000.0)
    scaled = copy_of(make_reference(rope_theta=500000.0, rope_scaling=scaling))
    tokens = random_tokens(70)
    assert (model_logits(scaled, tokens) - reference_logits(plain, tokens)).abs().max() > 0.1


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn", "longrope", "foo"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_ML_02_rope_types_that_are_not_supported_are_refused_by_name(rope_type, key):
    with pytest.raises(ConfigError, match=f"{rope_type}.*supported: default, linear, llama3"):
        make_config(rope_scaling={key: rope_type, "factor": 2.0})


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": None}, {"rope_type": "linear", "factor": "4"},
    {"rope_type": "linear", "factor": 0}, {**LLAMA3, "low_freq_factor": None},
    {"rope_type": "llama3", "factor": 8.0},
], ids=str)
def test_ML_02_scaling_without_its_numbers_is_refused(scaling):
    with pytest.raises(ConfigError, match=r"rope type .* needs a positive"):
        make_config(rope_scaling=scaling)


def test_ML_02_both_spellings_of_rope_settings_are_read():
    old = make_config(rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = make_config(rope_parameters={"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0})
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling)


def test_rope_factors_divide_each_frequency():
    factors = [1.0, 2.0, 4.0, 8.0]
    plain = rope_frequencies(make_config())
    divided = rope_frequencies(make_config(rope_scaling={"rope_type": "factors", "factors": factors}))
    torch.testing.assert_close(divided, plain / torch.tensor(factors))


def test_rope_factors_of_the_wrong_number_are_refused():
    with pytest.raises(ConfigError, match="head_dim 8 needs 4 rope factors, found 3"):
        make_config(rope_scaling={"rope_type": "factors", "factors": [1.0, 2.0, 3.0]})


def test_positions_beyond_the_trained_context_still_match_transformers():
    reference = make_reference(max_position_embeddings=32)
    assert_same_logits(copy_of(reference), reference, random_tokens(60))
    assert_same_logits(copy_of(reference), reference, random_tokens(20), start=5000)


def test_rope_keeps_its_precision_when_the_model_is_cast():
    model = copy_of(make_reference())
    before = model.model.rotary_emb.frequencies.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.model.rotary_emb.frequencies, before)
    assert before.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_to_transformers_in_the_same_precision(dtype):
    reference = cast_parameters(make_reference(rope_theta=500000.0, rope_scaling=LLAMA3), dtype)
    tokens = random_tokens(300)
    ours = model_logits(copy_of(reference, dtype), tokens).log_softmax(-1)
    theirs = reference_logits(reference, tokens).log_softmax(-1)
    likely = theirs > -10
    assert (ours - theirs)[likely].abs().max() < 0.05


def test_logits_are_float32_whatever_the_weights_are():
    model = DummyModel(dtype=torch.bfloat16)
    assert model_logits(model, [1, 2, 3]).dtype == torch.float32


def test_far_back_tokens_change_the_output():
    tokens = random_tokens(200, vocab_size=256)
    changed = [(tokens[0] + 1) % 256, *tokens[1:]]
    difference = model_logits(DummyModel(), tokens)[-1] - model_logits(DummyModel(), changed)[-1]
    assert difference.abs().max() > 1e-3


def test_every_activation_that_a_config_may_name_exists():
    assert set(ACTIVATION_FUNCTIONS) == set(ACTIVATIONS)


def test_checkpoint_tensors_are_the_names_and_shapes_of_transformers():
    reference = make_reference(attention_bias=True, mlp_bias=True)
    expected = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in copy_of(reference).checkpoint_tensors().items()} == expected


def test_checkpoint_tensors_are_views_that_cover_every_parameter():
    model = LlamaForCausalLM(make_config(attention_bias=True, mlp_bias=True))
    for tensor in model.checkpoint_tensors().values():
        tensor.fill_(7)
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_tied_embeddings_are_stored_once():
    tied = LlamaForCausalLM(make_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in tied.checkpoint_tensors()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_models_are_for_inference_only():
    model = DummyModel()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_dummy_model_is_a_function_of_its_seed():
    first, same, other = (DummyModel(seed).checkpoint_tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_dummy_model_has_the_byte_vocabulary_and_its_end_tokens():
    assert DUMMY_CONFIG.vocab_size == 256 + 3
    assert DUMMY_CONFIG.eos_token_ids == (258, 256)
    assert model_logits(DummyModel(), [0, 258]).shape == (2, 259)


def test_random_weights_have_the_wanted_spread_and_norms_of_one():
    model = LlamaForCausalLM(DUMMY_CONFIG)
    randomize(model, seed=3, std=0.5)
    tensors = model.checkpoint_tensors()
    assert tensors["model.layers.1.mlp.up_proj.weight"].std().item() == pytest.approx(0.5, rel=0.05)
    assert (tensors["model.norm.weight"] == 1).all()


def test_random_weights_are_the_same_numbers_in_every_dtype():
    full, half = DummyModel(dtype=torch.float32), DummyModel(dtype=torch.bfloat16)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(full.parameters(), half.parameters(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_weights_are_the_same_numbers_on_every_device():
    host, device = DummyModel(), DummyModel(device="cuda")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host.parameters(), device.parameters(), strict=True))


@pytest.mark.parametrize("changes", [
    {"hidden_size": 0}, {"num_hidden_layers": -1}, {"vocab_size": "32"}, {"num_attention_heads": 2.0},
    {"num_attention_heads": True}, {"num_key_value_heads": 3}, {"head_dim": 5}, {"hidden_act": "tanh"},
    {"rms_norm_eps": "1e-5"}, {"rms_norm_eps": -1.0}, {"tie_word_embeddings": "false"}, {"attention_bias": 1},
    {"hidden_size": 15}, {"partial_rotary_factor": 0.5},
], ids=str)
def test_ML_10_values_that_make_no_model_are_refused_by_name(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        make_config(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("switch", [
    {}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"hidden_size": 60, "head_dim": 18},
], ids=str)
def test_packed_weights_compute_the_same(switch, dtype):
    if not can_pack(dtype):
        assert dtype != torch.float32  # older CPUs have no packed bfloat16
        pytest.skip(f"this CPU packs no {dtype}")
    reference = make_reference(**switch)
    plain, packed = copy_of(reference, dtype), copy_of(reference, dtype)
    packed.pack()
    for length in (1, 2, 7, 40):
        tokens = random_tokens(length)
        rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (5e-2, 0.3)
        torch.testing.assert_close(model_logits(packed, tokens), model_logits(plain, tokens), rtol=rtol, atol=atol)
    assert sum(name.endswith("proj.weight") for name, _ in packed.named_parameters()) == 0  # no second copy is kept


def test_without_onednn_the_weights_stay_plain(monkeypatch, caplog):
    monkeypatch.setattr("vllm_mini.llama.pack_for_onednn", lambda *layer: torch.ops.mkldnn.no_such_operation(*layer))
    assert not can_pack(torch.float32)
    with caplog.at_level("INFO"):
        llm = LLM("dummy", dtype="float32", num_kv_blocks=8)
    assert "linear layers: plain" in caplog.text
    assert llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), progress=False)[0].outputs[0].token_ids
