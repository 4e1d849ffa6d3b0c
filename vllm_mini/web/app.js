// The page: which engine is looked at, and when; everything else is drawn from that by the panels.

import { Chats, SCENES } from "./chat.js";
import { colorOf } from "./colors.js";
import { factsOf, sentence } from "./events.js";
import { follow, post, setKey } from "./feed.js";
import { History, parseTrace } from "./history.js";
import { currentLanguage, setLanguage, texts, translatePage } from "./i18n.js";
import { allNumbers } from "./numbers.js";
import { download, savePicture } from "./picture.js";
import { legend, PoolView } from "./pool.js";
import { QueuesView } from "./queues.js";
import { TableView } from "./table.js";
import { TimelineView } from "./timeline.js";

const SPEEDS = [null, 20, 8, 4, 2, 1, 0.5]; // steps a second; null is as fast as it goes
const SANDBOX_SPEED = 8;
const TIGHT = { num_kv_blocks: 22, max_num_batched_tokens: 64, max_num_seqs: 64 };
const MAX_FACTS = 2000;
const SHOWN_FACTS = 200;
const MIN_FRAME = 150; // ms between two pictures of an engine at full speed
const SHARE = 20; // and so many times what the last picture took: drawing shall not take the engine's CPU

const $ = (id) => document.getElementById(id);

/** One source of records: the served engine, the sandbox, or a trace. */
class Source {
  constructor(kind, base, name = "") {
    Object.assign(this, { kind, base, name, history: null, facts: [], numFacts: 0, watcher: null, pace: null, isGone: false, position: null, speed: null, mode: "live" });
  }

  take(record) {
    this.isGone = false;
    if (record.type === "hello") {
      Object.assign(this, { watcher: record.watcher, mode: record.mode, model: record.model, mayPace: record.may_set_pace, hasSandbox: record.has_sandbox });
      onHello(this);
    } else if (record.type === "pace") {
      this.pace = record;
    } else if (record.type === "snapshot" && (!this.history || record.time < this.history.newest.time)) {
      this.begin(record);
    } else if (record.type !== "end") {
      this.push(record);
    } else if (record.complete) {
      this.position = this.history.first + 1;
    }
  }

  begin(snapshot, options) {
    this.history = new History(snapshot, options);
    this.facts = [];
    this.position = null;
  }

  push(record) {
    const { newest } = this.history;
    const before = record.type === "snapshot" ? null : newest.glance(record);
    this.history.push(record);
    if (!before) return;
    for (const fact of factsOf(record, before, newest)) {
      this.facts.push({ ...fact, position: this.history.end, step: record.step ?? newest.step, number: newest.seqs.get(fact.seq)?.number });
    }
    if (this.facts.length > MAX_FACTS) this.facts.splice(0, this.facts.length - MAX_FACTS);
  }

  get state() {
    if (!this.history) return null;
    return this.position === null ? this.history.newest : (this.cached?.position === this.position ? this.cached.state : this.look());
  }

  /** The state at a position in the past; kept, for it is drawn often. */
  look() {
    this.cached = { position: this.position, state: this.history.stateAt(this.position) };
    return this.cached.state;
  }

  get end() {
    return this.position ?? this.history.end;
  }

  get isPaused() {
    return this.mode === "replay" ? !player.timer : this.pace?.num_steps != null;
  }
}

const served = new Source("served", "");
let sandbox = null;
let source = served;
let chosen = null; // sequence
let isFollowing = true; // the oldest that runs is chosen
const player = { timer: null };

const onChoose = (seq) => {
  chosen = seq;
  isFollowing = false;
  requestDraw();
};
const pool = new PoolView({ onChoose });
const queues = new QueuesView({ onChoose });
const table = new TableView({ onChoose, onPoint: (block) => pool.select(block) });
const timeline = new TimelineView();
const chats = new Chats({ engine: () => ({ base: source.base, model: source.kind === "sandbox" ? "sandbox" : served.model, isSandbox: source.kind === "sandbox" || served.model === "dummy" }), stateOf: () => source.history?.newest });

