// What the engine looked like after each record. Reads records only; knows no screen. The records are described in
// live.py: states in them are the engine's own, so applying one is copying, never guessing.

const MAX_FINISHED = 24; // finished sequences that are remembered

/** Everything that one record, and all before it, tell about the engine. */
export class EngineState {
  constructor(snapshot) {
    this.begin(snapshot);
  }

  begin(snapshot) {
    const earlier = this.seqs;
    this.config = snapshot;
    this.step = snapshot.step;
    this.refCounts = Int32Array.from(snapshot.ref_counts);
    this.hashes = new Map(snapshot.cached.map((id) => [id, snapshot.hashes[id] ?? true])); // block -> hash, where indexed
    this.parents = new Map(); // block -> hash of the block before it
    this.free = snapshot.free;
    this.tables = new Map(Object.entries(snapshot.tables).map(([id, table]) => [Number(id), table]));
    this.contents = new Map(); // free block -> what its last owner left in it
    this.seqs = new Map();
    this.finished = [];
    this.numSeen = this.numSeen ?? 0; // requests met so far: what labels are made of
    this.requests = new Map();
    this.latest = null;
    this.refusal = null; // why the first in line did not get into the last step
    this.stepTime = -1; // of the last step
    this.ownersAt = undefined;
    this.takeTotals(snapshot);
    this.meet(snapshot.seqs, snapshot.time, earlier);
    for (const seq of snapshot.seqs) this.addTokens(this.seqs.get(seq.id), seq.tokens, null);
    this.takeStates(snapshot.states, snapshot.time);
  }

  /** A copy that later records do not change. Token lists only ever grow, so copies share them. */
  clone() {
    const copy = Object.assign(Object.create(EngineState.prototype), this);
    copy.refCounts = this.refCounts.slice();
    for (const name of ["hashes", "parents", "tables", "contents", "requests"]) copy[name] = new Map(this[name]);
    copy.seqs = new Map([...this.seqs].map(([id, seq]) => [id, { ...seq }]));
    copy.finished = this.finished.slice();
    return copy;
  }

  /** What apply(record) is about to overwrite: the little of this state that events are told from. */
  glance(record) {
    return {
      seqs: new Map(record.states.filter(([id]) => this.seqs.has(id)).map(([id]) => [id, { ...this.seqs.get(id) }])),
      tables: new Map(this.tables), refCounts: record.preempted?.length ? this.refCounts.slice() : this.refCounts,
      refusal: this.refusal,
    };
  }

  apply(record) {
    if (record.type === "snapshot") {
      this.begin(record);
      return;
    }
    this.latest = record;
    this.meet(record.new, record.time);
    const byStep = record.type === "step" ? record : null;
    for (const [id, tokens] of Object.entries(record.tokens)) this.addTokens(this.seqs.get(Number(id)), tokens, byStep);
    this.takeTables(record.tables);
    this.takeStates(record.states, record.time);
    this.takeBlocks(record);
    this.takeTotals(record);
    if (byStep) {
      this.step = record.step + 1;
      this.stepTime = record.time;
      this.refusal = record.refusal;
      for (const id of record.preempted) this.seqs.get(id).preemptions++;
    }
  }

  meet(seqs, time, earlier) {
    for (const seq of seqs) {
      if (!this.requests.has(seq.request)) this.requests.set(seq.request, earlier?.get(seq.id)?.number ?? this.numSeen++);
      this.seqs.set(seq.id, {
        ...seq, number: this.requests.get(seq.request), tokens: [], numTokens: 0, computed: 0, cached: 0, hostBlocks: 0,
        status: "waiting", finishReason: null, preemptions: 0, tokenTimes: [], numTokenTimes: 0, finishedAt: null,
        seen: seq.seen, joined: time,
      });
    }
  }

  addTokens(seq, tokens, step) {
    const count = typeof tokens === "number" ? tokens : tokens.length;
    for (let i = 0; i < count; i++) {
      seq.tokens[seq.numTokens + i] = typeof tokens === "number" ? "·" : tokens[i];
    }
    seq.numTokens += count;
    if (step && seq.numTokens > seq.num_prompt_tokens) seq.tokenTimes[seq.numTokenTimes++] = step.time;
  }

