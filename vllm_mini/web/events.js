// What happened in a record, as facts that i18n.js puts into words. Knows no language and no screen.

/** The facts of one record, given the states before and after it: [{kind, who, ...}]. */
export function factsOf(record, before, after) {
  const facts = [];
  const name = (id) => after.label(id);
  for (const seq of record.new) {
    if (seq.index === 0) facts.push({ kind: "arrived", seq: seq.id, who: name(seq.id), tokens: seq.num_prompt_tokens });
  }
  if (record.type === "step") facts.push(...factsOfStep(record, before, after, name));
  for (const [id, status, , , , reason] of record.states) {
    if (status !== "finished" || before.seqs.get(id)?.status === "finished") continue;
    const seq = after.seqs.get(id);
    const released = record.events.filter(([kind, owner]) => kind === "release" && owner === id).flatMap((event) => event.slice(2));
    facts.push({
      kind: "finished", seq: id, who: name(id), reason, tokens: seq.numTokens - seq.num_prompt_tokens,
      freed: released.filter((block) => after.refCounts[block] === 0).length,
    });
  }
  return facts;
}

function factsOfStep(record, before, after, name) {
  const of = (kind, id) => record.events.filter((event) => event[0] === kind && event[1] === id).flatMap((event) => event.slice(2));
  const facts = record.preempted.map((id) => preemption(record, before, after, id, of));
  const evicted = record.events.filter(([kind]) => kind === "evict").flatMap((event) => event.slice(2));
  if (evicted.length) facts.push({ kind: "evicted", blocks: evicted });
  for (const id of record.admitted) facts.push(admission(before, after, id, of));
  for (const id of record.resumed) {
    const item = record.scheduled.find(([seq]) => seq === id);
    facts.push({
      kind: "resumed", seq: id, who: name(id), swapped: of("swap_in", id).length > 0, kept: item[2], again: item[4] - item[2],
    });
  }
  for (const [id, , start, count, known] of record.scheduled) {
    if (start + count < known) facts.push({ kind: "chunk", seq: id, who: name(id), from: start + 1, to: start + count, of: known });
  }
  for (const [kind, id, ...blocks] of record.events) {
    if (kind === "fork") {
      const parent = [...after.seqs.values()].find((seq) => seq.request === after.seqs.get(id).request && seq.index === 0);
      facts.push({ kind: "forked", seq: id, who: name(id), parent: parent ? name(parent.id) : "?", blocks });
    } else if (kind === "copy") {
      const others = [...after.tables].filter(([other, table]) => other !== id && table.includes(blocks[0])).map(([other]) => name(other));
      facts.push({ kind: "copied", seq: id, who: name(id), from: blocks[0], to: blocks[1], others: others.join(", ") });
    } else if (kind === "allocate" && !record.admitted.includes(id) && !record.resumed.includes(id)) {
      facts.push({ kind: "grows", seq: id, who: name(id), blocks });
    }
  }
  for (const id of Object.keys(record.tokens).map(Number)) {
    const seq = after.seqs.get(id);
    if (seq.index === 0 && seq.numTokenTimes === 1 && !(before.seqs.get(id)?.numTokenTimes > 0)) {
      facts.push({ kind: "first", seq: id, who: name(id), seconds: (seq.tokenTimes[0] - seq.seen).toFixed(2) });
    }
  }
  const refused = record.refusal;
  if (refused && String(refused.slice(0, 2)) !== String(before.refusal?.slice(0, 2))) {
    facts.push({ kind: "waits", seq: refused[0], who: name(refused[0]), why: { cause: refused[1], needed: refused[2], left: refused[3] } });
  }
  return facts;
}

function preemption(record, before, after, id, of) {
  const host = of("swap_out", id);
  const table = before.tables.get(id) ?? [];
  // The block went to whoever took one next; when nobody did, the victim was the one that needed it.
  const left = record.events.findIndex(([kind, owner]) => owner === id && (kind === "release" || kind === "swap_out"));
  const taken = record.events.slice(left).find(([kind]) => kind === "allocate" || kind === "copy");
  const by = taken ? taken[1] : id;
  const size = after.config.block_size;
  let kept = 0;
  while (kept < table.length && before.seqs.get(id).computed >= (kept + 1) * size && after.hashes.has(table[kept])) kept++;
  return {
    kind: "preempted", seq: id, who: after.label(id), by: by === id ? null : after.label(by), host: host.length,
    freed: table.filter((block) => before.refCounts[block] === 1).length, kept: kept * size, tokens: before.seqs.get(id)?.computed ?? 0,
  };
}

function admission(before, after, id, of) {
  const shared = of("share", id);
  const others = [...before.tables].filter(([other, table]) => other !== id && table.some((block) => shared.includes(block)));
  return {
    kind: "admitted", seq: id, who: after.label(id), blocks: of("allocate", id).length, shared: shared.length,
    cached: shared.length * after.config.block_size, others: others.map(([other]) => after.label(other)).join(", "),
  };
}

/** A fact in the words of a language. */
export function sentence(fact, words) {
  const parts = { ...fact };
  if (fact.why) parts.why = words.why[fact.why.cause](fact.why.needed, fact.why.left);
  if (fact.reason) parts.reason = words.reason[fact.reason] ?? fact.reason;
  return words.event[fact.kind](parts);
}