// ---- what is looked at ----

function connect(target) {
  target.abort = new AbortController();
  follow(`${target.base}live/feed`, {
    signal: target.abort.signal,
    onRecord: (record) => {
      target.take(record);
      if (target === source) requestDraw();
    },
    onGone: () => {
      target.isGone = true;
      requestDraw();
    },
    onKey: askKey,
  });
}

function onHello(target) {
  if (target === served) {
    $("served-model").textContent = target.model;
    $("engine-sandbox").hidden = !target.hasSandbox;
  }
  if (target.mode === "replay") {
    target.begin = function begin(snapshot) {
      Source.prototype.begin.call(this, snapshot, { maxRecords: Infinity });
    };
    document.body.classList.add("replaying");
  } else if (target.speed !== null) {
    setPace({ steps_per_second: target.speed }, target);
  }
}

async function startSandbox(settings) {
  setNotice(texts().sandboxStarting);
  try {
    await post("live/sandbox", settings);
  } catch (error) {
    setNotice(texts().failed(error.message));
    return false;
  }
  sandbox = new Source("sandbox", "sandbox/");
  sandbox.speed = SANDBOX_SPEED;
  show(sandbox);
  setNotice("");
  await new Promise((resolve) => {
    const timer = setInterval(() => sandbox.history && (clearInterval(timer), resolve()), 30);
  });
  return true;
}

/** Look at this source from now on. Only its feed stays open: browsers keep six connections, and four chats need theirs. */
function show(target) {
  stopPlaying();
  if (target !== source) source.abort?.abort();
  source = target;
  if (source.mode === "live" && (source.abort?.signal.aborted ?? true)) connect(source);
  chosen = null;
  isFollowing = true;
  drawnFacts = null;
  $("engine-served").setAttribute("aria-pressed", source.kind === "served");
  $("engine-sandbox").setAttribute("aria-pressed", source.kind === "sandbox");
  $("sandbox-settings").hidden = source.kind !== "sandbox";
  document.body.classList.toggle("replaying", source.mode === "replay");
  chats.stopAll();
  requestDraw();
}

async function askKey(message) {
  const dialog = $("key-dialog");
  $("key-error").textContent = $("key").value ? texts().keyWrong : "";
  $("key").value = "";
  $("key").title = message;
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  if ($("key").value) setKey($("key").value);
}

// ---- controls ----

async function setPace(limits, target = source) {
  try {
    await post(`${target.base}live/pace`, { watcher: target.watcher, steps_per_second: target.speed, num_steps: null, ...limits });
  } catch (error) {
    setNotice(texts().failed(error.message));
  }
}

function togglePause() {
  if (source.mode === "replay") {
    if (player.timer) stopPlaying();
    else play();
  } else {
    setPace({ num_steps: source.isPaused ? null : 0 });
  }
}

function oneStep() {
  if (source.mode === "replay") {
    stopPlaying();
    goTo(nextStep(source.end));
  } else {
    setPace({ num_steps: 1 });
  }
}

/** The position after the next step record. */
function nextStep(position) {
  const next = source.history.steps.find((step) => step.position >= position);
  return next ? next.position + 1 : source.history.end;
}

function play() {
  if (source.end >= source.history.end) source.position = source.history.first;
  const tick = () => {
    goTo(nextStep(source.end));
    if (source.end >= source.history.end) stopPlaying();
    else player.timer = setTimeout(tick, 1000 / (source.speed ?? 30));
  };
  player.timer = setTimeout(tick, 0);
}

function stopPlaying() {
  clearTimeout(player.timer);
  player.timer = null;
  requestDraw();
}

function goTo(position) {
  const { history, mode } = source;
  source.position = position >= history.end && mode !== "replay" ? null : Math.max(history.first, Math.min(history.end, position));
  requestDraw();
}

