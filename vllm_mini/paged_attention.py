"""The K/V storage, and attention over it through block tables. Does not know sequences, requests or queues.

All K/V lives in one pool tensor [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]; block_id and offset
name a slot, slot = block_id * block_size + offset, the same in every layer (Kwon et al. 2023, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mini.block_manager import BlockManager

__all__ = ["AttentionBackend", "AttentionMetadata", "Block", "BlockManager", "TorchAttention", "allocate_kv_cache",
           "copy_blocks"]


def allocate_kv_cache(
    num_blocks: int, block_size: int, *, num_layers: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:
    """The pool [2 (K, V), num_layers, num_blocks, block_size, num_kv_heads, head_dim]. Not cleared: nothing reads a slot
    before it was written, and pages never touched cost no memory."""
    return torch.empty((2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), dtype=dtype, device=device)


def copy_blocks(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source block, target block) in all layers, between two pools or in one; reads before writing."""
    if pairs:
        from_ids, to_ids = torch.tensor(pairs).T  # [num_pairs] each
        target[:, :, to_ids.to(target.device)] = source[:, :, from_ids.to(source.device)].to(target.device)


@dataclass(frozen=True)
class Block:
    """One physical block as the paper draws it: a window on the pool and on the block manager's count, holding neither."""

    block_id: int
    block_manager: BlockManager
    kv_cache: Tensor

    @property
    def ref_count(self) -> int:
        return self.block_manager.ref_counts[self.block_id]

    @property
    def k_cache(self) -> Tensor:
        return self.kv_cache[0, :, self.block_id]  # [num_layers, block_size, num_kv_heads, head_dim]

    @property
    def v_cache(self) -> Tensor:
        return self.kv_cache[1, :, self.block_id]  # [num_layers, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens belong. Sequence i owns the tokens [query_start_loc[i], query_start_loc[i + 1])."""

    query_start_loc: np.ndarray  # [num_seqs + 1]
    seq_lens: np.ndarray  # [num_seqs], stored tokens once this step's are written
    block_table: np.ndarray  # [num_seqs, max_num_blocks], rows padded with anything
    slot_mapping: Tensor  # [num_tokens], where each token's K/V goes
    block_size: int


class AttentionBackend(Protocol):
    """Writes K/V and attends. Everything that is the same in all layers is done once a step, in `prepare`."""

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata with whatever this backend derives from it; what it returns goes to `forward`."""
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Store one layer's K/V of ALL tokens, then attend causally with scale 1/sqrt(head_dim).

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]. Returns the shape of query.
        """
        ...


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of about the same query and context length, as one rectangle."""

    query_index: Tensor  # [num_seqs, max_query_len], token of the step; padding repeats the last one
    is_query: Tensor | None  # [num_seqs, max_query_len], False on padding; None when there is none
    kv_slots: Tensor  # [num_seqs * max_seq_len]; padding repeats the sequence's first slot, which is always written
    mask: Tensor  # [num_seqs, 1, max_query_len, max_seq_len], True where a query may look


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    groups: tuple[PaddedGroup, ...] = ()


class TorchAttention:
    """The reference: gather each sequence's K/V through its block table, then PyTorch's attention. Any device, any dtype.

    The loop runs over groups of like size (powers of 2 in the query, of 4 in the context), never over sequences.
    """

    def prepare(self, metadata: AttentionMetadata) -> GroupedMetadata:
        query_lens = np.diff(metadata.query_start_loc)
        size_class = np.stack([np.ceil(np.log2(query_lens)), np.ceil(np.log2(metadata.seq_lens) / 2)], axis=1)
        _, group_of = np.unique(size_class, axis=0, return_inverse=True)
        group_of = group_of.reshape(-1)
        groups = tuple(self._pad(metadata, query_lens, np.flatnonzero(group_of == group))
                       for group in range(group_of.max() + 1))
        return GroupedMetadata(**vars(metadata), groups=groups)

    @staticmethod
    def _pad(metadata: AttentionMetadata, query_lens: np.ndarray, rows: np.ndarray) -> PaddedGroup:
        device = metadata.slot_mapping.device
        query_lens, seq_lens = query_lens[rows, None], metadata.seq_lens[rows, None]  # [num_seqs, 1] each
        query_offset = np.arange(query_lens.max())[None]  # [1, max_query_len]
        last_offset = np.minimum(query_offset, query_lens - 1)
        query_index = metadata.query_start_loc[rows, None] + last_offset
        query_position = seq_lens - query_lens + last_offset  # [num_seqs, max_query_len], in its sequence
        key_position = np.arange(seq_lens.max())[None]  # [1, max_seq_len]
        stored = np.where(key_position < seq_lens, key_position, 0)  # [num_seqs, max_seq_len]
        blocks = np.take_along_axis(metadata.block_table[rows], stored // metadata.block_size, axis=1)
        kv_slots = blocks * metadata.block_size + stored % metadata.block_size
        mask = key_position[:, None, None] <= query_position[:, None, :, None]
        is_query = query_offset < query_lens
        return PaddedGroup(
            query_index=torch.from_numpy(query_index).to(device),
            is_query=None if is_query.all() else torch.from_numpy(is_query).to(device),
            kv_slots=torch.from_numpy(kv_slots.reshape(-1)).to(device),
            mask=torch.from_numpy(mask).to(device),
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        assert isinstance(metadata, GroupedMetadata)
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [num_slots, num_kv_heads, head_dim]
        k_slots.index_copy_(0, metadata.slot_mapping, key)
        v_slots.index_copy_(0, metadata.slot_mapping, value)
        output = torch.empty_like(query)
        for group in metadata.groups:
            attended = _attend(query, k_slots, v_slots, group)
            if group.is_query is None:
                output[group.query_index] = attended
            else:
                output[group.query_index[group.is_query]] = attended[group.is_query]
        return output


def _attend(query: Tensor, k_slots: Tensor, v_slots: Tensor, group: PaddedGroup) -> Tensor:
    """Attention of one group: [num_seqs, max_query_len, num_heads, head_dim]."""
    num_seqs, query_len = group.query_index.shape
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = k_slots.shape[1]
    q = query[group.query_index].transpose(1, 2)  # [num_seqs, num_heads, max_query_len, head_dim]
    kv_shape = (num_seqs, -1, num_kv_heads, head_dim)
    # keys and values: [num_seqs, num_kv_heads, max_seq_len, head_dim]
    k = k_slots.index_select(0, group.kv_slots).view(kv_shape).transpose(1, 2)
    v = v_slots.index_select(0, group.kv_slots).view(kv_shape).transpose(1, 2)
    if query_len == 1:  # the heads that share a K/V head become rows of one query, so K/V is read once for all of them
        q = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=q.shape[1] != num_kv_heads)
    return attended.reshape(num_seqs, num_heads, query_len, head_dim).transpose(1, 2)
