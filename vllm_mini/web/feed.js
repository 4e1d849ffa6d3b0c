// Server-sent events through fetch, which, other than EventSource, can send an API key.

export class NeedsKey extends Error {}

let key = sessionStorage.getItem("vllm-mini-key");

export function setKey(value) {
  key = value;
  sessionStorage.setItem("vllm-mini-key", value);
}

export function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** POST JSON; returns the parsed answer or null. Throws an Error with the server's own words. */
export async function post(url, body) {
  const response = await fetch(url, { method: "POST", headers: headers(), body: JSON.stringify(body) });
  if (!response.ok) throw await errorOf(response);
  return response.status === 204 ? null : response.json();
}

async function errorOf(response) {
  const message = await response.json().then((content) => content.error.message, () => `HTTP ${response.status}`);
  return response.status === 401 ? new NeedsKey(message) : new Error(message);
}

/** The JSON of each event of a stream. `signal` ends it. */
export async function* events(url, { signal, body } = {}) {
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(url, { ...options, headers: headers(), signal, cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Follow an engine's feed for ever: calls `onRecord` for each record, `onGone` when it breaks off, and tries again. */
export async function follow(url, { signal, onRecord, onGone, onKey }) {
  for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 5000)) {
    try {
      for await (const record of events(url, { signal })) {
        wait = 500;
        onRecord(record);
        if (record.type === "end" && record.complete) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof NeedsKey) {
        await onKey(error.message);
        continue;
      }
    }
    onGone();
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
