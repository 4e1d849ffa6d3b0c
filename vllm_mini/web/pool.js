// The physical pool: a tile for each block, with its slots filling one by one.

import { hatch, prepare } from "./canvas.js";
import { colorOf, themed } from "./colors.js";
import { texts } from "./i18n.js";
import { blockCounts } from "./numbers.js";

const GAP = 3;
const MIN_TILE = 9;
const MAX_TILE = 64;
const STRIP = 12; // height of the line with number and count, in tiles that are large enough for it
const MANY = 400; // blocks from which on those never used are left out, until asked for
const MIN_SHOWN = 96;

/** Draws into #pool-canvas and #block-detail; `onChoose(seq)` is called with an owner of a clicked block. */
export class PoolView {
  constructor({ onChoose }) {
    this.canvas = document.getElementById("pool-canvas");
    this.detail = document.getElementById("block-detail");
    this.showAll = document.getElementById("all-blocks");
    this.selected = null; // block
    this.tiles = [];
    this.canvas.addEventListener("pointermove", (event) => this.select(this.blockAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.select(null));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("click", (event) => this.choose(this.blockAt(event), onChoose));
    this.onChoose = onChoose;
    this.showAll.addEventListener("change", () => this.state && this.draw(this.state));
  }

  choose(block) {
    const owners = this.state?.owners().get(block);
    if (owners) this.onChoose(owners[0]);
  }

  /** The blocks to show: all, or of many those that were ever used and the next to be taken. */
  shown(state) {
    const total = state.config.num_blocks;
    document.getElementById("all-blocks-label").hidden = total <= MANY;
    const all = Array.from({ length: total }, (_, block) => block);
    if (total <= MANY || this.showAll.checked) return all;
    const chosen = new Set(all.filter((block) => state.kindOf(block) !== "unused"));
    for (const block of state.free) {
      if (chosen.size >= MIN_SHOWN) break;
      chosen.add(block);
    }
    return [...chosen].sort((a, b) => a - b);
  }

  draw(state) {
    this.state = state;
    this.blocks = this.shown(state);
    const box = this.canvas.parentElement;
    const width = Math.max(120, box.clientWidth - 2);
    this.layOut(width, box.clientHeight - 2);
    const rows = Math.ceil(this.blocks.length / this.columns);
    const context = prepare(this.canvas, width, rows * this.tile + GAP);
    const owners = state.owners();
    const order = new Map(state.free.map((block, index) => [block, index + 1]));
    const colors = { line: themed("--line"), soft: themed("--soft"), ink: themed("--ink"), muted: themed("--muted"),
      cached: themed("--cached"), panel: themed("--panel") };
    for (const [index, block] of this.blocks.entries()) {
      const x = GAP / 2 + (index % this.columns) * this.tile;
      const y = GAP / 2 + Math.floor(index / this.columns) * this.tile;
      this.drawTile(context, state, block, x, y, this.tile - GAP, { owners, order, colors });
    }
    const { used, cached, free } = blockCounts(state);
    const words = texts();
    const hidden = this.blocks.length < state.config.num_blocks ? ` · ${words.showing(this.blocks.length, state.config.num_blocks)}` : "";
    document.getElementById("pool-summary").textContent = words.poolSummary(used, cached, free, state.config.num_blocks) + hidden;
    this.canvas.setAttribute("aria-label", words.poolLabel(used, state.config.num_blocks));
    this.describe();
  }

  /** The largest tiles with which all blocks fit; more than fit even so are scrolled. */
  layOut(width, height) {
    for (this.tile = MAX_TILE; this.tile > MIN_TILE; this.tile--) {
      if (Math.floor(width / this.tile) * Math.floor(Math.max(height, 60) / this.tile) >= this.blocks.length) break;
    }
    this.columns = Math.max(1, Math.floor(width / this.tile));
  }

  drawTile(context, state, block, x, y, size, { owners, order, colors }) {
    const holders = owners.get(block) ?? [];
    const kind = state.kindOf(block);
    const filled = kind === "used" ? state.filledOf(block, owners) : kind === "cached" ? state.contents.get(block)?.filled ?? 0 : 0;
    const strip = size >= 34 ? STRIP : 0;
    const palette = holders.map((id) => colorOf(state.seqs.get(id).number));
    const distinct = [...new Set(palette)];
    context.fillStyle = kind === "used" ? colors.soft : colors.panel;
    context.fillRect(x, y, size, size);
    if (size < 16) this.drawLevel(context, state, x, y, size, { kind, filled, distinct, colors });
    else this.drawSlots(context, state, x, y, size, strip, { kind, filled, distinct, colors });
    context.lineWidth = kind === "used" ? 1.5 : 1;
    if (kind === "cached" && size >= 16) context.setLineDash([3, 2]);
    context.strokeStyle = kind === "used" ? distinct[0] : kind === "cached" ? colors.cached : colors.line;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    if (kind === "cached" && size >= 16) context.setLineDash([]);
    if (holders.length > 1 && size >= 12 && distinct.length === 1) {
      hatch(context, x + 1, y + 1 + strip, size - 2, size - 2 - strip, "rgba(255,255,255,.6)", Math.max(4, size / 6));
    }
    if (strip) this.drawStrip(context, block, x, y, size, { kind, count: state.refCounts[block], order: order.get(block), colors });
    else if (holders.length > 1 && size >= 16) badge(context, x + size, y, `×${state.refCounts[block]}`, colors, size);
    if (block === this.selected) {
      context.lineWidth = 2;
      context.strokeStyle = colors.ink;
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
  }

  drawLevel(context, state, x, y, size, { kind, filled, distinct, colors }) {
    const level = (size - 2) * (filled / state.config.block_size);
    context.fillStyle = kind === "used" ? distinct[0] : colors.cached;
    context.globalAlpha = kind === "used" ? 1 : 0.45;
    context.fillRect(x + 1, y + 1 + (size - 2 - level), size - 2, level);
    context.globalAlpha = 1;
  }

  /** The line above the slots: the block's number, and its reference count or its place among the free ones. */
  drawStrip(context, block, x, y, size, { kind, count, order, colors }) {
    context.font = "10px system-ui";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = kind === "used" ? colors.ink : colors.muted;
    context.fillText(block, x + 4, y + 1 + STRIP / 2);
    if (count > 1) badge(context, x + size - 1, y + 1, `×${count}`, colors, size);
    else if (kind === "cached" && context.measureText(`${block} ↺${order}`).width < size - 7) {
      context.textAlign = "right";
      context.fillText(`↺${order}`, x + size - 4, y + 1 + STRIP / 2);
    }
  }

  drawSlots(context, state, x, y, size, strip, { kind, filled, distinct, colors }) {
    const perRow = Math.ceil(Math.sqrt(state.config.block_size));
    const [width, height] = [(size - 2) / perRow, (size - 2 - strip) / Math.ceil(state.config.block_size / perRow)];
    context.globalAlpha = kind === "used" ? 1 : 0.4;
    for (let slot = 0; slot < filled; slot++) {
      const [column, row] = [slot % perRow, Math.floor(slot / perRow)];
      context.fillStyle = kind === "used" ? distinct[(column + row) % distinct.length] : colors.cached;
      context.fillRect(x + 1 + column * width + 0.5, y + 1 + strip + row * height + 0.5, width - 1, height - 1);
    }
    context.globalAlpha = 1;
  }

  blockAt(event) {
    const column = Math.floor((event.offsetX - GAP / 2) / this.tile);
    const row = Math.floor((event.offsetY - GAP / 2) / this.tile);
    return column >= 0 && column < this.columns ? this.blocks?.[row * this.columns + column] ?? null : null;
  }

  select(block) {
    if (block === this.selected) return;
    this.selected = block;
    if (this.state) this.draw(this.state);
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.key === "Enter" || event.key === " ") this.choose(this.selected);
    else if (by === undefined) return;
    event.preventDefault();
    if (by === undefined) return;
    const at = this.selected === null ? -1 : this.blocks.indexOf(this.selected);
    this.select(this.blocks[Math.max(0, Math.min(this.blocks.length - 1, at < 0 ? 0 : at + by))]);
  }

  /** The selected block in words. */
  describe() {
    const words = texts();
    const text = this.selected === null ? words.chooseBlock : this.describeBlock(this.selected, words);
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }

  describeBlock(block, words) {
    const state = this.state;
    const owners = state.owners();
    const kind = state.kindOf(block);
    const order = state.free.indexOf(block) + 1;
    const holders = (owners.get(block) ?? []).map((id) => state.label(id)).join(", ");
    const heads = {
      used: () => words.blockUsed(block, holders, state.refCounts[block]), cached: () => words.blockCached(block, order),
      free: () => words.blockFree(block, order), unused: () => words.blockFree(block, order),
    };
    const parts = [heads[kind]()];
    const content = state.contentOf(block, owners);
    if (content && kind !== "free") parts.push(words.slots(content.filled, state.config.block_size));
    const hash = state.hashes.get(block);
    if (typeof hash === "string") parts.push(words.hashIs(hash, state.parents.get(block)));
    if (content && kind !== "free") parts.push(state.config.shows_text ? `“${visible(content.tokens.slice(0, content.filled))}”` : words.hidden);
    return parts.join(" · ");
  }
}

/** Tokens as one text in which white space can be seen. */
export function visible(tokens) {
  return tokens.join("").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function badge(context, right, top, text, colors, size) {
  context.font = `bold ${Math.min(10, size / 2.4)}px system-ui`;
  const [width, height] = [context.measureText(text).width + 5, Math.min(STRIP, size / 2)];
  context.fillStyle = colors.ink;
  context.fillRect(right - width, top, width, height);
  context.fillStyle = colors.panel;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, right - width / 2, top + height / 2 + 0.5);
}

/** What the tiles mean, for a <ul>. */
export function legend(words) {
  return ["used", "shared", "cached", "unused"].map((name) => {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = `swatch ${name}`;
    item.append(swatch, words[name]);
    return item;
  });
}
