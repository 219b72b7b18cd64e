// The chat. What a model says is text: it goes into text nodes and never into markup.
import { heldStream, Refused } from "./stream.js";
import { watchCluster } from "./cluster.js";

const at = (id) => document.getElementById(id);
const messages = []; // {role, content}, of the whole conversation
let running = null; // the AbortController of the stream that runs

const key = () => at("key").value.trim(); // kept nowhere else

function made(tag, name, text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}

export const shortName = (replica) => replica.split("#").at(-1);

function say(text) {
  at("status").textContent = text;
}

// --- what is asked ---

function number(id) {
  const text = at(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function body() {
  const system = at("system").value.trim();
  const asked = {
    model: at("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  };
  if (at("logprobs").checked) Object.assign(asked, { logprobs: true, top_logprobs: 5 });
  const schema = at("schema").value.trim();
  if (schema) {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  }
  return asked;
}

// --- what is shown ---

function added(role, text) {
  const message = made("article", `message ${role}`);
  message.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const content = made("div", "content", text);
  message.append(content);
  at("empty").hidden = true;
  at("log").append(message);
  message.scrollIntoView({ block: "end" });
  return { message, content };
}

/** An answer as it grows: parts by replica, and marks where another one goes on. */
class Answer {
  constructor() {
    const { message, content } = added("assistant", "");
    this.message = message;
    this.content = content;
    this.figures = made("p", "figures");
    message.append(this.figures);
    this.text = "";
    this.replica = "";
    this.part = null;
    this.numTokens = 0;
    this.beganAt = performance.now();
    this.firstAt = null;
  }

  take({ chunks, replica, numTokens }) {
    if (numTokens && this.firstAt === null) this.firstAt = performance.now();
    this.numTokens += numTokens;
    if (replica && replica !== this.replica) this.goOn(replica);
    for (const chunk of chunks) {
      for (const choice of chunk.choices ?? []) this.write(choice);
    }
    this.showFigures();
    if (isNearEnd()) this.message.scrollIntoView({ block: "end" });
  }

  goOn(replica) {
    if (this.replica) {
      const mark = made("span", "mark", `⟲ goes on at ${shortName(replica)}`);
      mark.setAttribute("role", "note");
      mark.title = `${this.replica} was lost or left; ${replica} has continued with the same tokens`;
      this.content.append(mark);
      say(`The answer continues on replica ${shortName(replica)}.`);
    }
    this.replica = replica;
    this.part = made("span", "part");
    this.part.dataset.replica = replica;
    this.part.title = `written by ${shortName(replica)}`;
    this.content.append(this.part);
  }

  write(choice) {
    const text = choice.delta?.content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    if (this.part === null) this.goOn("");
    if (tokens.length === 1 && text) this.part.append(token(text, tokens[0]));
    else if (text) this.part.append(text);
    this.text += text;
    const thought = choice.delta?.reasoning;
    if (thought) this.thoughts().append(thought);
  }

  thoughts() {
    if (!this.thinking) {
      const details = made("details", "thoughts");
      details.append(made("summary", "", "Thoughts"));
      this.thinking = made("div", "");
      details.append(this.thinking);
      this.message.prepend(details);
    }
    return this.thinking;
  }

  showFigures() {
    if (this.firstAt === null) return;
    const seconds = (performance.now() - this.firstAt) / 1000;
    const rate = this.numTokens > 1 && seconds > 0 ? `${((this.numTokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const first = `first token after ${((this.firstAt - this.beganAt) / 1000).toFixed(2)} s`;
    this.figures.textContent = [`${this.numTokens} tokens`, rate, first].filter(Boolean).join(" · ");
  }
}

function token(text, said) {
  const element = made("span", "token", text);
  const others = said.top_logprobs.map((one) => `${JSON.stringify(one.token)} ${percent(one.logprob)}`);
  element.title = [`${JSON.stringify(said.token)} ${percent(said.logprob)}`, ...others].join("\n");
  element.dataset.likely = said.logprob > -0.1 ? "3" : said.logprob > -0.7 ? "2" : said.logprob > -2.3 ? "1" : "0";
  return element;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function isNearEnd() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 160;
}

// --- what happens ---

async function ask() {
  let asked;
  try {
    asked = body();
  } catch (error) {
    return say(`The JSON schema cannot be read: ${error.message}`);
  }
  running = new AbortController();
  setRunning(true);
  say("Waiting for the answer.");
  const answer = new Answer();
  const options = {
    key: key(),
    signal: running.signal,
    onLost: () => (answer.message.classList.add("lost"), say("The connection to the router is lost; trying again.")),
    onBack: () => (answer.message.classList.remove("lost"), say("Connected again; the answer continues.")),
  };
  try {
    for await (const delivery of heldStream("/v1/chat/completions", asked, options)) answer.take(delivery);
    say(`The answer is complete: ${answer.numTokens} tokens.`);
    answer.message.dataset.over = "true";
  } catch (error) {
    const isStopped = running.signal.aborted;
    if (!isStopped && !(error instanceof Refused)) console.error(error);
    say(isStopped ? "Stopped." : error.message);
    if (!isStopped) answer.message.append(made("p", "error", error.message));
    answer.message.dataset.over = isStopped ? "stopped" : "failed";
  }
  answer.message.classList.remove("lost");
  messages.push({ role: "assistant", content: answer.text });
  running = null;
  setRunning(false);
}

function setRunning(isRunning) {
  at("log").setAttribute("aria-busy", `${isRunning}`);
  at("send").disabled = isRunning;
  at("stop").disabled = !isRunning;
  at("again").disabled = isRunning || messages.at(-1)?.role !== "assistant";
  at("clear").disabled = isRunning;
}

function send(text) {
  messages.push({ role: "user", content: text });
  added("user", text);
  ask();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  send(text);
});

for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    send(example.textContent); // what is being written stays
    at("prompt").focus(); // the button is gone
  });
}

at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

at("stop").addEventListener("click", () => running?.abort());

at("again").addEventListener("click", () => {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  at("log").lastElementChild?.remove();
  ask();
});

at("clear").addEventListener("click", () => {
  messages.length = 0;
  for (const message of at("log").querySelectorAll(".message")) message.remove();
  at("empty").hidden = false;
  setRunning(false);
  at("prompt").focus();
});

// --- models and the cluster ---

async function loadModels() {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  try {
    const answer = await fetch("/v1/models", { headers });
    if (answer.status === 401) return say("This server requires an API key: enter it above.");
    const names = (await answer.json()).data.map((one) => one.id);
    if (names.join() === [...at("model").options].map((one) => one.value).join()) return;
    at("model").replaceChildren(...names.map((name) => new Option(name, name)));
  } catch (error) {
    say("The models cannot be listed; is the router up?");
  }
}

at("key").addEventListener("change", loadModels);
setRunning(false);
loadModels();
watchCluster({ at, made, key, shortName, onModels: loadModels });
