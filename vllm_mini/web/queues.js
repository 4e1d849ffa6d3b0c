// The queues: a card for each sequence, which moves when its sequence does.

import { colorOf, inkOn } from "./colors.js";
import { texts } from "./i18n.js";
import { visible } from "./pool.js";

const QUEUES = ["waiting", "running", "swapped", "finished"];
const MANY = 12; // cards from which on a queue shows small ones

/** Draws into #queues; `onChoose(seq)` is called for a clicked card. */
export class QueuesView {
  constructor({ onChoose }) {
    this.root = document.getElementById("queues");
    this.onChoose = onChoose;
    this.cards = new Map();
    this.lists = new Map();
    for (const name of QUEUES) this.root.append(this.makeQueue(name));
  }

  makeQueue(name) {
    const section = document.createElement("section");
    section.className = `queue ${name}`;
    const heading = document.createElement("h3");
    const list = document.createElement("ul");
    section.append(heading, list);
    this.lists.set(name, { heading, list });
    return section;
  }

  draw(state, chosen) {
    const words = texts();
    const places = this.places();
    const queues = { waiting: state.waiting, running: state.running, swapped: state.swapped, finished: state.finished.slice(-8).reverse() };
    const shown = new Set();
    for (const name of QUEUES) {
      const { heading, list } = this.lists.get(name);
      heading.textContent = `${words[name]} ${queues[name].length}`;
      list.classList.toggle("many", queues[name].length > MANY);
      const cards = queues[name].filter((id) => state.seqs.has(id)).map((id) => {
        shown.add(id);
        return this.card(state, id, name, id === chosen, words);
      });
      if (cards.length !== list.children.length || cards.some((card, index) => card !== list.children[index])) list.replaceChildren(...cards);
    }
    for (const id of this.cards.keys()) if (!shown.has(id)) this.cards.delete(id);
    this.glide(places);
  }

  card(state, id, queue, isChosen, words) {
    const seq = state.seqs.get(id);
    let card = this.cards.get(id);
    if (!card) {
      card = document.createElement("li");
      card.innerHTML = '<button><b class="chip"></b><span class="what"></span><span class="facts"></span><span class="why"></span></button>';
      card.firstChild.addEventListener("click", () => this.onChoose(id));
      card.dataset.seq = id;
      this.cards.set(id, card);
    }
    const [chip, what, facts, why] = card.firstChild.children;
    card.classList.toggle("chosen", isChosen);
    card.firstChild.setAttribute("aria-pressed", isChosen);
    card.dataset.queue = queue;
    setText(chip, state.label(id));
    const color = colorOf(seq.number);
    chip.style.background = color;
    chip.style.color = inkOn(color);
    setText(what, state.config.shows_text ? lastWords(seq.tokens.slice(0, seq.num_prompt_tokens)) : "");
    setText(facts, this.facts(state, seq, words));
    setText(why, this.why(state, seq, queue, words));
    return card;
  }

  facts(state, seq, words) {
    const parts = [words.cardTokens(seq.num_prompt_tokens, seq.numTokens - seq.num_prompt_tokens)];
    const blocks = state.tables.get(seq.id)?.length ?? 0;
    if (seq.status !== "finished" && seq.computed < seq.numTokens - 1) parts.push(words.cardComputed(seq.computed, seq.numTokens));
    if (blocks) parts.push(words.cardBlocks(blocks));
    if (seq.cached) parts.push(words.cardCached(seq.cached));
    if (seq.hostBlocks) parts.push(words.cardHost(seq.hostBlocks));
    if (seq.preemptions) parts.push(words.cardPreempted(seq.preemptions));
    return parts.join(" · ");
  }

  why(state, seq, queue, words) {
    if (queue === "finished") return words.reason[seq.finishReason] ?? seq.finishReason ?? "";
    if (queue === "running") return "";
    const why = state.whyWaiting(seq.id);
    if (!why) return words.why.new();
    return why.cause === "behind" ? words.why.behind(state.label(why.behind)) : words.why[why.cause](why.needed, why.left);
  }

  places() {
    return new Map([...this.cards].map(([id, card]) => [id, { queue: card.dataset.queue, box: card.getBoundingClientRect() }]));
  }

  /** Let cards that changed their queue glide from where they were. */
  glide(places) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const [id, card] of this.cards) {
      const earlier = places.get(id);
      if (!earlier || earlier.queue === card.dataset.queue || !earlier.box.height) continue;
      const box = card.getBoundingClientRect();
      const [x, y] = [earlier.box.left - box.left, earlier.box.top - box.top];
      card.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: 350, easing: "ease-out" });
    }
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What was said last in a prompt: in a chat template's text the last turn of the user, else the end of it all. */
function lastWords(tokens) {
  const end = tokens.lastIndexOf("<|im_end|>");
  const start = tokens.lastIndexOf("<|im_start|>", end);
  const said = end < 0 ? tokens.slice(-24) : tokens.slice(start + 1, Math.min(end, start + 80));
  return visible(said).replace(/^(user|system|assistant)⏎/, "");
}
