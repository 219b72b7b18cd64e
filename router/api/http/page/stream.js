// A stream that continues where its router, or the connection to it, is lost. The resume record and the marks are those
// of router/wire/resume_codec.py: a comment behind the events of each delivery says what the record gets, and the next
// submission has the record behind the same body. No DOM here.

const MARK = ": resume ";
const RECONNECT_MS = 60_000;
const SILENT_MS = 25_000;
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 3_000;

export class Refused extends Error {}

/** Yields {chunks, replica, isOver} for each delivery. `onLost` is called at each loss, and `onBack` when the stream goes on. */
export async function* heldStream(path, body, { key, signal, onLost, onBack }) {
  const content = JSON.stringify(body);
  const state = { record: null, attempt: 0, beganAt: performance.now(), newsAt: performance.now(), pauseMs: FIRST_PAUSE_MS };
  let isLost = false;
  while (true) {
    const answer = await submitted(path, content, key, signal, state);
    if (answer !== null) {
      for await (const delivery of deliveries(answer, state)) {
        if (isLost) onBack();
        isLost = false;
        state.newsAt = performance.now();
        state.pauseMs = FIRST_PAUSE_MS;
        yield delivery;
        if (delivery.isOver) return;
      }
    }
    signal.throwIfAborted();
    if (performance.now() - state.newsAt > RECONNECT_MS) throw new Refused("no router has answered for a minute");
    if (!isLost) onLost();
    isLost = true;
    await pause(state.pauseMs, signal);
    state.pauseMs = Math.min(2 * state.pauseMs, LONGEST_PAUSE_MS);
  }
}

/** The response of a submission; null where it is worth another try. */
async function submitted(path, content, key, signal, state) {
  state.attempt += 1;
  const record = state.record === null ? "" : recordText(state);
  const headers = { "content-type": "application/json", "x-holdfast-hold": `${state.attempt}`, "x-holdfast-replicas": "1" };
  if (record) headers["x-holdfast-resume"] = `${new TextEncoder().encode(record).length}`;
  if (key) headers["authorization"] = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, body: content + record, signal });
  } catch (error) {
    signal.throwIfAborted();
    if (state.record === null && state.attempt > 3) throw new Refused("no router can be reached");
    return null;
  }
  const hold = answer.headers.get("x-holdfast-hold");
  if (answer.ok) {
    if (hold === null) throw new Refused("this server's streams cannot be held");
    state.record ??= { identity: hold, num_events: 0, sequences: [], system_fingerprint: "" };
    return answer;
  }
  const isAway = [502, 503, 504].includes(answer.status) && answer.headers.get("x-should-retry") !== "false";
  if (isAway && (state.record !== null || state.attempt <= 3)) return null;
  const said = await answer.json().catch(() => null);
  throw new Refused(said?.error?.message ?? `the server answered ${answer.status}`);
}

async function* deliveries(answer, state) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    while (true) {
      const { done, value } = await soon(reader.read());
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      let at;
      while ((at = markAt(buffer)) >= 0) {
        const end = buffer.indexOf("\n\n", at);
        if (end < 0) break;
        const mark = JSON.parse(buffer.slice(at + MARK.length, end));
        const chunks = chunksOf(buffer.slice(0, at));
        buffer = buffer.slice(end + 2);
        if ("may_retry" in mark) {
          if (mark.may_retry) return;
          throw new Refused(chunks.at(-1)?.error?.message ?? "the stream has failed");
        }
        merge(state.record, mark);
        yield { chunks, replica: mark.replica_id ?? "", numTokens: mark.token_ids.length, isOver: mark.is_last === true };
      }
    }
  } catch (error) {
    if (error instanceof Refused || error.name === "AbortError") throw error;
    return; // the connection was lost
  } finally {
    reader.cancel().catch(() => {});
  }
}

function markAt(buffer) {
  if (buffer.startsWith(MARK)) return 0;
  const at = buffer.indexOf(`\n${MARK}`);
  return at < 0 ? at : at + 1;
}

function chunksOf(events) {
  const lines = events.split("\n").filter((line) => line.startsWith("data: ") && line !== "data: [DONE]");
  return lines.map((line) => JSON.parse(line.slice("data: ".length)));
}

function merge(record, mark) {
  const index = mark.sequence_index ?? 0;
  while (record.sequences.length <= index) record.sequences.push({ token_ids: [], text_length: 0, finish_reason: null });
  const sequence = record.sequences[index];
  record.num_events = mark.num_events ?? 0;
  if (sequence.finish_reason !== null) return;
  if (mark.first_token_index !== sequence.token_ids.length) throw new Refused("the stream has a gap");
  sequence.token_ids.push(...mark.token_ids);
  sequence.text_length += mark.text_length ?? 0;
  sequence.finish_reason = mark.finish_reason ?? null;
  record.system_fingerprint = mark.system_fingerprint ?? record.system_fingerprint;
}

function recordText(state) {
  return JSON.stringify({ ...state.record, age_s: Math.round(performance.now() - state.beganAt) / 1000 });
}

/** Rejects where nothing is read for so long: a router says at least a comment every ten seconds. */
function soon(reading) {
  let timer;
  const silent = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("silent")), SILENT_MS);
  });
  return Promise.race([reading, silent]).finally(() => clearTimeout(timer));
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}
