"""Checkpoints of every supported kind against transformers, and every other kind refused in one line."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import (
    Checkpoint,
    assert_same_logits,
    edit_config,
    edit_tensors,
    load,
    model_logits,
    random_tokens,
    reference_logits,
    write_byte_tokenizer,
    write_checkpoint,
    write_gguf,
)
from transformers import AutoTokenizer, LlamaForCausalLM

from vllm_mini import loader
from vllm_mini.config import ConfigError
from vllm_mini.gguf_file import GGUFFile
from vllm_mini.llama import DUMMY_CONFIG, DummyModel
from vllm_mini.loader import load_config, load_generation_config, load_model, resolve_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
TOKENS = random_tokens(50)


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    return write_checkpoint(tmp_path / "model")


def refusal(path: Path | str) -> str:
    """The one line with which a model is refused, wherever on the way that happens."""
    with pytest.raises(ConfigError) as caught:
        load(resolve_model(str(path)))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


# Folders that load


@pytest.mark.parametrize("changes", [
    {}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 32}, {"rms_norm_eps": 1e-2},
    {"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
    {"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16}, {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
], ids=str)
def test_ML_07_ML_10_a_folder_as_transformers_writes_it_matches_transformers(tmp_path, changes):
    checkpoint = write_checkpoint(tmp_path, **changes)
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


def test_sharded_weights_match_transformers(tmp_path):
    checkpoint = write_checkpoint(tmp_path, max_shard_size="60KB", num_hidden_layers=3)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_converted_to_the_dtype_that_is_asked_for(tmp_path, stored):
    checkpoint = write_checkpoint(tmp_path, dtype=stored)
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)
    model = load(checkpoint.path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_ML_10_without_num_key_value_heads_every_head_has_its_own(tmp_path):
    checkpoint = write_checkpoint(tmp_path, num_key_value_heads=4)
    edit_config(tmp_path, num_key_value_heads=...)
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


def test_ML_07_head_dim_null_or_absent_is_derived(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    for value in (None, ...):
        edit_config(tmp_path, head_dim=value)
        assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


def test_ML_02_the_older_spelling_of_rope_settings_matches_transformers(tmp_path):
    checkpoint = write_checkpoint(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3)
    edit_config(tmp_path, rope_parameters=..., rope_theta=500000.0, rope_scaling=LLAMA3)
    assert_same_logits(load(tmp_path), checkpoint.reference, random_tokens(300))


def test_old_checkpoints_may_carry_rotary_frequencies(checkpoint):
    edit_tensors(checkpoint.path, lambda tensors: tensors.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


def test_CL_06_paths_with_spaces_and_letters_of_any_script_work(tmp_path):
    folder = tmp_path / "mein schönes Modell – 模型 'π'"
    checkpoint = write_checkpoint(folder)
    assert_same_logits(load(resolve_model(str(folder))), checkpoint.reference, TOKENS)
    file = folder / "größer 大.GGUF"
    write_gguf(file, checkpoint.reference)
    assert_same_logits(load(resolve_model(str(file))), checkpoint.reference, TOKENS)


def test_relative_paths_and_links_work(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.path.parent)
    (checkpoint.path.parent / "link").symlink_to(checkpoint.path)
    for name in ("model", "./model", "link", "link/"):
        path = resolve_model(name)
        assert path.is_absolute()
        assert load_config(path).hidden_size == 64


# Tied embeddings


def test_ML_01_tied_checkpoint_without_lm_head_loads(tmp_path):
    checkpoint = write_checkpoint(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_logits(model, checkpoint.reference, TOKENS)


@pytest.mark.parametrize("same", [True, False])
def test_ML_01_tied_checkpoint_with_extra_lm_head_loads_as_transformers_does(tmp_path, same):
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.update(
        {"lm_head.weight": tensors["model.embed_tokens.weight"] * (1 if same else 2)}))
    assert_same_logits(load(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path), TOKENS)


def test_ML_01_tied_checkpoint_that_holds_only_the_head_loads_as_transformers_does(tmp_path):
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_same_logits(load(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path), TOKENS)


def test_ML_01_untied_checkpoint_with_lm_head_loads(checkpoint):
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


def test_ML_01_untied_checkpoint_without_lm_head_is_refused_by_name(checkpoint):
    edit_tensors(checkpoint.path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight [512, 64]" in refusal(checkpoint.path)


@pytest.mark.parametrize("value", [..., None])
def test_ML_01_without_the_flag_embeddings_are_not_tied(checkpoint, value):
    edit_config(checkpoint.path, tie_word_embeddings=value)
    assert_same_logits(load(checkpoint.path), checkpoint.reference, TOKENS)


# Folders that do not load


def test_missing_tensors_are_named_with_their_shape(checkpoint):
    edit_tensors(checkpoint.path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert "lacks model.layers.1.self_attn.k_proj.weight [32, 64]" in refusal(checkpoint.path)


@pytest.mark.parametrize("name", [
    "model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight", "lm_head.bias",
    "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight_scale", "lora_A.weight",
])
def test_ML_10_a_tensor_in_the_file_is_never_ignored(checkpoint, name):
    edit_tensors(checkpoint.path, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert f"holds {name} [64], which the model has no place for" in refusal(checkpoint.path)


@pytest.mark.parametrize("switch", ["attention_bias", "mlp_bias"])
def test_ML_10_biases_and_their_switch_must_agree(tmp_path, switch):
    write_checkpoint(tmp_path, **{switch: True})
    edit_config(tmp_path, **{switch: False})
    assert "bias" in refusal(tmp_path)
    write_checkpoint(tmp_path, **{switch: False})
    edit_config(tmp_path, **{switch: True})
    assert "bias" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "shape"), [
    ("model.layers.0.self_attn.k_proj.weight", (64, 64)), ("model.layers.0.mlp.gate_proj.weight", (64, 128)),
    ("model.embed_tokens.weight", (513, 64)), ("model.norm.weight", (64, 1)), ("lm_head.weight", (512, 65)),
])
def test_misshapen_tensors_are_named_with_both_shapes(checkpoint, name, shape):
    found, expected = list(shape), list(checkpoint.reference.state_dict()[name].shape)
    edit_tensors(checkpoint.path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    assert f"holds {name} of shape {found}, expected {expected}" in refusal(checkpoint.path)


def test_ML_07_a_config_that_loses_head_dim_does_not_load(tmp_path):
    write_checkpoint(tmp_path, head_dim=32)
    edit_config(tmp_path, head_dim=...)
    assert "self_attn.q_proj.weight of shape [128, 64], expected [64, 64]" in refusal(tmp_path)


def test_many_problems_make_one_short_line(checkpoint):
    edit_config(checkpoint.path, num_hidden_layers=40)
    message = refusal(checkpoint.path)
    assert "lacks model.layers.2." in message
    assert "more like these" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_ML_09_quantized_tensors_are_refused_even_without_a_quantization_config(checkpoint, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(checkpoint.path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"{name} is stored as" in refusal(checkpoint.path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_safetensors_are_refused(checkpoint, share):
    truncate(checkpoint.path / "model.safetensors", share)
    assert "model.safetensors cannot be read" in refusal(checkpoint.path)


@pytest.mark.parametrize("content", [
    b"not safetensors at all", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", b"\xff" * 100])
def test_other_content_in_a_safetensors_file_is_refused(checkpoint, content):
    (checkpoint.path / "model.safetensors").write_bytes(content)
    assert "model.safetensors cannot be read" in refusal(checkpoint.path)


def test_missing_shards_are_named(tmp_path):
    write_checkpoint(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    assert f"lacks 1 of its {len(shards)} weight files: {shards[1].name}" in refusal(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_broken_shard_indexes_are_refused(tmp_path, index):
    write_checkpoint(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\x00\x01", '{"hidden_size": 64'])
def test_broken_config_json_is_refused(checkpoint, content):
    (checkpoint.path / "config.json").write_text(content)
    assert "config.json" in refusal(checkpoint.path)


def test_config_json_that_is_not_utf8_is_refused(checkpoint):
    (checkpoint.path / "config.json").write_bytes(b'{"name": "\xff\xfe"}')
    assert "config.json cannot be read" in refusal(checkpoint.path)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                  "num_attention_heads"])
def test_config_json_that_lacks_a_size_is_refused_by_name(checkpoint, name):
    edit_config(checkpoint.path, **{name: ...})
    assert f"lacks {name}" in refusal(checkpoint.path)


@pytest.mark.parametrize(("changes", "found"), [
    ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
    ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}, "MistralForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "mistral"}, "mistral"),
    ({"sliding_window": 32}, "sliding_window = 32"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"quantization_config": {"quant_method": "awq", "modules": ["x" * 100] * 100}}, "awq"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...}, "dynamic"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_ML_09_other_families_and_formats_are_refused_with_what_was_found(checkpoint, changes, found):
    edit_config(checkpoint.path, **changes)
    message = refusal(checkpoint.path)
    assert found in message
    assert "supported: " in message
    assert str(checkpoint.path) in message


def test_ML_09_a_folder_with_only_bin_weights_is_refused(checkpoint):
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "pytorch_model.bin")
    message = refusal(checkpoint.path)
    assert "found pytorch_model.bin" in message
    assert "supported: " in message


def test_a_folder_with_a_config_but_no_weights_is_refused(checkpoint):
    (checkpoint.path / "model.safetensors").unlink()
    assert "found no weights" in refusal(checkpoint.path)


# Names of models


def test_CL_06_a_path_that_does_not_exist_is_refused():
    assert "'/no/such' does not exist" in refusal("/no/such")


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "models/no-such.gguf", "a/b/c", "../a/b", "~nobody/x",
                                  "http://example.com/x", "org/näme", "org/", "/", "x" * 5000])
def test_CL_06_what_can_be_no_hub_name_is_refused_without_a_network(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loader, "_find_on_hub", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["README.md", "weights", "model.bin", "model.safetensors"])
def test_CL_06_a_file_that_is_not_gguf_is_refused(tmp_path, name):
    (tmp_path / name).write_text("hello")
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message
    assert "not a .gguf file" in message


def test_CL_06_an_empty_folder_is_refused(tmp_path):
    assert "no config.json (it is empty); supported: " in refusal(tmp_path)


def test_CL_06_a_folder_of_other_things_is_refused_with_some_of_them(tmp_path):
    for name in ("a.txt", "b.gguf", "c", "d", "e", "f"):
        (tmp_path / name).touch()
    assert "(it holds a.txt, b.gguf, c, d, e, ...)" in refusal(tmp_path)


def resolve_in_another_process(name: str, **environment: str) -> tuple[str, float]:
    """What resolve_model does in a fresh process: the hub client reads its environment when it is imported."""
    code = ("import sys\nfrom vllm_mini import loader\nfrom vllm_mini.config import ConfigError\n"
            "import huggingface_hub, time\nstart = time.monotonic()\n"
            "try:\n    print(loader.resolve_model(sys.argv[1]))\n"
            "except ConfigError as error:\n    print('ConfigError', error)\nprint(time.monotonic() - start)")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, name], check=True, timeout=120, text=True,
                          capture_output=True, env={**inherited, **environment}, cwd=Path(__file__).parents[1])
    *output, seconds = done.stdout.splitlines()
    assert len(output) == 1, output
    return output[0], float(seconds)


def test_CL_06_a_hub_name_offline_is_refused_at_once(tmp_path):
    output, seconds = resolve_in_another_process("org/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert output.startswith("ConfigError 'org/name' is not a local folder, and the Hugging Face hub did not provide")
    assert seconds < 5


def test_CL_06_a_hub_that_refuses_the_connection_is_one_line_within_seconds(tmp_path):
    output, seconds = resolve_in_another_process("org/name", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path),
                                                 no_proxy="*")
    assert output.startswith("ConfigError 'org/name' is not a local folder")
    assert seconds < 5


def test_CL_06_a_hub_that_never_answers_is_given_up_within_seconds(tmp_path, monkeypatch):
    def not_cached(*_, **__):
        raise OSError("not cached")

    monkeypatch.setattr(loader, "HUB_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.snapshot_download", not_cached)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: time.sleep(3))
    start = time.monotonic()
    assert "TimeoutError" in refusal("org/name")
    assert time.monotonic() - start < 2


def test_a_hub_name_in_the_local_cache_touches_no_network(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    write_checkpoint(snapshot)
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    trees = tmp_path / "hub" / "models--org--name" / "trees"
    trees.mkdir()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        output, _ = resolve_in_another_process("org/name", HF_HOME=str(tmp_path), **environment)
        assert output == str(snapshot)


def test_the_dummy_is_built_in_and_needs_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = resolve_model("dummy")
    assert load_config(path) is DUMMY_CONFIG
    assert load_generation_config(path) == {}
    model = load_model(path, DUMMY_CONFIG, dtype=torch.float32, device=torch.device("cpu"), seed=5)
    assert torch.equal(model_logits(model, [1, 2, 3]), model_logits(DummyModel(5), [1, 2, 3]))


def test_a_folder_named_dummy_can_still_be_meant(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "dummy")
    monkeypatch.chdir(tmp_path)
    assert_same_logits(load(resolve_model("./dummy")), checkpoint.reference, TOKENS)


def test_load_format_dummy_needs_only_a_config(checkpoint):
    (checkpoint.path / "model.safetensors").unlink()
    config = load_config(checkpoint.path)
    first, same, other = (load_model(checkpoint.path, config, dtype=torch.float32, device=torch.device("cpu"),
                                     load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(model_logits(first, TOKENS), model_logits(same, TOKENS))
    assert not torch.equal(model_logits(first, TOKENS), model_logits(other, TOKENS))


def test_load_format_must_fit_what_is_there(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="'gguf'"):
        load(checkpoint.path, load_format="gguf")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference)
    with pytest.raises(ConfigError, match="'safetensors'"):
        load(file.path, load_format="safetensors")
    assert_same_logits(load(file.path, load_format="gguf"), checkpoint.reference, TOKENS)


def test_generation_config_is_what_the_file_says_or_nothing(checkpoint):
    (checkpoint.path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [0, 2]}')
    assert load_generation_config(checkpoint.path) == {"temperature": 0.6, "eos_token_id": [0, 2]}
    (checkpoint.path / "generation_config.json").unlink()
    assert load_generation_config(checkpoint.path) == {}


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_broken_generation_config_is_refused(checkpoint, content):
    (checkpoint.path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_generation_config(checkpoint.path)


@pytest.mark.parametrize(("value", "expected"), [
    (None, ()), (..., ()), (0, (0,)), (2, (2,)), ([0, 2], (0, 2)), ([], ())])
def test_end_tokens_may_be_absent_null_one_or_several(checkpoint, value, expected):
    edit_config(checkpoint.path, eos_token_id=value)
    assert load_config(checkpoint.path).eos_token_ids == expected


# GGUF files


@pytest.mark.parametrize("changes", [
    {}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 32}, {"tie_word_embeddings": True},
    {"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16}, {"rms_norm_eps": 1e-2},
    {"attention_bias": True, "mlp_bias": True}, {"attention_bias": True, "num_key_value_heads": 1},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
], ids=str)
def test_ML_04_gguf_matches_transformers(tmp_path, changes):
    checkpoint = write_checkpoint(tmp_path / "folder", **changes)
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference)
    config, expected = load_config(file.path), load_config(checkpoint.path)
    assert config.head_dim == expected.head_dim
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    for length in (50, 300):
        assert_same_logits(load(file.path), checkpoint.reference, random_tokens(length))


def test_ML_04_gguf_chooses_the_same_greedy_tokens_as_safetensors(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference)
    models, tokens = (load(checkpoint.path), load(file.path)), [5, 6, 7]
    for _ in range(50):
        first, second = (model_logits(model, tokens)[-1].argmax().item() for model in models)
        assert first == second
        tokens.append(first)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_ML_04_rows_that_are_left_permuted_would_be_noticed(tmp_path, monkeypatch, num_kv_heads):
    checkpoint = write_checkpoint(tmp_path / "folder", num_key_value_heads=num_kv_heads)
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference)
    monkeypatch.setattr(loader, "_join_halves", lambda rows, num_heads: rows)
    difference = model_logits(load(file.path), TOKENS) - reference_logits(checkpoint.reference, TOKENS)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_ML_04_quantized_gguf_equals_its_dequantized_weights(tmp_path, quantization, attention_bias):
    checkpoint = write_checkpoint(tmp_path / "folder", attention_bias=attention_bias)

    def round_trip(arrays: dict[str, np.ndarray]) -> None:
        kind = gguf.GGMLQuantizationType[quantization]
        for name, array in arrays.items():
            if array.ndim > 1:
                arrays[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)

    rounded = write_gguf(tmp_path / "rounded.gguf", checkpoint.reference, edit=round_trip)
    quantized = write_gguf(tmp_path / "quantized.gguf", checkpoint.reference, quantization=quantization)
    torch.testing.assert_close(model_logits(load(quantized.path), TOKENS), model_logits(load(rounded.path), TOKENS),
                               rtol=1e-4, atol=1e-4)


def test_ML_04_q8_0_stays_close_to_the_weights_it_was_made_from(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder", std=0.05)
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, quantization="Q8_0")
    assert_same_logits(load(file.path), checkpoint.reference, TOKENS, tolerance=0.05)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0"])
def test_every_quantization_of_the_gguf_package_is_read_in_slabs(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, row_blocks = 700, 512 // block_size  # 358,400 elements: several slabs, the last one not full
    stored = np.random.default_rng(0).integers(0, 60, (num_rows, row_blocks * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = torch.empty(num_rows, 512)
    GGUFFile(tmp_path / "model.gguf").copy_to("x", values)
    assert torch.equal(values, torch.from_numpy(gguf.quants.dequantize(stored, kind)))


def test_ML_11_gguf_metadata_is_read_as_the_gguf_package_reads_it(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder")
    path = tmp_path / "model.gguf"
    write_gguf(path, checkpoint.reference, tokenizer=True, metadata={"general.name": "Größe 模型", "x.flag": True})
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]


@pytest.mark.parametrize(("metadata", "expected"), [
    ({}, ()), ({"tokenizer.ggml.eos_token_id": 2}, (2,)), ({"tokenizer.ggml.eot_token_id": 0}, (0,)),
    ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}, (2, 7)),
], ids=str)
def test_gguf_end_tokens_are_eos_and_eot(tmp_path, metadata, expected):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, metadata=metadata)
    assert load_config(file.path).eos_token_ids == expected


def test_gguf_with_only_the_required_metadata_loads(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder", num_key_value_heads=4, rope_theta=10000.0)
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
                "rope.dimension_count", "vocab_size")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference,
                      metadata={f"llama.{key}": None for key in optional})
    assert_same_logits(load(file.path), checkpoint.reference, TOKENS)


def test_gguf_linear_scaling_in_its_oldest_spelling_matches_transformers(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder", rope_scaling={"rope_type": "linear", "factor": 4.0})
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, metadata={
        "llama.rope.scaling.type": None, "llama.rope.scaling.factor": None, "llama.rope.scale_linear": 4.0})
    assert_same_logits(load(file.path), checkpoint.reference, TOKENS)


@pytest.mark.parametrize(("metadata", "found"), [
    ({"llama.expert_count": 8}, "expert_count = 8"),
    ({"llama.attention.sliding_window": 32}, "sliding_window = 32"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
    ({"llama.rope.scaling.type": "linear"}, "factor"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8"),
    ({"llama.attention.value_length": 32}, "attention.value_length = 32"),
    ({"llama.attention.head_count_kv": [2, 2]}, "num_key_value_heads must be a positive integer, found [2, 2]"),
    ({"llama.logit_scale": 0.5}, "logit_scale"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"llama.block_count": None}, "lacks num_hidden_layers"),
    ({"llama.block_count": 3}, "lacks model.layers.2."),
    ({"llama.block_count": 1}, "holds model.layers.1."),
], ids=str)
def test_ML_09_gguf_metadata_that_would_have_to_be_ignored_is_refused(tmp_path, metadata, found):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, metadata=metadata)
    message = refusal(file.path)
    assert found in message
    assert str(file.path) in message


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "llama4", "mistral3", "falcon"])
def test_ML_09_gguf_of_another_architecture_is_refused(tmp_path, architecture):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, architecture=architecture)
    assert f"architecture '{architecture}' is not supported; supported: 'llama'" in refusal(file.path)


@pytest.mark.parametrize(("name", "found"), [
    ("blk.0.attn_q_norm.weight", "holds blk.0.attn_q_norm.weight"), ("blk.0.attn_q.bias", "bias"),
    ("blk.0.ffn_gate_exps.weight", "holds blk.0.ffn_gate_exps.weight"),
    ("rope_factors_long.weight", "holds rope_factors_long.weight"),
])
def test_gguf_tensors_that_llama_does_not_have_are_refused(tmp_path, name, found):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference,
                      edit=lambda arrays: arrays.update({name: np.zeros(64, np.float32)}))
    assert found in refusal(file.path)


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "token_embd.weight", "output_norm.weight"])
def test_gguf_without_a_tensor_is_refused(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, edit=lambda arrays: arrays.pop(name))
    refusal(file.path)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.0001, 0.001, 0.01, 0.3, 0.7, 0.9999])
def test_truncated_gguf_is_refused(tmp_path, share):
    checkpoint = write_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", checkpoint.reference, tokenizer=True)
    truncate(file.path, share)
    assert str(file.path) in refusal(file.path)


def test_a_gguf_file_that_was_cut_off_is_noticed_before_its_weights_are_read(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "folder").reference)
    truncate(file.path, 0.9)
    with pytest.raises(ConfigError, match=r"ends inside .* it was cut off"):
        load_config(file.path)


@pytest.mark.parametrize("content", [
    b"GGML" + bytes(100), b"# README\n", b"GGUF", b"GGUF" + struct.pack("<I", 1) + bytes(100),
    b"GGUF" + struct.pack(">I", 3) + bytes(100), b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(1000),
    b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 1000, b"GGUF" + struct.pack("<IQQ", 3, 0, 0)])
def test_files_that_only_claim_to_be_gguf_are_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in refusal(path)


def test_damage_anywhere_in_a_gguf_header_is_an_error_of_one_line_or_none(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "folder", num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", checkpoint.reference).path
    content = path.read_bytes()
    random, messages = np.random.default_rng(0), []
    for _ in range(200):
        damaged = bytearray(content)
        for position in random.integers(0, 2000, 3):
            damaged[position] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            config = load_config(path)
            if config.num_hidden_layers * config.hidden_size < 2000:  # a damaged size may also be a huge one
                load_model(path, config, dtype=torch.float32, device=torch.device("cpu"))
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


# The real model


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path):
    from transformers import AutoModelForCausalLM, GgufConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32).eval()


def test_the_real_model_matches_transformers(smollm2_path, smollm2_reference):
    config = load_config(smollm2_path)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((2,), True)
    assert_same_logits(load(smollm2_path), smollm2_reference, random_tokens(100, vocab_size=49152), tolerance=1e-3)


def test_checkpoints_with_a_byte_tokenizer_are_what_transformers_reads(tmp_path):
    write_checkpoint(tmp_path)
    write_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "héllo 模 <|im_end|>"
    assert tokenizer.encode(text) == [*"héllo 模 ".encode(), 258]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
