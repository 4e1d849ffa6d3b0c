// The iterations: a column for each step, a row for each sequence; under it the tokens of each step, and what static
// batching would have made of the same requests.

import { hatch, prepare } from "./canvas.js";
import { colorOf, inkOn, themed } from "./colors.js";
import { texts } from "./i18n.js";
import { labelOf } from "./state.js";
import { compare, tokensOf } from "./static_batching.js";

const LABEL_WIDTH = 34;
const BAR_HEIGHT = 34;
const MAX_STEPS = 400; // that are looked at for the comparison

/** Draws into #timeline-canvas, #timeline-summary and #static-summary. */
export class TimelineView {
  constructor() {
    this.canvas = document.getElementById("timeline-canvas");
    this.comparison = null;
    this.comparedAt = -1;
  }

  draw(state, steps, people) {
    const box = this.canvas.parentElement;
    const width = Math.max(160, box.clientWidth - 2);
    const last = steps[steps.length - 1];
    const columnWidth = steps.length > (width - LABEL_WIDTH) / 14 ? 9 : 14;
    const shown = steps.slice(-Math.floor((width - LABEL_WIDTH) / columnWidth));
    const rows = rowsOf(shown, state);
    this.compareOnce(state, steps, people);
    const ghosts = this.ghostRows(rows);
    const rowHeight = Math.max(7, Math.min(20, Math.floor((box.clientHeight - BAR_HEIGHT - 24) / Math.max(1, rows.length + ghosts.length * 0.8 + 1))));
    const ghostTop = rows.length * rowHeight + BAR_HEIGHT + 6;
    const height = ghostTop + (ghosts.length ? 16 + ghosts.length * Math.max(5, rowHeight * 0.7) : 0) + 2;
    const context = prepare(this.canvas, width, height);
    const plan = { context, shown, rows, people, state, columnWidth, rowHeight, width, colors: { ink: themed("--ink"), muted: themed("--muted"), line: themed("--line"), soft: themed("--soft"), accent: themed("--accent") } };
    this.drawRows(plan);
    this.drawBudget(plan, rows.length * rowHeight + 4);
    if (ghosts.length) this.drawGhosts(plan, ghosts, ghostTop);
    this.write(state, last, shown, rows);
  }

  /** The comparison, once for each number of steps. */
  compareOnce(state, steps, people) {
    const newest = steps.length ? steps[steps.length - 1].id : -1;
    if (newest === this.comparedAt) return;
    this.comparedAt = newest;
    this.comparison = compare(steps.slice(-MAX_STEPS), people, state.config);
  }

  ghostRows(rows) {
    return this.comparison ? rows.filter((id) => this.comparison.spans.has(id)) : [];
  }

  drawRows(plan) {
    const { context, shown, rows, people, columnWidth, rowHeight, colors, width } = plan;
    const rowOf = new Map(rows.map((id, row) => [id, row]));
    context.textBaseline = "middle";
    context.font = `${Math.min(11, rowHeight - 1)}px system-ui`;
    for (const [row, id] of rows.entries()) {
      context.fillStyle = row % 2 ? "transparent" : colors.soft;
      context.fillRect(LABEL_WIDTH, row * rowHeight, width, rowHeight);
      drawLabel(context, people.get(id), 0, row * rowHeight, rowHeight, colors);
    }
    for (const [column, step] of shown.entries()) {
      const x = LABEL_WIDTH + column * columnWidth;
      for (const id of [...step.waiting, ...step.swapped]) this.drawWaiting(plan, x, rowOf.get(id), step.swapped.includes(id));
      for (const item of step.scheduled) this.drawShare(plan, x, rowOf.get(item[0]), item);
      for (const id of step.preempted) {
        const y = rowOf.get(id) * rowHeight;
        context.fillStyle = colors.ink;
        context.fillText("✕", x + 1, y + rowHeight / 2);
      }
    }
  }

  drawWaiting({ context, columnWidth, rowHeight, colors }, x, row, isSwapped) {
    if (row === undefined) return;
    const y = row * rowHeight + rowHeight / 2;
    if (isSwapped) hatch(context, x, y - rowHeight / 3, columnWidth, (2 * rowHeight) / 3, colors.muted, 4);
    context.fillStyle = colors.muted;
    if (!isSwapped) context.fillRect(x + columnWidth / 2 - 1, y - 1, 2, 2);
  }

