// Every text of the page, in English and Chinese. A text with parts is a function of them.

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const list = (ids) => (ids.length > 8 ? `${ids.slice(0, 6).join(" ")} … (${ids.length})` : ids.join(" "));

const en = {
  skip: "Skip to the events in words", live: "live", engine: "Engine", served: "served", sandbox: "sandbox",
  sandboxHelp: "A tiny random model beside the served one: slow it, starve it, switch things off; nobody else notices",
  saveTrace: "Save trace", openTrace: "Open trace", theme: "Light or dark", controls: "Controls", pause: "Pause",
  resume: "Resume", oneStep: "One step", speed: "Speed", replay: "Replay", toLive: "Back to live",
  settings: "Sandbox switches", prefixCache: "prefix cache", chunkedPrefill: "chunked prefill",
  continuousBatching: "continuous batching", poolSize: "blocks in the pool", budget: "tokens a step",
  maxSeqs: "sequences at once", freshEngine: "Start a fresh engine", numbers: "Numbers", chats: "Chats",
  scenes: "Scenes", pool: "Physical blocks", allBlocks: "all", queues: "Queues", table: "Block table", of: "of",
  timeline: "Iterations", events: "Events in words", keyTitle: "This server needs its API key",
  keyHelp: "It is kept in this tab only.", keySend: "Connect", keyWrong: "That was not the key.",
  fullSpeed: "full speed", perSecond: (n) => `${n} steps/s`,
  connecting: "connecting…", gone: "The feed broke off; trying again…", isLive: "live", isPaused: "paused",
  isPausedServed: "paused: all who ask this server wait", isReplay: (name) => `replay of ${name}`, isPast: "looking back",
  sandboxStarting: "starting the sandbox…", atStep: (step) => `step ${step}`,
  scene4: "4 questions", sceneShared: "one system prompt", sceneLong: "long among short", sceneFork: "n = 4",
  sceneTight: "tight memory",
  scene4Help: "Four different questions at once: watch them decode in the same steps",
  sceneSharedHelp: "Four questions with one system prompt: its blocks are stored once and shared",
  sceneLongHelp: "A long prompt among short ones: it is computed in chunks while the others go on",
  sceneForkHelp: "One prompt, four answers: all blocks are shared, and copied when the answers part",
  sceneTightHelp: "In the sandbox, with few blocks: the youngest makes way and comes back later",
  send: "Send", stop: "Stop", say: "Ask something", box: (n) => `Chat ${n}`, you: "you", empty: "Ask something, or choose a scene.",
  used: "used", shared: "shared (×count)", cached: "free, but cached (↺ order of reuse)", free: "free", unused: "never used",
  poolSummary: (used, cached, free, total) => `${used} used · ${cached} cached · ${free} free of ${total}`,
  showing: (shown, total) => `${shown} of ${total} shown: the others were never used`,
  blockUsed: (block, owners, count) => `Block ${block}: held by ${owners} (reference count ${count})`,
  blockCached: (block, order) => `Block ${block}: free, but still found by its hash; number ${order} to be taken`,
  blockFree: (block, order) => `Block ${block}: free; number ${order} to be taken`,
  slots: (filled, size) => `${filled} of ${size} slots written`, hashIs: (hash, parent) => `hash ${hash}, after ${parent ?? "nothing"}`,
  chooseBlock: "Point at a block, or move with the arrow keys, to see what is in it.",
  poolLabel: (used, total) => `Pool of ${total} blocks, ${used} in use. Arrow keys move from block to block.`,
  waiting: "waiting", running: "running", swapped: "preempted", finished: "finished",
  none: "nobody", cardTokens: (prompt, out) => `prompt ${prompt}, answer ${out}`, cardComputed: (done, all) => `${done}/${all} computed`,
  cardBlocks: (n) => plural(n, "block"), cardCached: (n) => `${n} cached`, cardPreempted: (n) => `preempted ×${n}`,
  cardHost: (n) => `${plural(n, "block")} in host memory`,
  why: {
    blocks: (needed, left) => `needs ${plural(needed, "block")}, ${left} free`,
    budget: (needed, left) => `budget: ${plural(needed, "token")} to compute, ${left} left in the step`,
    max_num_seqs: (needed, left) => `max_num_seqs: needs room for ${needed}, ${left} left`,
    preemption: () => "this step preempted, so nobody comes in", batch: () => "static batching: the batch has to finish first",
    behind: (label) => `behind ${label}`, new: () => "has just come",
  },
  reason: { stop: "done", length: "length reached", abort: "aborted", error: "failed" },
  noChosen: "No sequence holds blocks now.",
  logical: "logical block", physical: "physical block", wasteLast: (n) => `${plural(n, "slot")} of the last block still empty`,
  paged: (blocks, slots, written) => `paged: ${plural(blocks, "block")} = ${slots} slots, ${written} written`,
  contiguous: (slots, percent) => `contiguous, reserved for prompt + max_tokens: ${slots} slots, ${percent} % empty`,
  hidden: "(texts are switched off)",
  chunk: "prefill", decode: "decode", waits: "waits", preempts: "preempted", budgetUsed: "tokens in the step",
  timelineSummary: (tokens, budget) => `${tokens} tokens in the last step, of ${budget}`,
  timelineLabel: (steps, rows) => `Timeline: the last ${steps} steps of ${rows} sequences. The events in words say the same.`,
  staticGhost: (steps, now) => `static batching would have done: ${steps} steps; the line is where ${now} steps ended`,
  staticSummary: (ours, theirs, saved, percent) =>
    `Static batching would have taken ${theirs} steps instead of ${ours}: continuous batching saved ${saved} s (${percent} %) until the mean answer.`,
  staticNone: "With more requests, this says what static batching would have taken.",
  numberNames: {
    ttft: "time to first token", itl: "inter-token latency", rate: "tokens/s", blocks: "used / cached / free",
    hits: "prefix hit rate", waste: "empty slots", preemptions: "preemptions", step: "time of a step",
  },
  event: {
    arrived: (e) => `${e.who} arrives with ${plural(e.tokens, "token")}`,
    admitted: (e) => `${e.who} runs: ${plural(e.blocks, "new block")}` + (e.cached ? `, and ${e.shared} shared: the same first ${e.cached} tokens${e.others ? ` as ${e.others}` : ""}` : ""),
    waits: (e) => `${e.who} waits: ${e.why}`,
    chunk: (e) => `${e.who} computes tokens ${e.from}–${e.to} of ${e.of}, a chunk`,
    first: (e) => `${e.who} has its first token, ${e.seconds} s after it came`,
    grows: (e) => `${e.who} fills a block and takes another: ${list(e.blocks)}`,
    forked: (e) => `${e.who} forks off ${e.parent}: the same ${plural(e.blocks.length, "block")} ${list(e.blocks)}`,
    copied: (e) => `${e.who} writes to block ${e.from}, which ${e.others || "others"} had too: into a copy, block ${e.to}`,
    evicted: (e) => `${plural(e.blocks.length, "old prefix block")} taken for new tokens: ${list(e.blocks)}`,
    preempted: (e) => (e.by ? `${e.by} needs a block, none is free: ${e.who}, the youngest, is preempted` : `${e.who} needs a block, none is free: as the youngest it is preempted itself`) + ` and gives back ${plural(e.freed, "block")}` +
      (e.host ? `; ${e.host} copied to host memory` : `; ${e.kept} of its ${e.tokens} tokens are still cached`),
    resumed: (e) => `${e.who} is back` + (e.swapped ? ", its blocks copied from host memory" : `: ${e.again} tokens to compute again, ${e.kept} still cached`),
    finished: (e) => `${e.who} is finished (${e.reason}) after ${plural(e.tokens, "token")}; ${plural(e.freed, "block")} free again`,
  },
  atStepText: (step, text) => `step ${step}: ${text}`, traceBad: (why) => `This is no trace: ${why}`,
  failed: (why) => `It failed: ${why}`, recordedBy: "computed by",
};