  takeStates(states, time) {
    for (const [id, status, computed, cached, hostBlocks, finishReason] of states) {
      const seq = this.seqs.get(id);
      Object.assign(seq, { status, computed, cached, hostBlocks, finishReason });
      if (status !== "finished" || seq.finishedAt !== null) continue;
      seq.finishedAt = time;
      this.finished.push(id);
      if (this.finished.length > MAX_FINISHED) this.seqs.delete(this.finished.shift());
    }
  }

  takeTables(tables) {
    for (const [key, table] of Object.entries(tables)) {
      const id = Number(key);
      const seq = this.seqs.get(id);
      for (const [index, block] of (this.tables.get(id) ?? []).entries()) {
        if (table[index] !== block) this.contents.set(block, this.contentAt(seq, index));
      }
      if (table.length) this.tables.set(id, table);
      else this.tables.delete(id);
    }
  }

  takeBlocks(record) {
    const touched = new Set();
    for (const [block, refCount, hash] of record.blocks) {
      touched.add(block);
      this.refCounts[block] = refCount;
      if (hash) this.hashes.set(block, hash);
      else this.hashes.delete(block);
    }
    for (const [block, parent] of Object.entries(record.parents)) this.parents.set(Number(block), parent);
    if (touched.size) {
      const [front, back] = record.free;
      this.free = [...front, ...this.free.filter((block) => !touched.has(block)), ...back];
    }
  }

  takeTotals(record) {
    this.time = record.time;
    this.running = record.running;
    this.swapped = record.swapped;
    this.waiting = record.waiting;
    this.numPreemptions = record.num_preemptions;
    this.numPrefixQueries = record.num_prefix_queries;
    this.numPrefixHits = record.num_prefix_hits;
  }

  /** The tokens of one logical block, and how many of its slots hold K/V. */
  contentAt(seq, index) {
    const size = this.config.block_size;
    const filled = Math.max(0, Math.min(size, seq.computed - index * size));
    return { tokens: seq.tokens.slice(index * size, Math.min((index + 1) * size, seq.numTokens)), filled, seq: seq.id };
  }

  /** Block -> ids of the sequences whose tables name it. Worked out once for each record. */
  owners() {
    if (this.ownersAt === this.latest) return this.knownOwners;
    const owners = new Map();
    for (const [id, table] of this.tables) {
      for (const block of table) {
        if (owners.has(block)) owners.get(block).push(id);
        else owners.set(block, [id]);
      }
    }
    [this.ownersAt, this.knownOwners] = [this.latest, owners];
    return owners;
  }

  /** How many slots of a block hold K/V of its holders. */
  filledOf(block, owners) {
    const size = this.config.block_size;
    let most = 0;
    for (const id of owners.get(block) ?? []) {
      most = Math.max(most, this.seqs.get(id).computed - this.tables.get(id).indexOf(block) * size);
    }
    return Math.min(most, size);
  }

  /** What is in a block now: its holder's tokens, or what the last holder left. */
  contentOf(block, owners) {
    let best = null;
    for (const id of owners.get(block) ?? []) {
      const content = this.contentAt(this.seqs.get(id), this.tables.get(id).indexOf(block));
      if (!best || content.filled > best.filled) best = content;
    }
    return best ?? this.contents.get(block) ?? null;
  }

  /** "used", "cached" (free, but still to be found by its hash), "free" (used before) or "unused" (as far as was seen). */
  kindOf(block) {
    if (this.refCounts[block] > 0) return "used";
    if (this.hashes.has(block)) return "cached";
    return this.contents.has(block) ? "free" : "unused";
  }

  /** A, B, C and so on for requests; with a number for one of several answers. */
  label(id) {
    const seq = this.seqs.get(id);
    if (!seq) return `#${id}`;
    return labelOf(seq.number) + (seq.n > 1 ? seq.index + 1 : "");
  }

  /** Why a sequence is not running: {cause, needed, left, behind}; null when it runs or has just come. */
  whyWaiting(id) {
    if (!this.refusal || this.seqs.get(id).joined > this.stepTime) return null;
    const [first, cause, needed, left] = this.refusal;
    return id === first ? { cause, needed, left } : { cause: "behind", behind: first };
  }

}

export function labelOf(number) {
  const letter = String.fromCharCode(65 + (number % 26));
  return number < 26 ? letter : letter + Math.floor(number / 26);
}
