"""A model that was exported is the same model, to our loader and to transformers."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import (
    SPECIAL_TOKENS,
    Checkpoint,
    assert_same_logits,
    load,
    make_reference,
    random_tokens,
    write_byte_tokenizer,
    write_checkpoint,
    write_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_mini.cli import main
from vllm_mini.config import ConfigError
from vllm_mini.export import export_hf
from vllm_mini.llm import LLM
from vllm_mini.loader import load_config, load_generation_config
from vllm_mini.sequence import SamplingParams
from vllm_mini.tokenizer import Tokenizer
from vllm_mini.tokenizer_files import BYTE_ALPHABET

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt 7+12? 🙂"}]
TEXT = "Hello <|im_end|> 1234 wörld\n\n  x"


def make_folder(path, **config) -> Checkpoint:
    checkpoint = write_checkpoint(path, **config)
    write_byte_tokenizer(path)
    return checkpoint


def make_gguf(path, **config) -> Checkpoint:
    tokens = [*BYTE_ALPHABET, *SPECIAL_TOKENS, "el"]  # a merge that can be made
    return write_gguf(path.with_suffix(".gguf"), make_reference(**config), tokenizer=True, metadata={
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL_TOKENS) + [1],
        "tokenizer.ggml.merges": ["e l"]})


def assert_same_weights(one, other):
    expected, found = one.checkpoint_tensors(), other.checkpoint_tensors()
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def greedy(model) -> list[int]:
    llm = LLM(str(model), dtype="float32", num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=24)
    (result,) = llm.generate([random_tokens(40, vocab_size=256)], params, progress=False)
    return result.outputs[0].token_ids


@pytest.mark.parametrize("make", [make_folder, make_gguf])
@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"head_dim": 32, "num_key_value_heads": 1},
    {"attention_bias": True, "mlp_bias": True},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
], ids=str)
def test_an_exported_model_loads_as_the_same_weights_here_and_in_transformers(tmp_path, make, changes):
    checkpoint = make(tmp_path / "model", **changes)
    folder = export_hf(str(checkpoint.path), tmp_path / "out", dtype="float32")
    assert_same_weights(load(checkpoint.path), load(folder))
    before, after = load_config(checkpoint.path), load_config(folder)
    assert (after.rope_theta, dict(after.rope_scaling), after.rms_norm_eps) == (
        before.rope_theta, dict(before.rope_scaling), before.rms_norm_eps)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same_logits(load(checkpoint.path), theirs, random_tokens(50))
    assert greedy(checkpoint.path) == greedy(folder)


def test_a_folder_with_llama3_frequencies_keeps_them(tmp_path):
    checkpoint = make_folder(tmp_path / "model", rope_theta=500000.0, rope_scaling=LLAMA3)
    folder = export_hf(str(checkpoint.path), tmp_path / "out", dtype="float32")
    assert_same_logits(load(folder), checkpoint.reference, random_tokens(300))
    assert_same_logits(load(folder), AutoModelForCausalLM.from_pretrained(folder), random_tokens(300))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_that_is_asked_for(tmp_path, name):
    checkpoint = make_gguf(tmp_path / "model")
    folder = export_hf(str(checkpoint.path), tmp_path / "out", dtype=name)
    dtype = getattr(torch, name)
    assert_same_weights(load(checkpoint.path, dtype=dtype), load(folder, dtype=dtype))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype


@pytest.mark.parametrize("make", [make_folder, make_gguf])
def test_texts_and_chats_have_the_same_ids_here_and_in_transformers(tmp_path, make):
    checkpoint = make(tmp_path / "model")
    folder = export_hf(str(checkpoint.path), tmp_path / "out")
    before, after = Tokenizer.from_model(checkpoint.path), Tokenizer.from_model(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert before.encode(TEXT) == after.encode(TEXT) == theirs.encode(TEXT)
    chat = before.render_chat(MESSAGES)
    assert chat == after.render_chat(MESSAGES)
    assert chat == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert (before.eos_token_ids, before.bos_token_id) == (after.eos_token_ids, after.bos_token_id)
    assert before.decode(before.encode(chat)) == theirs.decode(theirs.encode(chat), skip_special_tokens=True)


def test_the_real_model_keeps_weights_ends_and_ids(tmp_path, smollm2_path):
    folder = export_hf(str(smollm2_path), tmp_path / "out")
    assert_same_weights(load(smollm2_path, dtype=torch.bfloat16), load(folder, dtype=torch.bfloat16))
    before, theirs = Tokenizer.from_model(smollm2_path), AutoTokenizer.from_pretrained(folder)
    assert before.encode(TEXT) == theirs.encode(TEXT)
    assert before.encode_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert load_config(folder).eos_token_ids == load_config(smollm2_path).eos_token_ids == (2,)


def test_the_models_own_sampling_defaults_go_with_it(tmp_path):
    checkpoint = make_folder(tmp_path / "model")
    (checkpoint.path / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": [3, 4]}')
    folder = export_hf(str(checkpoint.path), tmp_path / "out")
    assert load_generation_config(folder) == {"bos_token_id": None, "temperature": 0.3, "eos_token_id": [3, 4]}


def test_the_dummy_and_a_model_without_a_tokenizer_can_be_exported(tmp_path):
    assert_same_weights(load("dummy"), load(export_hf("dummy", tmp_path / "dummy", dtype="float32")))
    assert Tokenizer.from_model(tmp_path / "dummy").encode_chat(MESSAGES) == Tokenizer.from_model(None).encode_chat(MESSAGES)
    checkpoint = write_checkpoint(tmp_path / "model")
    folder = export_hf(str(checkpoint.path), tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_nothing_is_overwritten(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    export_hf("dummy", folder)  # empty: fine
    content = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export_hf("dummy", folder, dtype="float32")
    assert (folder / "model.safetensors").read_bytes() == content
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export_hf("dummy", folder / "config.json")


def test_what_config_json_cannot_say_is_refused_before_anything_is_written(tmp_path):
    reference = make_reference(rope_theta=500000.0, rope_scaling=LLAMA3)
    checkpoint = write_gguf(tmp_path / "model.gguf", reference)
    with pytest.raises(ConfigError, match="factors of their own"):
        export_hf(str(checkpoint.path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="dtype must be one of bfloat16, float16, float32; found 'int8'"):
        export_hf("dummy", tmp_path / "out", dtype="int8")


def test_the_command_says_where_the_folder_is_and_fails_in_one_line(tmp_path, capsys):
    assert main(["export-hf", "--model", "dummy", str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"
    assert main(["export-hf", "--model", "dummy", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["export-hf", "--model", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 1
    assert "does not exist" in capsys.readouterr().err
