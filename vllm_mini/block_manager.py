"""Which physical block holds which tokens: tables, reference counts, prefix hits, forks, host blocks.

It moves block ids, never K/V: what has to be copied is handed out as `Transfers`. It does not know tensors or queues.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_mini.sequence import Sequence, SequenceStatus

__all__ = ["BlockEvent", "BlockManager", "Demand", "Transfers"]


class BlockEvent(NamedTuple):
    """One thing that happened to blocks, for whoever watches."""

    kind: str  # "allocate", "share", "fork", "copy", "swap_out", "swap_in", "release" or "evict"
    seq_id: int  # -1 for "evict": the block belonged to nobody any more
    block_ids: tuple[int, ...]


class Demand(NamedTuple):
    """What a sequence would take if it were admitted now."""

    hits: list[int]  # cached blocks that it would share
    num_new: int  # blocks
    num_free: int  # blocks, less the hits that are free


@dataclass
class Transfers:
    """Copies the device must make before a step's forward pass, in this order; each kind reads all before it writes."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), both on the device


class BlockManager:
    """The paper's KV block manager (Kwon et al. 2023, section 4.3) with prefix sharing by chain hash.

    A free block keeps its content and stays in the prefix index until somebody takes it, so one ordered map,
    `free_blocks`, is the free list and the LRU of old prefixes: taken from the front, released to the back.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.block_tables: dict[int, list[int]] = {}  # seq_id -> its block_table, while it holds device blocks
        self.block_hashes: list[bytes | None] = [None] * num_blocks  # what each indexed block holds
        self.cached_blocks: dict[bytes, int] = {}  # the prefix index: hash -> block; the first owner of a hash keeps it
        self.num_host_blocks = num_host_blocks
        self.free_host_blocks = list(range(num_host_blocks))
        self.host_tables: dict[int, list[int]] = {}  # seq_id -> its host_blocks, while it is swapped out
        self.events: list[BlockEvent] = []
        self.num_prefix_queries = 0  # prompt tokens looked up at first admission
        self.num_prefix_hits = 0  # of these, tokens found
        self._transfers = Transfers()

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def demand(self, seq: Sequence) -> Demand:
        """The blocks that all known tokens of a sequence without device blocks need."""
        hits = [] if seq.host_blocks else self._find_prefix(seq)
        num_free = len(self.free_blocks) - sum(self.ref_counts[block_id] == 0 for block_id in hits)
        return Demand(hits, self.num_blocks_for(seq.num_tokens) - len(hits), num_free)

    def admit(self, seq: Sequence, *, headroom: int = 0) -> bool:
        """Give `seq` blocks for all its known tokens, shared ones where its prefix is cached; False changes nothing.

        Refuses unless `headroom` more blocks stay free. Sets num_computed_tokens to what needs no computing; a
        swapped-out sequence gets its K/V copied back instead and goes on where it was.
        """
        hits, num_new, num_free = self.demand(seq)
        if num_new + headroom > num_free:
            return False
        for block_id in hits:
            self._acquire(block_id)
        fresh = tuple(self._take() for _ in range(num_new))
        seq.block_table = self.block_tables[seq.seq_id] = hits + list(fresh)
        if hits:
            self._note("share", seq, hits)
        if seq.host_blocks:
            self._swap_in(seq)
        else:
            self._note("allocate", seq, fresh)
            seq.num_computed_tokens = len(hits) * self.block_size
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_computed_tokens
            if self.enable_prefix_caching:
                self.num_prefix_queries += seq.num_prompt_tokens
                self.num_prefix_hits += seq.num_computed_tokens
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make the next step of a running sequence writable; False (nothing changed) when blocks are lacking.

        Covers all known tokens with blocks, and gives it a copy of the block it is about to write if others hold that
        one too: copy-on-write (the paper's section 4.4).
        """
        table = seq.block_table
        num_new = self.num_blocks_for(seq.num_tokens) - len(table)
        write_index = seq.num_computed_tokens // self.block_size
        must_copy = write_index < len(table) and self.ref_counts[table[write_index]] > 1
        if num_new + must_copy > len(self.free_blocks):
            return False
        if must_copy:
            source, target = table[write_index], self._take()
            self._drop(source)
            table[write_index] = target
            self._transfers.copies.append((source, target))
            self._note("copy", seq, (source, target))
        if num_new:
            fresh = [self._take() for _ in range(num_new)]
            table.extend(fresh)
            self._note("allocate", seq, fresh)
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Index the blocks that the next `num_tokens` of `seq` fill, so that others may share them from now on.

        Called when the step is scheduled, before the K/V exists. That is right because in each layer the K/V of the
        whole batch is written before anything attends, and nothing scheduled is withdrawn (see `forget_prefixes`).
        """
        if self.enable_prefix_caching:
            first = seq.num_computed_tokens // self.block_size
            self._index(seq, first, (seq.num_computed_tokens + num_tokens) // self.block_size)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`."""
        child.block_table = self.block_tables[child.seq_id] = list(parent.block_table)
        child.block_hashes = list(parent.block_hashes)
        for block_id in child.block_table:
            self._acquire(block_id)
        self._note("fork", child, child.block_table)

    def swap_out(self, seq: Sequence) -> bool:
        """Have the K/V of `seq` copied to host blocks and release its device blocks; False when they are too few."""
        num_stored = self.num_blocks_for(seq.num_computed_tokens)
        if not 0 < num_stored <= len(self.free_host_blocks):
            return False
        seq.host_blocks = self.host_tables[seq.seq_id] = [self.free_host_blocks.pop() for _ in range(num_stored)]
        self._transfers.swap_out.extend(zip(seq.block_table, seq.host_blocks))
        self._note("swap_out", seq, seq.block_table[:num_stored])
        self._release_device(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """Take back everything `seq` holds, device and host blocks; harmless when it holds nothing."""
        if seq.block_table:
            self._note("release", seq, seq.block_table)
        self._release_device(seq)
        self._release_host(seq)

    def take_transfers(self) -> Transfers:
        """The copies due since the last call."""
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def take_events(self) -> tuple[BlockEvent, ...]:
        """What happened since the last call."""
        events, self.events = tuple(self.events), []
        return events

    def forget_prefixes(self) -> None:
        """Empty the prefix index: after a failed step it may name blocks that were never written."""
        self.cached_blocks.clear()
        self.block_hashes = [None] * self.num_blocks
        self._transfers = Transfers()

    def check(self) -> None:
        """Recount everything from the tables; AssertionError on any difference."""
        held = Counter(block_id for table in self.block_tables.values() for block_id in table)
        for block_id, ref_count in enumerate(self.ref_counts):
            assert ref_count == held[block_id], f"block {block_id}: ref_count {ref_count}, held {held[block_id]} times"
            assert (block_id in self.free_blocks) == (ref_count == 0), f"block {block_id}: free list and ref_count differ"
            block_hash = self.block_hashes[block_id]
            if block_hash is not None:
                assert self.cached_blocks.get(block_hash) == block_id, f"block {block_id}: hash not in the index"
        for seq_id, table in self.block_tables.items():
            assert len(set(table)) == len(table), f"sequence {seq_id} holds a block twice: {table}"
        for block_hash, block_id in self.cached_blocks.items():
            assert self.block_hashes[block_id] == block_hash, f"index names block {block_id} under another hash"
        host = [block_id for table in self.host_tables.values() for block_id in table] + self.free_host_blocks
        assert sorted(host) == list(range(self.num_host_blocks)), "host blocks lost or held twice"

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks of its longest known prefix; never the last token, whose logits somebody needs."""
        if not self.enable_prefix_caching or seq.needs_prompt_logprobs:
            return []
        hits: list[int] = []
        for block_hash in self._hashes(seq, (seq.num_tokens - 1) // self.block_size):
            block_id = self.cached_blocks.get(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _hashes(self, seq: Sequence, num_full_blocks: int) -> list[bytes]:
        """The chain hashes of its first full blocks: each over its tokens and the hash before it, so over all history."""
        hashes = seq.block_hashes
        for index in range(len(hashes), num_full_blocks):
            tokens = array("q", seq.token_ids[index * self.block_size : (index + 1) * self.block_size])
            hashes.append(hashlib.sha256((hashes[-1] if hashes else b"") + tokens.tobytes()).digest())
        return hashes[:num_full_blocks]

    def _index(self, seq: Sequence, first: int, last: int) -> None:
        if first == last:
            return
        hashes = self._hashes(seq, last)
        for index in range(first, last):
            block_id = seq.block_table[index]
            if hashes[index] not in self.cached_blocks:
                self.cached_blocks[hashes[index]] = block_id
                self.block_hashes[block_id] = hashes[index]

    def _swap_in(self, seq: Sequence) -> None:
        self._transfers.swap_in.extend(zip(seq.host_blocks, seq.block_table))
        self._note("swap_in", seq, seq.block_table)
        self._release_host(seq)
        if self.enable_prefix_caching:
            self._index(seq, 0, seq.num_computed_tokens // self.block_size)

    def _acquire(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0:
            del self.free_blocks[block_id]
        self.ref_counts[block_id] += 1

    def _take(self) -> int:
        """The block that was free the longest; what it held is forgotten."""
        block_id, _ = self.free_blocks.popitem(last=False)
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            del self.cached_blocks[block_hash]
            self.block_hashes[block_id] = None
            self.events.append(BlockEvent("evict", -1, (block_id,)))
        self.ref_counts[block_id] = 1
        return block_id

    def _drop(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_blocks[block_id] = None
            if self.block_hashes[block_id] is None:  # holds no prefix anybody could ask for: the first to be taken again
                self.free_blocks.move_to_end(block_id, last=False)

    def _release_device(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):  # last first, so that a chain is evicted from its tail
            self._drop(block_id)
        seq.block_table = []
        self.block_tables.pop(seq.seq_id, None)

    def _release_host(self, seq: Sequence) -> None:
        self.free_host_blocks.extend(seq.host_blocks)
        seq.host_blocks = []
        self.host_tables.pop(seq.seq_id, None)

    def _note(self, kind: str, seq: Sequence, block_ids: list[int] | tuple[int, ...]) -> None:
        self.events.append(BlockEvent(kind, seq.seq_id, tuple(block_ids)))
