"""Paged attention against dense attention written out by hand, on random shapes and scattered blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_mini.paged_attention import (
    AttentionMetadata,
    Block,
    BlockManager,
    TorchAttention,
    allocate_kv_cache,
    copy_blocks,
)


def dense_attention(query, keys, values):
    """One sequence by the formula, float64: query [Q, H, D] are the last Q of the L positions of keys [L, KVH, D]."""
    num_queries, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = keys.shape
    output = torch.empty(num_queries, num_heads, head_dim, dtype=torch.float64)
    for head in range(num_heads):
        k = keys[:, head * num_kv_heads // num_heads].double()
        v = values[:, head * num_kv_heads // num_heads].double()
        for row in range(num_queries):
            last = length - num_queries + row + 1
            scores = (k[:last] @ query[row, head].double()) / head_dim**0.5
            output[row, head] = scores.softmax(0) @ v[:last]
    return output


def run_paged(backend, sizes, *, num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, fill=0.0,
              seed=0):
    """Attention for sequences of (query_len, seq_len) over randomly scattered blocks; returns (paged, dense) outputs."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-length // block_size) for _, length in sizes) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    cache = allocate_kv_cache(num_blocks, block_size, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim,
                              dtype=dtype, device=torch.device("cpu")).fill_(fill)
    tables = [[shuffled.pop() for _ in range(-(-length // block_size))] for _, length in sizes]
    padded = np.zeros((len(sizes), max(map(len, tables))), dtype=np.int64)
    queries, new_keys, new_values, slots, expected = [], [], [], [], []
    for row, ((query_len, length), table) in enumerate(zip(sizes, tables)):
        padded[row, : len(table)] = table
        q = torch.randn(query_len, num_heads, head_dim, generator=generator).to(dtype)
        k = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        v = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length - query_len):
            cache[0, 0, table[position // block_size], position % block_size] = k[position]
            cache[1, 0, table[position // block_size], position % block_size] = v[position]
        queries.append(q)
        new_keys.append(k[length - query_len :])
        new_values.append(v[length - query_len :])
        slots += [table[p // block_size] * block_size + p % block_size for p in range(length - query_len, length)]
        expected.append(dense_attention(q, k, v))
    query_lens = np.array([query_len for query_len, _ in sizes])
    metadata = AttentionMetadata(np.concatenate([[0], query_lens.cumsum()]), np.array([length for _, length in sizes]),
                                 padded, torch.tensor(slots), block_size)
    attention = BACKENDS[backend]() if isinstance(backend, str) else backend
    output = attention.forward(torch.cat(queries), torch.cat(new_keys), torch.cat(new_values), cache[0, 0], cache[1, 0],
                               attention.prepare(metadata))
    return output, torch.cat(expected)


BACKENDS = {"torch": TorchAttention}
SHAPES = [
    [(1, 1)],
    [(1, 17), (1, 4), (1, 300)],
    [(5, 5)],
    [(7, 20), (1, 9), (33, 33), (1, 1)],
    [(100, 100), (1, 64), (3, 500), (2, 2), (64, 128)],
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize("sizes", SHAPES)
def test_paged_attention_equals_dense_attention(backend, heads, sizes):
    paged, dense = run_paged(backend, sizes, num_heads=heads[0], num_kv_heads=heads[1])
    torch.testing.assert_close(paged.double(), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_paged_attention_equals_dense_attention_on_random_batches(backend):
    rng = np.random.default_rng(0)
    for seed in range(40):
        sizes = []
        for _ in range(rng.integers(1, 12)):
            length = int(rng.integers(1, 80))
            sizes.append((int(rng.integers(1, length + 1)) if rng.random() < 0.5 else 1, length))
        paged, dense = run_paged(backend, sizes, block_size=int(rng.choice([1, 2, 4, 16, 32])), seed=seed)
        torch.testing.assert_close(paged.double(), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e38])
def test_NU_01_whatever_unwritten_slots_hold_changes_nothing(backend, fill):
    for sizes in SHAPES:
        dirty, _ = run_paged(backend, sizes, fill=fill)
        clean, _ = run_paged(backend, sizes)
        assert torch.equal(dirty, clean)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_paged_attention_in_half_precision_stays_near_the_exact_value(backend, dtype):
    paged, dense = run_paged(backend, SHAPES[-1], dtype=dtype, head_dim=64)
    torch.testing.assert_close(paged.double(), dense, rtol=2e-2, atol=2e-2)


def test_copied_blocks_are_equal_in_every_layer_and_all_are_read_before_one_is_written():
    cache = torch.randn(2, 3, 6, 4, 2, 8)
    before = cache.clone()
    copy_blocks(cache, cache, [(0, 1), (1, 2)])
    assert torch.equal(cache[:, :, 1], before[:, :, 0])
    assert torch.equal(cache[:, :, 2], before[:, :, 1])
    assert torch.equal(cache[:, :, 3:], before[:, :, 3:])
    assert torch.equal(cache[:, :, 0], before[:, :, 0])


def test_block_is_a_view_of_the_pool_and_shows_the_managers_count():
    cache = torch.zeros(2, 3, 6, 4, 2, 8)
    manager = BlockManager(6, 4)
    manager.ref_counts[5] = 2
    block = Block(5, manager, cache)
    block.k_cache[1, 2] = 7.0
    block.v_cache[0, 0] = 8.0
    assert block.ref_count == 2
    assert block.k_cache.shape == (3, 4, 2, 8)
    assert (cache[0, 1, 5, 2] == 7).all()
    assert (cache[1, 0, 5, 0] == 8).all()
    assert cache.count_nonzero() == 32