  drawShare({ context, people, columnWidth, rowHeight }, x, row, [id, kind, , count]) {
    const color = colorOf(people.get(id).number);
    const y = row * rowHeight;
    context.fillStyle = color;
    if (kind === "decode") {
      const size = Math.max(3, Math.min(rowHeight - 4, columnWidth - 4));
      context.fillRect(x + (columnWidth - size) / 2, y + (rowHeight - size) / 2, size, size);
      return;
    }
    context.fillRect(x, y + 1, columnWidth - 1, rowHeight - 2);
    if (rowHeight < 12 || columnWidth < 14) return;
    context.fillStyle = inkOn(color);
    const text = count > 99 ? "" : String(count);
    context.save();
    context.textAlign = "center";
    context.font = "8px system-ui";
    context.fillText(text, x + (columnWidth - 1) / 2, y + rowHeight / 2 + 0.5);
    context.restore();
  }

  drawBudget({ context, shown, columnWidth, state, colors, width }, top) {
    const most = Math.max(1, ...shown.map(tokensOf));
    const budget = state.config.max_num_batched_tokens;
    const scale = (BAR_HEIGHT - 10) / Math.min(budget, most);
    context.fillStyle = colors.accent;
    for (const [column, step] of shown.entries()) {
      const height = Math.max(1, tokensOf(step) * scale);
      context.fillRect(LABEL_WIDTH + column * columnWidth, top + BAR_HEIGHT - 8 - height, columnWidth - 1, height);
    }
    context.fillStyle = colors.line;
    context.fillRect(LABEL_WIDTH, top + BAR_HEIGHT - 8, width - LABEL_WIDTH, 1);
    context.fillStyle = colors.muted;
    context.font = "10px system-ui";
    context.textBaseline = "top";
    context.fillText(String(Math.min(most, budget)), 2, top);
    if (most >= budget) {
      context.setLineDash([4, 3]);
      context.strokeStyle = colors.ink;
      context.strokeRect(LABEL_WIDTH, top + 1.5, width - LABEL_WIDTH - 1, 0);
      context.setLineDash([]);
    }
  }

  /** The static batches from beginning to end, narrowed so that all of them can be seen. */
  drawGhosts({ context, people, columnWidth, rowHeight, colors, width }, ghosts, top) {
    const { theirSteps, ourSteps } = this.comparison;
    context.fillStyle = colors.muted;
    context.font = "10px system-ui";
    context.textBaseline = "top";
    context.fillText(texts().staticGhost(theirSteps, ourSteps), LABEL_WIDTH, top);
    const height = Math.max(5, rowHeight * 0.7);
    const scale = Math.min(columnWidth, (width - LABEL_WIDTH - 2) / Math.max(theirSteps, ourSteps));
    const xOf = (step) => LABEL_WIDTH + step * scale;
    context.fillRect(xOf(ourSteps), top + 12, 1.5, ghosts.length * height + 4);
    for (const [row, id] of ghosts.entries()) {
      const [from, to] = this.comparison.spans.get(id);
      const left = Math.max(LABEL_WIDTH, xOf(from));
      const right = Math.min(width - 1, xOf(to));
      const y = top + 14 + row * height;
      drawLabel(context, people.get(id), 0, y, height, colors);
      if (right <= left) continue;
      const color = colorOf(people.get(id).number);
      context.strokeStyle = color;
      context.lineWidth = 1;
      hatch(context, left, y + 1, right - left, height - 2, color, 4);
      context.strokeRect(left + 0.5, y + 1.5, right - left - 1, Math.max(1, height - 3));
    }
  }

  write(state, last, shown, rows) {
    const words = texts();
    const tokens = last ? tokensOf(last) : 0;
    document.getElementById("timeline-summary").textContent = words.timelineSummary(tokens, state.config.max_num_batched_tokens);
    this.canvas.setAttribute("aria-label", words.timelineLabel(shown.length, rows.length));
    const found = this.comparison;
    const isTelling = found && found.saved > 0 && state.config.continuous_batching;
    document.getElementById("static-summary").textContent = isTelling
      ? words.staticSummary(found.ourSteps, found.theirSteps, found.saved.toFixed(found.saved < 1 ? 3 : 2), Math.round((100 * found.saved) / found.theirs))
      : words.staticNone;
  }
}

/** The sequences of these steps, oldest first. */
function rowsOf(steps, state) {
  const found = new Set([...state.running, ...state.swapped, ...state.waiting]);
  for (const step of steps) for (const [id] of step.scheduled) found.add(id);
  return [...found].sort((a, b) => a - b);
}

function drawLabel(context, person, x, y, height, colors) {
  if (!person) return;
  const text = labelOf(person.number) + (person.n > 1 ? person.index + 1 : "");
  context.fillStyle = colorOf(person.number);
  context.fillRect(x, y + 1, 4, height - 2);
  if (height < 9) return;
  context.fillStyle = colors.ink;
  context.textBaseline = "middle";
  context.font = `${Math.min(11, height)}px system-ui`;
  context.fillText(text, x + 8, y + height / 2);
}