const zh = {
  ...en,
  skip: "跳到文字事件", live: "实时", engine: "引擎", served: "在服务", sandbox: "沙盒",
  sandboxHelp: "旁边的一个随机小模型：可以放慢、缩小、关掉功能，不影响任何人",
  saveTrace: "保存轨迹", openTrace: "打开轨迹", theme: "浅色或深色", controls: "控制", pause: "暂停", resume: "继续",
  oneStep: "单步", speed: "速度", replay: "回放", toLive: "回到实时", settings: "沙盒开关", prefixCache: "前缀缓存",
  chunkedPrefill: "分块预填充", continuousBatching: "连续批处理", poolSize: "块池大小", budget: "每步词元数",
  maxSeqs: "同时运行的序列", freshEngine: "启动新引擎", numbers: "数字", chats: "对话", scenes: "场景", pool: "物理块",
  allBlocks: "全部", queues: "队列", table: "块表", of: "属于", timeline: "迭代", events: "文字事件",
  keyTitle: "此服务器需要 API 密钥", keyHelp: "密钥只保存在此标签页中。", keySend: "连接", keyWrong: "密钥不对。",
  fullSpeed: "全速", perSecond: (n) => `${n} 步/秒`, connecting: "连接中…", gone: "数据流中断，正在重试…", isLive: "实时",
  isPaused: "已暂停", isPausedServed: "已暂停：该服务器的所有请求都在等", isReplay: (name) => `回放 ${name}`, isPast: "回看中",
  sandboxStarting: "正在启动沙盒…", atStep: (step) => `第 ${step} 步`,
  scene4: "四个问题", sceneShared: "同一系统提示", sceneLong: "长短混合", sceneFork: "n = 4", sceneTight: "内存紧张",
  scene4Help: "四个不同的问题同时进来：看它们在同一步里解码",
  sceneSharedHelp: "四个问题共用一个系统提示：它的块只存一份，大家共享",
  sceneLongHelp: "一个很长的提示夹在短提示中：它被分块计算，别人照常继续",
  sceneForkHelp: "一个提示，四个回答：所有块先共享，回答分叉时再复制",
  sceneTightHelp: "在沙盒里，只有很少的块：最年轻的让位，稍后再回来",
  send: "发送", stop: "停止", say: "说点什么", box: (n) => `对话 ${n}`, you: "你", empty: "提个问题，或选一个场景。",
  used: "使用中", shared: "共享（×计数）", cached: "空闲但有缓存（↺ 取用次序）", free: "空闲", unused: "从未使用",
  poolSummary: (used, cached, free, total) => `使用 ${used} · 缓存 ${cached} · 空闲 ${free}，共 ${total}`,
  showing: (shown, total) => `显示 ${shown}/${total}：其余从未使用`,
  blockUsed: (block, owners, count) => `块 ${block}：由 ${owners} 持有（引用计数 ${count}）`,
  blockCached: (block, order) => `块 ${block}：空闲，但仍可按哈希找到；排第 ${order} 个被取用`,
  blockFree: (block, order) => `块 ${block}：空闲；排第 ${order} 个被取用`,
  slots: (filled, size) => `${size} 个槽已写 ${filled} 个`, hashIs: (hash, parent) => `哈希 ${hash}，前一块 ${parent ?? "无"}`,
  chooseBlock: "指向一个块，或用方向键移动，看里面有什么。",
  poolLabel: (used, total) => `共 ${total} 块，${used} 块使用中。方向键逐块移动。`,
  waiting: "等待", running: "运行", swapped: "被抢占", finished: "完成", none: "没有",
  cardTokens: (prompt, out) => `提示 ${prompt}，回答 ${out}`, cardComputed: (done, all) => `已算 ${done}/${all}`,
  cardBlocks: (n) => `${n} 块`, cardCached: (n) => `缓存命中 ${n}`, cardPreempted: (n) => `被抢占 ×${n}`,
  cardHost: (n) => `主机内存中 ${n} 块`,
  why: {
    blocks: (needed, left) => `需要 ${needed} 块，空闲 ${left} 块`,
    budget: (needed, left) => `预算：还要算 ${needed} 个词元，本步只剩 ${left}`,
    max_num_seqs: (needed, left) => `max_num_seqs：需要 ${needed} 个位置，剩 ${left}`,
    preemption: () => "本步发生了抢占，不再放人进来", batch: () => "静态批处理：要等整批完成",
    behind: (label) => `排在 ${label} 之后`, new: () => "刚到",
  },
  reason: { stop: "结束", length: "达到长度", abort: "被中止", error: "失败" },
  noChosen: "现在没有序列持有块。", logical: "逻辑块", physical: "物理块", wasteLast: (n) => `最后一块还空 ${n} 个槽`,
  paged: (blocks, slots, written) => `分页：${blocks} 块 = ${slots} 槽，已写 ${written}`,
  contiguous: (slots, percent) => `连续预留（提示 + max_tokens）：${slots} 槽，${percent} % 是空的`,
  hidden: "（文字已关闭）", chunk: "预填充", decode: "解码", waits: "等待", preempts: "被抢占", budgetUsed: "本步词元数",
  timelineSummary: (tokens, budget) => `上一步 ${tokens} 个词元，上限 ${budget}`,
  timelineLabel: (steps, rows) => `时间线：${rows} 个序列的最近 ${steps} 步。文字事件说的是同样的内容。`,
  staticGhost: (steps, now) => `静态批处理会是这样：${steps} 步；竖线处是现在的 ${now} 步`,
  staticSummary: (ours, theirs, saved, percent) => `静态批处理需要 ${theirs} 步，这里只用 ${ours} 步：平均每个回答省了 ${saved} 秒（${percent} %）。`,
  staticNone: "请求多一些，这里会说明静态批处理要花多少。",
  numberNames: {
    ttft: "首词元延迟", itl: "词元间延迟", rate: "词元/秒", blocks: "使用 / 缓存 / 空闲", hits: "前缀命中率", waste: "空槽",
    preemptions: "抢占次数", step: "每步时间",
  },
  event: {
    arrived: (e) => `${e.who} 到达，${e.tokens} 个词元`,
    admitted: (e) => `${e.who} 开始运行：新取 ${e.blocks} 块` + (e.cached ? `，共享 ${e.shared} 块：前 ${e.cached} 个词元相同${e.others ? `（与 ${e.others}）` : ""}` : ""),
    waits: (e) => `${e.who} 等待：${e.why}`, chunk: (e) => `${e.who} 计算第 ${e.from}–${e.to} 个词元（共 ${e.of}），一个分块`,
    first: (e) => `${e.who} 有了第一个词元，到达后 ${e.seconds} 秒`,
    grows: (e) => `${e.who} 写满一块，再取：${list(e.blocks)}`,
    forked: (e) => `${e.who} 从 ${e.parent} 分叉：共用 ${e.blocks.length} 块 ${list(e.blocks)}`,
    copied: (e) => `${e.who} 要写 ${e.others || "别人"} 也持有的块 ${e.from}：先复制到块 ${e.to}`,
    evicted: (e) => `${e.blocks.length} 个旧前缀块让给新词元：${list(e.blocks)}`,
    preempted: (e) => (e.by ? `${e.by} 需要一块而没有空闲：最年轻的 ${e.who} 被抢占` : `${e.who} 需要一块而没有空闲：它最年轻，自己被抢占`) + `，交回 ${e.freed} 块` +
      (e.host ? `；${e.host} 块复制到主机内存` : `；它的 ${e.tokens} 个词元中 ${e.kept} 个仍在缓存里`),
    resumed: (e) => `${e.who} 回来了` + (e.swapped ? "，块从主机内存复制回来" : `：${e.again} 个词元要重算，${e.kept} 个仍在缓存里`),
    finished: (e) => `${e.who} 完成（${e.reason}），共 ${e.tokens} 个词元；${e.freed} 块重新空闲`,
  },
  atStepText: (step, text) => `第 ${step} 步：${text}`, traceBad: (why) => `这不是轨迹文件：${why}`,
  failed: (why) => `失败：${why}`, recordedBy: "由此计算：",
};

let language = localStorage.getItem("vllm-mini-language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

/** The texts of the chosen language. */
export function texts() {
  return language === "zh" ? zh : en;
}

export function currentLanguage() {
  return language;
}

export function setLanguage(value) {
  language = value;
  localStorage.setItem("vllm-mini-language", value);
}

/** Write the texts into all elements that name one. */
export function translatePage() {
  document.documentElement.lang = language;
  const words = texts();
  for (const element of document.querySelectorAll("[data-i18n]")) element.textContent = words[element.dataset.i18n];
  for (const element of document.querySelectorAll("[data-i18n-title]")) element.title = words[element.dataset.i18nTitle];
  for (const element of document.querySelectorAll("[data-i18n-label]")) {
    element.setAttribute("aria-label", words[element.dataset.i18nLabel]);
  }
}
