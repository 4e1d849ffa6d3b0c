// The records of one engine, and the state after any of them: what the slider and a saved trace are made of.

import { EngineState } from "./state.js";

const KEYFRAME_EVERY = 200; // records between two states that are kept

/** A bounded list of records with random access to states. Positions count from the first record ever. */
export class History {
  constructor(snapshot, { maxRecords = 5000 } = {}) {
    this.maxRecords = maxRecords;
    this.first = 0; // position of records[0]
    this.records = [];
    this.newest = new EngineState(snapshot);
    this.keyframes = [{ position: 0, state: this.newest.clone(), snapshot }]; // the state before the record there
    this.steps = []; // the step records, each with its position and all who arrived since the one before
    this.arrivals = [];
    this.people = new Map(); // sequence -> {number, index, n, ...}, also of those long finished
    this.meet(snapshot.seqs);
  }

  /** One past the newest record. */
  get end() {
    return this.first + this.records.length;
  }

  push(record) {
    if (this.end % KEYFRAME_EVERY === 0 && this.end > this.first) {
      this.keyframes.push({ position: this.end, state: this.newest.clone() });
    }
    this.newest.apply(record);
    this.meet(record.type === "snapshot" ? record.seqs : record.new);
    if (record.new) this.arrivals.push(...record.new);
    if (record.type === "step") {
      this.steps.push({ ...record, position: this.end, arrivals: this.arrivals });
      this.arrivals = [];
    }
    this.records.push(record);
    while (this.records.length > this.maxRecords && this.keyframes.length > 1) this.dropOldest();
  }

  meet(seqs) {
    for (const seq of seqs) this.people.set(seq.id, { ...this.newest.seqs.get(seq.id) });
  }

  dropOldest() {
    this.keyframes.shift();
    const position = this.keyframes[0].position;
    this.records.splice(0, position - this.first);
    this.steps.splice(0, this.steps.findIndex((step) => step.position >= position));
    this.first = position;
  }

  /** The state after all records before `position`. */
  stateAt(position) {
    if (position >= this.end) return this.newest;
    let keyframe = this.keyframes[0];
    for (const candidate of this.keyframes) if (candidate.position <= position) keyframe = candidate;
    const state = keyframe.state.clone();
    for (let at = keyframe.position; at < position; at++) state.apply(this.records[at - this.first]);
    return state;
  }

  /** The step records before `position`. */
  stepsUntil(position) {
    if (position >= this.end) return this.steps;
    const count = this.steps.findIndex((step) => step.position >= position);
    return count < 0 ? this.steps : this.steps.slice(0, count);
  }

  /** The trace file: a snapshot, then all records that are still here. */
  toLines() {
    const oldest = this.keyframes[0];
    const snapshot = oldest.snapshot ?? toSnapshot(oldest.state);
    return [snapshot, ...this.records].map((record) => JSON.stringify(record)).join("\n") + "\n";
  }
}

/** A state as the snapshot record that it could have begun with. */
function toSnapshot(state) {
  const seqs = [...state.running, ...state.swapped, ...state.waiting].map((id) => state.seqs.get(id));
  return {
    ...state.config, type: "snapshot", step: state.step, time: state.time, ref_counts: [...state.refCounts],
    cached: [...state.hashes.keys()], free: state.free, tables: Object.fromEntries(state.tables),
    hashes: state.config.shows_text ? Object.fromEntries(state.hashes) : {},
    running: state.running, swapped: state.swapped, waiting: state.waiting, num_preemptions: state.numPreemptions,
    num_prefix_queries: state.numPrefixQueries, num_prefix_hits: state.numPrefixHits,
    seqs: seqs.map((seq) => ({
      id: seq.id, request: seq.request, index: seq.index, n: seq.n, num_prompt_tokens: seq.num_prompt_tokens,
      max_num_tokens: seq.max_num_tokens, seen: seq.seen,
      tokens: state.config.shows_text ? seq.tokens.slice(0, seq.numTokens) : seq.numTokens,
    })),
    states: seqs.map((seq) => [seq.id, seq.status, seq.computed, seq.cached, seq.hostBlocks, seq.finishReason]),
  };
}

/** The records of a trace file's text. Throws an Error that says what is wrong with it. */
export function parseTrace(text) {
  const lines = text.split("\n");
  const records = [];
  for (const [index, line] of lines.entries()) {
    if (!line.trim()) continue;
    try {
      records.push(JSON.parse(line));
    } catch {
      if (index === lines.length - 1 && records.length) break; // cut off while it was written
      throw new Error(`line ${index + 1} is not JSON`);
    }
  }
  if (records[0]?.type !== "snapshot") throw new Error("it does not begin with a snapshot");
  if (records[0].version !== 1) throw new Error(`it is of version ${records[0].version}; this page reads 1`);
  return records;
}
