// What static batching would have done with the requests of a timeline: a batch is filled when nobody runs, and nobody
// joins before all of it have finished. Both ways are timed by one model of a step's cost, fitted to the steps that ran,
// and only busy time counts: pauses, a slowed engine and idle gaps do not.

/** Seconds of a step as base + slope * tokens: least squares over the steps that ran. */
export function fitStepCost(steps) {
  const n = steps.length;
  const tokens = steps.map(tokensOf);
  const meanTokens = tokens.reduce((sum, value) => sum + value, 0) / n;
  const meanSeconds = steps.reduce((sum, step) => sum + step.seconds, 0) / n;
  const spread = tokens.reduce((sum, value) => sum + (value - meanTokens) ** 2, 0);
  const together = steps.reduce((sum, step, i) => sum + (tokens[i] - meanTokens) * (step.seconds - meanSeconds), 0);
  const slope = spread ? Math.max(0, together / spread) : 0;
  const base = Math.max(0, meanSeconds - slope * meanTokens);
  return (count) => base + slope * count;
}

export function tokensOf(step) {
  return step.scheduled.reduce((sum, item) => sum + item[3], 0);
}

/** What each sequence asked for and when, by index into the steps; only those whose arrival is among them. */
export function workOf(steps, people) {
  const work = new Map();
  for (const [at, step] of steps.entries()) {
    for (const seq of step.arrivals) work.set(seq.id, { id: seq.id, arrival: at, prompt: seq.index ? 0 : seq.num_prompt_tokens, outputs: 0, end: at });
    for (const [id, tokens] of Object.entries(step.tokens)) {
      const item = work.get(Number(id));
      if (!item) continue;
      item.end = at;
      const count = typeof tokens === "number" ? tokens : tokens.length;
      item.outputs += step.new.some((seq) => seq.id === Number(id)) ? count - people.get(Number(id)).num_prompt_tokens : count;
    }
  }
  return [...work.values()].filter((item) => item.outputs > 0);
}

/** Run the work in static batches; returns for each sequence [first step, step after the last], and the steps' costs. */
export function runStatic(work, config, cost, arrivalTimes) {
  const waiting = [...work].sort((a, b) => arrivalTimes.get(a.id) - arrivalTimes.get(b.id) || a.id - b.id);
  const spans = new Map();
  const ends = new Map();
  let clock = 0;
  let step = 0;
  while (waiting.length) {
    clock = Math.max(clock, arrivalTimes.get(waiting[0].id));
    const batch = [];
    while (waiting.length && batch.length < config.max_num_seqs && arrivalTimes.get(waiting[0].id) <= clock) batch.push(waiting.shift());
    const first = step;
    let prompts = batch.reduce((sum, item) => sum + item.prompt, 0);
    do {
      const tokens = Math.min(prompts, config.max_num_batched_tokens);
      clock += cost(tokens);
      prompts -= tokens;
      step++;
    } while (prompts > 0);
    const longest = Math.max(...batch.map((item) => item.outputs));
    for (let output = 1; output <= longest; output++) {
      if (output > 1) {
        clock += cost(batch.length); // whoever has finished still holds its place
        step++;
      }
      for (const item of batch) {
        if (item.outputs === output) {
          spans.set(item.id, [first, step]);
          ends.set(item.id, clock);
        }
      }
    }
  }
  return { spans, ends, numSteps: step };
}

/** The comparison over a timeline's steps; null with fewer than two sequences. */
export function compare(steps, people, config) {
  const work = workOf(steps, people);
  if (work.length < 2) return null;
  const cost = fitStepCost(steps);
  const clock = [0]; // busy seconds before each step, by the same model
  for (const step of steps) clock.push(clock[clock.length - 1] + cost(tokensOf(step)));
  const arrivals = new Map(work.map((item) => [item.id, clock[item.arrival]]));
  const theirs = runStatic(work, config, cost, arrivals);
  const wait = (end) => work.reduce((sum, item) => sum + end(item) - arrivals.get(item.id), 0) / work.length;
  const ours = wait((item) => clock[item.end + 1]);
  const other = wait((item) => theirs.ends.get(item.id));
  const start = Math.min(...work.map((item) => item.arrival));
  return { ourSteps: steps.length - start, theirSteps: theirs.numSteps, start, spans: theirs.spans, ours, theirs: other, saved: other - ours };
}
