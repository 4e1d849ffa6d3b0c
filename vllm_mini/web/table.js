// The block table of one sequence: logical blocks with their text, the physical blocks they lie in, and beside them what
// contiguous memory would have held.

import { colorOf, inkOn } from "./colors.js";
import { texts } from "./i18n.js";
import { visible } from "./pool.js";

const MAX_ROWS = 160; // of a long table the first and the last are shown

/** Draws into #table and #chosen; `onPoint(block)` is called for the block under the pointer or focus. */
export class TableView {
  constructor({ onChoose, onPoint }) {
    this.root = document.getElementById("table");
    this.select = document.getElementById("chosen");
    this.select.addEventListener("change", () => onChoose(Number(this.select.value)));
    this.onPoint = onPoint;
    this.drawn = "";
  }

  draw(state, chosen) {
    this.drawChoice(state, chosen);
    const seq = state.seqs.get(chosen);
    const table = state.tables.get(chosen);
    const key = JSON.stringify([chosen, table, seq?.computed, seq?.numTokens, table?.map((block) => state.refCounts[block]), document.documentElement.lang]);
    if (key === this.drawn) return;
    this.drawn = key;
    const words = texts();
    if (!seq || !table) {
      this.root.replaceChildren(Object.assign(document.createElement("p"), { className: "summary", textContent: words.noChosen }));
      return;
    }
    const rows = document.createElement("ol");
    rows.className = "rows";
    rows.start = 0;
    for (const [index, block] of table.entries()) {
      if (table.length > MAX_ROWS && index === MAX_ROWS / 2) rows.append(Object.assign(document.createElement("li"), { textContent: "⋮" }));
      if (table.length <= MAX_ROWS || index < MAX_ROWS / 2 || index >= table.length - MAX_ROWS / 2) rows.append(this.row(state, seq, index, block, words));
    }
    this.root.replaceChildren(this.comparison(state, seq, table, words), rows);
  }

  drawChoice(state, chosen) {
    const ids = [...state.tables.keys()].sort((a, b) => a - b);
    const key = ids.map((id) => state.label(id)).join();
    if (this.select.dataset.key !== key) {
      this.select.dataset.key = key;
      this.select.replaceChildren(...ids.map((id) => new Option(state.label(id), id)));
    }
    this.select.value = chosen ?? "";
  }

  row(state, seq, index, block, words) {
    const { tokens, filled } = state.contentAt(seq, index);
    const size = state.config.block_size;
    const color = colorOf(seq.number);
    const item = document.createElement("li");
    item.innerHTML = '<span class="logical"></span><span class="text"></span><span class="fill"><i></i></span><span class="arrow" aria-hidden="true">→</span><button class="physical"></button>';
    const [logical, text, fill, , physical] = item.children;
    logical.textContent = index;
    logical.title = words.logical;
    text.textContent = state.config.shows_text ? visible(tokens.slice(0, filled)) : words.hidden;
    fill.firstChild.style.width = `${(100 * filled) / size}%`;
    fill.firstChild.style.background = color;
    fill.title = words.slots(filled, size);
    physical.textContent = block + (state.refCounts[block] > 1 ? ` ×${state.refCounts[block]}` : "");
    physical.title = words.physical;
    physical.style.background = color;
    physical.style.color = inkOn(color);
    physical.classList.toggle("shared", state.refCounts[block] > 1);
    for (const event of ["mouseenter", "focus"]) physical.addEventListener(event, () => this.onPoint(block));
    for (const event of ["mouseleave", "blur"]) physical.addEventListener(event, () => this.onPoint(null));
    return item;
  }

  /** Two bars of the same scale: what paging holds, and what a reservation of prompt + max_tokens would hold. */
  comparison(state, seq, table, words) {
    const slots = table.length * state.config.block_size;
    const reserved = Math.max(seq.max_num_tokens, slots);
    const percent = Math.round(100 * (1 - seq.computed / seq.max_num_tokens));
    const box = document.createElement("div");
    box.className = "comparison";
    const bars = [
      [words.paged(table.length, slots, seq.computed), slots / reserved],
      [words.contiguous(seq.max_num_tokens, percent), seq.max_num_tokens / reserved],
    ];
    for (const [text, share] of bars) {
      const line = document.createElement("p");
      const bar = document.createElement("span");
      const held = document.createElement("span");
      const written = document.createElement("i");
      bar.className = "bar";
      held.style.width = `${100 * share}%`;
      written.style.width = `${Math.min(100, (100 * seq.computed) / (share * reserved))}%`;
      written.style.background = colorOf(seq.number);
      held.append(written);
      bar.append(held);
      line.append(bar, text);
      box.append(line);
    }
    const waste = document.createElement("p");
    waste.textContent = words.wasteLast(slots - seq.computed);
    box.append(waste);
    return box;
  }
}
