// Four chats with the engine that is looked at, and the scenes that fill them. They are clients like any other: what they
// know of their requests comes through /v1/chat/completions, only their colours from the feed.

import { colorOf, inkOn } from "./colors.js";
import { events } from "./feed.js";
import { texts } from "./i18n.js";

const NUM_BOXES = 4;
// The tiny model babbles bytes: it shall at least babble letters.
const LETTERS = Object.fromEntries([..." abcdefghijklmnopqrstuvwxyz"].map((letter) => [letter.charCodeAt(0), 100]));
const QUESTIONS = ["Why is the sky blue?", "Name three fruits.", "What is a cat?", "Tell me a short story about a robot."];
const SYSTEM = "You are a patient teacher. You answer in short and simple sentences that a child can understand, and you never use a word that you have not explained before.";
const LONG = "Please read this list carefully and tell me which animal is missing. " +
  Array.from({ length: 40 }, (_, i) => `Line ${i + 1}: the cat, the dog, the bird and the fish met at the old well.`).join(" ");

/** The scenes: what each box says, and how. */
export const SCENES = {
  scene4: () => QUESTIONS.map((text) => ({ text })),
  sceneShared: () => QUESTIONS.map((text) => ({ text, system: SYSTEM })),
  sceneLong: (isSandbox) => QUESTIONS.map((text, i) => ({ text: i === 2 ? LONG.slice(0, isSandbox ? 400 : undefined) : text, delay: i === 2 ? 900 : 0, maxTokens: i === 2 ? 24 : 80 })),
  sceneFork: () => [{ text: "Invent a name for a blue planet.", n: 4, temperature: 1 }],
  sceneTight: () => QUESTIONS.map((text) => ({ text, maxTokens: 96 })),
};

/** Draws into #chats. `engine()` is {base, model, isSandbox}; `stateOf()` the state that colours come from. */
export class Chats {
  constructor({ engine, stateOf, onError }) {
    this.engine = engine;
    this.stateOf = stateOf;
    this.onError = onError;
    this.boxes = Array.from({ length: NUM_BOXES }, (_, index) => new Box(index, this));
    document.getElementById("chats").replaceChildren(...this.boxes.map((box) => box.element));
  }

  play(name) {
    const lines = SCENES[name](this.engine().isSandbox);
    for (const box of this.boxes) box.reset();
    for (const [index, line] of lines.entries()) setTimeout(() => this.boxes[index].ask(line), line.delay ?? 0);
  }

  stopAll() {
    for (const box of this.boxes) box.reset();
  }

  translate() {
    for (const box of this.boxes) box.translate();
  }

  /** Give each box the colours of its request. */
  draw() {
    const state = this.stateOf();
    for (const box of this.boxes) box.draw(state);
  }
}

class Box {
  constructor(index, chats) {
    this.index = index;
    this.chats = chats;
    this.messages = [];
    this.element = document.createElement("article");
    this.element.className = "chat-box";
    this.element.innerHTML = '<div class="said" tabindex="0"></div><form><b class="chip" hidden></b><input autocomplete="off"><button></button></form>';
    [this.said, this.form] = this.element.children;
    [this.chip, this.input, this.button] = this.form.children;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else if (this.input.value.trim()) this.ask({ text: this.input.value.trim(), keeps: true });
    });
    this.translate();
  }

  translate() {
    const words = texts();
    this.element.setAttribute("aria-label", words.box(this.index + 1));
    this.input.placeholder = words.say;
    this.input.setAttribute("aria-label", `${words.box(this.index + 1)}: ${words.say}`);
    this.button.textContent = this.abort ? words.stop : words.send;
    this.said.dataset.empty = words.empty;
  }

  reset() {
    this.abort?.abort();
    this.messages = [];
    this.requestId = null;
    this.said.replaceChildren();
  }

  /** Say something and stream the answer, or the n answers. */
  async ask({ text, system, n = 1, maxTokens, temperature = 0 }) {
    this.input.value = "";
    if (system) this.messages = [{ role: "system", content: system }];
    this.messages.push({ role: "user", content: text });
    this.add("user", text.length > 160 ? `${text.slice(0, 150)}… (${text.length})` : text);
    const lines = Array.from({ length: n }, (_, i) => this.add("assistant", "", n > 1 ? i : null));
    const abort = (this.abort = new AbortController());
    this.requestId = null;
    this.translate();
    try {
      await this.stream({ n, temperature, maxTokens }, lines, abort.signal);
      this.messages.push({ role: "assistant", content: lines[0].textContent });
    } catch (error) {
      if (!abort.signal.aborted) this.add("error", error.message);
    }
    if (this.abort !== abort) return; // another question came meanwhile
    this.abort = null;
    this.translate();
  }

  async stream({ n, temperature, maxTokens }, lines, signal) {
    const { base, model, isSandbox } = this.chats.engine();
    const body = { model, messages: this.messages, stream: true, n, temperature, max_tokens: maxTokens ?? 48, seed: 7 };
    if (isSandbox) Object.assign(body, { logit_bias: LETTERS, ignore_eos: true, temperature: 1, seed: this.index + 1 });
    for await (const chunk of events(`${base}v1/chat/completions`, { signal, body })) {
      if (chunk.error) throw new Error(chunk.error.message);
      this.requestId ??= chunk.id;
      for (const choice of chunk.choices) lines[choice.index].textContent += choice.delta?.content ?? "";
      this.said.scrollTop = this.said.scrollHeight;
    }
  }

  add(kind, text, index = null) {
    const line = document.createElement("p");
    line.className = kind;
    if (index !== null) line.dataset.index = index + 1;
    line.textContent = text;
    this.said.append(line);
    this.said.scrollTop = this.said.scrollHeight;
    return line;
  }

  draw(state) {
    const seq = this.requestId && state ? [...state.seqs.values()].find((one) => one.request.startsWith(this.requestId)) : null;
    this.chip.hidden = !seq;
    if (!seq) return;
    const color = colorOf(seq.number);
    this.chip.textContent = state.label(seq.id).replace(seq.n > 1 ? /\d+$/ : "", "");
    this.chip.style.background = color;
    this.chip.style.color = inkOn(color);
    this.element.style.setProperty("--request", color);
  }
}
