"""The compiled kernels against the formulas in float64 and against plain PyTorch, and what happens where they cannot run."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.checkpoints import random_tokens, write_checkpoint
from tests.test_paged_attention import run_paged
from vllm_mini import LLM, SamplingParams, cpu_kernels
from vllm_mini.config import ConfigError
from vllm_mini.cpu_kernels import CpuAttention, KernelsUnavailable, build_kernels, load_kernels, unsupported
from vllm_mini.llama import apply_rope
from vllm_mini.loader import load_config
from vllm_mini.paged_attention import TorchAttention

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, cpu_kernels.COMPILERS)), reason="no C++ compiler")
BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels():
    return load_kernels()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 49, 130])
@pytest.mark.parametrize(("num_inputs", "num_columns"), [(64, 50), (576, 960), (1536, 577)])
def test_linear_is_the_exact_product_rounded_once(kernels, num_rows, num_inputs, num_columns):
    x, weight, bias = random(num_rows, num_inputs), random(num_columns, num_inputs, seed=1), random(num_columns, seed=2)
    exact = x.double() @ weight.double().T
    difference = (kernels.pack_linear(weight, None)(x).double() - exact).abs()
    assert torch.all(difference <= exact.abs() * 2**-8 + 1e-4)
    expected = (exact.to(BFLOAT16) + bias).double()
    assert torch.all((kernels.pack_linear(weight, bias)(x).double() - expected).abs() <= exact.abs() * 2**-7 + 2**-6)


@needs_compiler
def test_a_row_of_linear_has_the_same_bits_in_any_batch(kernels):
    x, layer = random(130, 96), kernels.pack_linear(random(70, 96, seed=1), None)
    together = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(len(x)))
    assert torch.equal(layer(x[40:77]), together[40:77])


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_small_operations_equal_the_formulas(kernels, num_tokens):
    x, weight = random(num_tokens, 96), random(96, seed=1)
    exact = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    norm = kernels.rms_norm(x, weight, 1e-5).double()
    assert torch.all((norm - weight.double() * exact).abs() <= (weight.double() * exact).abs() * 2**-7 + 1e-6)

    gate_up = 5 * random(num_tokens, 2 * 72, seed=2)
    gate, up = gate_up.split(72, dim=1)
    exact = F.silu(gate.double()) * up.double()
    assert torch.all((kernels.silu_and_mul(gate_up).double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6)

    angles = torch.outer(torch.arange(num_tokens), torch.arange(32) / 7).repeat(1, 2)
    cos, sin = (part.to(BFLOAT16)[:, None] for part in (angles.cos(), angles.sin()))
    qkv = random(num_tokens, 5 * 64, seed=3)  # a view of a wider row, as the model has it
    turned = qkv.view(num_tokens, 5, 64)[:, :3]
    expected, others = apply_rope(turned, cos, sin), qkv[:, 3 * 64 :].clone()
    kernels.rotary_(turned, cos, sin)
    torch.testing.assert_close(turned, expected, rtol=2**-7, atol=2**-7)
    assert torch.equal(qkv[:, 3 * 64 :], others)


@needs_compiler
def test_silu_of_extreme_gates_is_silu(kernels):
    gate_up = torch.tensor([[-3e38, -1e4, -90.0, 0.0, 90.0, 1e4, 3e38, 1.0] + [1.0] * 8]).to(BFLOAT16)
    expected = F.silu(gate_up[0, :8].double())
    torch.testing.assert_close(kernels.silu_and_mul(gate_up)[0].double(), expected, rtol=2**-8, atol=1e-36)


SIZES = [(1, 1), (1, 16), (1, 17), (5, 5), (40, 100), (70, 70), (1, 1024), (1, 1025), (1, 2500), (200, 1200)]


@needs_compiler
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 256)])
@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_attention_is_as_near_to_the_exact_value_as_plain_pytorch(kernels, heads, fill):
    num_heads, num_kv_heads, head_dim = heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16,
             "dtype": BFLOAT16, "fill": fill}
    paged, dense = run_paged(CpuAttention(kernels, num_heads, num_kv_heads), SIZES, **shape)
    plain, _ = run_paged(TorchAttention(), SIZES, **shape)
    error, plain_error = ((result.double() - dense).abs().max() for result in (paged, plain))
    assert error <= max(1.1 * plain_error, 2**-7)


@needs_compiler
@pytest.mark.parametrize("seed", range(8))
def test_attention_on_random_batches(kernels, seed):
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.integers(1, 4))
    num_heads = num_kv_heads * int(rng.integers(1, 5))
    lengths = rng.integers(1, 300, size=rng.integers(1, 9))
    sizes = [(int(rng.integers(1, length + 1)) if rng.random() < 0.5 else 1, int(length)) for length in lengths]
    paged, dense = run_paged(CpuAttention(kernels, num_heads, num_kv_heads), sizes, num_heads=num_heads, seed=seed,
                             num_kv_heads=num_kv_heads, head_dim=32, block_size=16, dtype=BFLOAT16)
    assert (paged.double() - dense).abs().max() <= 2**-6


def engine_and_requests(path, **settings):
    llm = LLM(str(path), dtype="bfloat16", num_kv_blocks=64, **settings)
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 40, 130)]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=1, ignore_eos=True)
    return llm, prompts, params


@needs_compiler
def test_greedy_answers_are_the_same_alone_in_a_batch_and_in_chunks(tmp_path):
    path = write_checkpoint(tmp_path, head_dim=32).path
    llm, prompts, params = engine_and_requests(path, attention_backend="cpp", max_num_batched_tokens=512)
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, progress=False)]
    alone = [llm.generate(prompt, params, progress=False)[0].outputs[0].token_ids for prompt in prompts]
    chunked, _, _ = engine_and_requests(path, attention_backend="cpp", max_num_batched_tokens=32)
    assert together == alone
    assert together == [answer.outputs[0].token_ids for answer in chunked.generate(prompts, params, progress=False)]


def test_what_cannot_run_falls_back_and_is_refused_where_asked_for(tmp_path, monkeypatch, caplog):
    path = write_checkpoint(tmp_path, head_dim=32).path
    with pytest.raises(ConfigError, match="attention_backend 'cpp' cannot be used: they compute in bfloat16, not float32"):
        LLM(str(path), dtype="float32", num_kv_blocks=8, attention_backend="cpp")

    monkeypatch.setattr(cpu_kernels, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        LLM(str(path), dtype="bfloat16", num_kv_blocks=8, attention_backend="cpp")
    with caplog.at_level("INFO"):
        llm = LLM(str(path), dtype="bfloat16", num_kv_blocks=8)
    assert "plain PyTorch, because no C++ compiler (no-such-compiler) was found" in caplog.text
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), progress=False)[0].outputs[0].token_ids


@needs_compiler
def test_a_compiler_that_fails_or_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="could not be built"):
        build_kernels(tmp_path / "file" / "cache")
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return undeclared; }")
    monkeypatch.setattr(cpu_kernels, "SOURCE", broken)
    with pytest.raises(KernelsUnavailable, match="undeclared"):
        build_kernels(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
def test_the_library_is_built_once(tmp_path, monkeypatch):
    first = build_kernels(tmp_path)
    monkeypatch.setattr(cpu_kernels.subprocess, "run", None)
    assert build_kernels(tmp_path) == first


@pytest.mark.parametrize(("change", "message"), [
    ({"head_dim": 16}, "head_dim must be a multiple of 32 up to 256"), ({"head_dim": 288}, "found 288"),
    ({"intermediate_size": 129}, "129"), ({"num_attention_heads": 97, "num_key_value_heads": 1}, "at most 96 query heads"),
])
def test_shapes_that_the_kernels_do_not_take_are_named(tmp_path, change, message):
    config = dataclasses.replace(load_config(write_checkpoint(tmp_path, head_dim=32).path), **change)
    assert message in (unsupported(config, BFLOAT16, 16) or "")


def test_blocks_must_hold_whole_groups_of_keys(tmp_path):
    config = load_config(write_checkpoint(tmp_path, head_dim=32).path)
    assert unsupported(config, BFLOAT16, 32) is None
    assert "block_size must be a multiple of 16, found 8" in (unsupported(config, BFLOAT16, 8) or "")