async function playScene(name) {
  if (name === "sceneTight") {
    const form = $("sandbox-form");
    form.elements.num_kv_blocks.value = TIGHT.num_kv_blocks;
    if (!(await startSandbox(TIGHT))) return;
  }
  goTo(source.history.end);
  isFollowing = true;
  chats.play(name);
}

function settingsOf(form) {
  return Object.fromEntries([...form.elements].filter((field) => field.name)
    .map((field) => [field.name, field.type === "checkbox" ? field.checked : Number(field.value)]));
}

async function openTrace(file) {
  try {
    const [snapshot, ...records] = parseTrace(await file.text());
    const target = new Source("trace", "", file.name);
    target.mode = "replay";
    target.begin(snapshot, { maxRecords: Infinity });
    for (const record of records) target.push(record);
    show(target);
    goTo(target.history.end);
  } catch (error) {
    setNotice(texts().traceBad(error.message));
  }
}

let notice = "";

function setNotice(text) {
  notice = text;
  requestDraw();
}

// ---- drawing ----

let isWanted = false;
let lastFrame = 0;
let frameCost = 0;
let drawnFacts = null;

function requestDraw() {
  if (isWanted) return;
  isWanted = true;
  const isAtFullSpeed = source.position === null && source.history?.newest.running.length && !source.isPaused && source.speed === null;
  const pause = isAtFullSpeed ? Math.max(MIN_FRAME, SHARE * frameCost) : 2 * frameCost;
  const wait = Math.max(0, lastFrame + pause - performance.now());
  setTimeout(() => requestAnimationFrame(draw), wait);
}

function draw() {
  isWanted = false;
  lastFrame = performance.now();
  drawControls();
  const { state } = source;
  if (state) {
    chooseSequence(state);
    const steps = source.history.stepsUntil(source.end);
    drawNumbers(state, steps);
    pool.draw(state);
    queues.draw(state, chosen);
    table.draw(state, chosen);
    timeline.draw(state, steps, source.history.people);
    drawEvents();
    chats.draw();
  }
  frameCost = performance.now() - lastFrame;
}

function chooseSequence(state) {
  if (!isFollowing && state.seqs.has(chosen)) return;
  chosen = state.running[0] ?? null;
  isFollowing = true;
}

function drawControls() {
  const words = texts();
  const { history } = source;
  const isReplay = source.mode === "replay";
  $("pause").setAttribute("aria-pressed", source.isPaused);
  $("pause").lastElementChild.textContent = source.isPaused ? words.resume : words.pause;
  $("pause").firstElementChild.className = source.isPaused ? "icon play" : "icon pause";
  for (const id of ["pause", "step", "speed"]) $(id).disabled = !history || (!isReplay && !source.mayPace);
  $("speed").value = String(source.speed);
  $("seek").disabled = !history;
  if (history) {
    $("seek").min = history.first;
    $("seek").max = history.end;
    $("seek").value = source.end;
    $("position").textContent = words.atStep(source.state.step);
  }
  $("to-live").hidden = isReplay || source.position === null;
  $("status").className = source.isGone ? "bad" : source.isPaused || isReplay ? "held" : "";
  const text = statusText(words, isReplay);
  if ($("status").textContent !== text) $("status").textContent = text;
}

function statusText(words, isReplay) {
  if (notice) return notice;
  if (source.isGone) return words.gone;
  if (!source.history) return words.connecting;
  if (isReplay) return words.isReplay(source.name || source.model);
  if (source.position !== null) return words.isPast;
  if (source.isPaused) return source.kind === "served" ? words.isPausedServed : words.isPaused;
  return words.isLive;
}

function drawNumbers(state, steps) {
  const words = texts();
  const box = $("numbers");
  const numbers = allNumbers(state, steps);
  if (box.children.length !== numbers.length) {
    box.replaceChildren(...numbers.map(() => Object.assign(document.createElement("div"), { innerHTML: "<span></span><b></b><code></code>" })));
  }
  for (const [index, { name, value, by }] of numbers.entries()) {
    const [label, number, code] = box.children[index].children;
    label.textContent = words.numberNames[name];
    number.textContent = value;
    number.dataset.number = name;
    code.textContent = `${by}()`;
    code.title = `${words.recordedBy} ${by}() · numbers.js`;
  }
}

