// The numbers of the page. Each function is what the page names beside its number; all take the state, some the steps.

const WINDOW = 50; // steps that rates are taken over

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Mean seconds from a request's arrival at the engine to its first token, over the sequences that are remembered. */
export function timeToFirstToken(state) {
  return mean([...state.seqs.values()].filter((seq) => seq.numTokenTimes > 0 && seq.index === 0)
    .map((seq) => seq.tokenTimes[0] - seq.seen));
}

/** Mean seconds between two tokens of a sequence, over the sequences that are remembered. */
export function interTokenLatency(state) {
  const seqs = [...state.seqs.values()].filter((seq) => seq.numTokenTimes > 1);
  const gaps = seqs.reduce((sum, seq) => sum + seq.numTokenTimes - 1, 0);
  const seconds = seqs.reduce((sum, seq) => sum + seq.tokenTimes[seq.numTokenTimes - 1] - seq.tokenTimes[0], 0);
  return gaps ? seconds / gaps : null;
}

/** New tokens of all sequences in a second of the last steps' time. */
export function tokensPerSecond(state, steps) {
  const recent = steps.slice(-WINDOW);
  const tokens = recent.reduce((sum, step) => sum + newTokens(step), 0);
  const seconds = recent.reduce((sum, step) => sum + step.seconds, 0);
  return seconds ? tokens / seconds : null;
}

/** Scheduled sequences whose last known token was computed: each drew one (forks count once). */
function newTokens(step) {
  return step.scheduled.filter(([, , start, count, known]) => start + count === known).length;
}

/** Mean seconds of the last steps. */
export function stepTime(state, steps) {
  return mean(steps.slice(-WINDOW).map((step) => step.seconds));
}

/** Blocks by what can be done with them. A cached one is free: whoever needs it may take it. */
export function blockCounts(state) {
  const cached = state.free.reduce((sum, block) => sum + state.hashes.has(block), 0);
  return { used: state.config.num_blocks - state.free.length, cached, free: state.free.length - cached };
}

/** Share of prompt tokens that were found in the prefix cache, since the engine started. */
export function prefixHitRate(state) {
  return state.numPrefixQueries ? state.numPrefixHits / state.numPrefixQueries : null;
}

/** Share of the slots of all used blocks that hold no K/V. */
export function emptySlots(state) {
  const { used } = blockCounts(state);
  if (!used) return null;
  const owners = state.owners();
  let filled = 0;
  for (const block of owners.keys()) filled += state.filledOf(block, owners);
  return 1 - filled / (used * state.config.block_size);
}

/** How often a sequence had to make way, since the engine started. */
export function preemptions(state) {
  return state.numPreemptions;
}

const inSeconds = (value) => (value === null ? "–" : value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const inPercent = (value) => (value === null ? "–" : `${Math.round(value * 100)} %`);

/** All numbers, as text, each with its name in i18n.js and the function that computes it. */
export function allNumbers(state, steps) {
  const { used, cached, free } = blockCounts(state);
  const rate = tokensPerSecond(state, steps);
  return [
    { name: "ttft", value: inSeconds(timeToFirstToken(state)), by: timeToFirstToken.name },
    { name: "itl", value: inSeconds(interTokenLatency(state)), by: interTokenLatency.name },
    { name: "rate", value: rate === null ? "–" : rate.toFixed(rate < 10 ? 1 : 0), by: tokensPerSecond.name },
    { name: "step", value: inSeconds(stepTime(state, steps)), by: stepTime.name },
    { name: "blocks", value: `${used} / ${cached} / ${free}`, by: blockCounts.name },
    { name: "hits", value: inPercent(prefixHitRate(state)), by: prefixHitRate.name },
    { name: "waste", value: inPercent(emptySlots(state)), by: emptySlots.name },
    { name: "preemptions", value: String(preemptions(state)), by: preemptions.name },
  ];
}