function drawEvents() {
  const words = texts();
  const facts = source.position === null ? source.facts : source.facts.filter((fact) => fact.position <= source.position);
  const newest = facts[facts.length - 1] ?? null;
  if (drawnFacts === newest && facts.length) return;
  const list = $("events");
  const from = drawnFacts ? facts.lastIndexOf(drawnFacts) + 1 : 0;
  if (from === 0) list.replaceChildren();
  for (const fact of facts.slice(Math.max(from, facts.length - SHOWN_FACTS))) list.prepend(factItem(fact, words));
  while (list.children.length > SHOWN_FACTS) list.lastChild.remove();
  drawnFacts = newest;
}

function factItem(fact, words) {
  const item = document.createElement("li");
  const dot = document.createElement("i");
  dot.style.background = fact.number === undefined ? "transparent" : colorOf(fact.number);
  const when = Object.assign(document.createElement("span"), { className: "when", textContent: words.atStep(fact.step) });
  item.className = fact.kind;
  item.append(dot, when, " ", sentence(fact, words));
  return item;
}

// ---- set-up ----

function translate() {
  const words = texts();
  translatePage();
  $("language").textContent = currentLanguage() === "en" ? "中文" : "English";
  $("language").lang = currentLanguage() === "en" ? "zh" : "en";
  $("speed").replaceChildren(...SPEEDS.map((speed) => new Option(speed === null ? words.fullSpeed : words.perSecond(speed), String(speed))));
  $("scenes").replaceChildren(...Object.keys(SCENES).map((name) => {
    const button = Object.assign(document.createElement("button"), { textContent: words[name], title: words[`${name}Help`] });
    button.dataset.scene = name;
    button.addEventListener("click", () => playScene(name));
    return button;
  }));
  $("pool-legend").replaceChildren(...legend(words));
  chats.translate();
  drawnFacts = null;
  requestDraw();
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("vllm-mini-theme", root.dataset.theme);
  requestDraw();
}

function listen() {
  $("engine-served").addEventListener("click", () => show(served));
  $("engine-sandbox").addEventListener("click", () => (sandbox ? show(sandbox) : startSandbox(settingsOf($("sandbox-form")))));
  $("sandbox-form").addEventListener("submit", (event) => {
    event.preventDefault();
    startSandbox(settingsOf(event.target));
  });
  $("pause").addEventListener("click", togglePause);
  $("step").addEventListener("click", oneStep);
  $("speed").addEventListener("change", () => {
    source.speed = JSON.parse($("speed").value);
    if (source.mode !== "replay") setPace({ num_steps: source.isPaused ? 0 : null });
  });
  $("seek").addEventListener("input", () => {
    stopPlaying();
    goTo(Number($("seek").value));
  });
  $("to-live").addEventListener("click", () => goTo(source.history.end));
  $("save-trace").addEventListener("click", () => source.history && download(new Blob([source.history.toLines()], { type: "application/jsonl" }), "trace.jsonl"));
  $("open-trace").addEventListener("change", (event) => {
    if (event.target.files[0]) openTrace(event.target.files[0]);
    event.target.value = "";
  });
  $("save-png").addEventListener("click", () => savePicture("mini-vllm.png"));
  $("theme").addEventListener("click", toggleTheme);
  $("language").addEventListener("click", () => {
    setLanguage(currentLanguage() === "en" ? "zh" : "en");
    translate();
  });
  addEventListener("resize", requestDraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", requestDraw);
}

document.documentElement.dataset.theme = localStorage.getItem("vllm-mini-theme") ?? "";
listen();
translate();
connect(served);

/** For tests, and for whoever opens the console: what the page knows. */
window.miniVllm = { source: () => source, state: () => source.state, pool, timeline, queues, table, chosen: () => chosen, isDrawn: () => !isWanted, lastFrameCost: () => frameCost };
