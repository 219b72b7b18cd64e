// The live view of the cluster: replicas, queue, and what happens to them. Asks once a second while it is looked at.

const EVERY_MS = 1_000;
const KINDS = { up: "is up", leaving: "is draining", back: "is no longer draining", lost: "was lost" };
const DONE = {
  drain: "gets no new requests; its requests move to other replicas",
  undrain: "gets new requests again",
  kill: "is killed; its requests continue on other replicas",
};

export function watchCluster({ at, made, key, shortName, onModels }) {
  let before = new Map();
  const rows = new Map(); // by replica, drawn in place: a button that is looked at or focused stays where it is
  let models = "";
  let newest = null;

  async function look() {
    if (document.hidden || !at("cluster").open) return;
    try {
      const answer = await fetch("/cluster", { headers: authorization() });
      if (!answer.ok) return told(answer.status === 401 ? "The cluster view needs an operator key." : denied(answer));
      show(await answer.json());
    } catch (error) {
      told("The router does not answer.");
    }
  }

  const authorization = () => (key() ? { authorization: `Bearer ${key()}` } : {});

  const denied = (answer) => (answer.status === 403 ? "This key is not an operator key." : `The server answered ${answer.status}.`);

  function told(text) {
    at("state").textContent = text;
  }

  function show(cluster) {
    overloaded(cluster.overload, cluster.suspended);
    told(`${cluster.open} open, ${cluster.queued} queued, ${counted(cluster.failovers, "failover")}`);
    at("weights").textContent = cluster.models.map(weights).join("; ");
    drawRows(cluster.replicas, cluster.is_killable);
    drawTransfers(cluster.replicas);
    at("waiting").replaceChildren(
      ...cluster.waiting.map((one) => made("li", "", `${one.count} × ${one.class}, ${one.tenant || "no tenant"}, ${one.model}`)),
    );
    if (!cluster.waiting.length) at("waiting").append(made("li", "quiet", "no waiting requests"));
    at("sessions").replaceChildren(...cluster.sessions.slice(0, 12).map(session));
    if (!cluster.sessions.length) at("sessions").append(made("li", "quiet", "no sessions yet"));
    at("spoiled").replaceChildren(...cluster.spoiled.slice(0, 5).map(spoiled));
    at("events").replaceChildren(...cluster.events.slice(0, 20).map(event));
    announce(cluster.events[0]);
    before = new Map(cluster.replicas.map((one) => [one.replica_id, one]));
    const names = cluster.models.map((one) => one.model).join();
    if (names !== models) onModels();
    models = names;
  }

  /** Who sent blocks to whom, the most first: tokens since the receiver's start, and those of the last second. */
  function drawTransfers(replicas) {
    const pairs = replicas.flatMap((one) => Object.entries(one.received_from).map(([sender, tokens]) => ({ sender, one, tokens })));
    pairs.sort((left, right) => right.tokens - left.tokens);
    const most = Math.max(...pairs.map((pair) => pair.tokens));
    at("transfers").replaceChildren(...pairs.slice(0, 20).map((pair) => transfer(pair, most)));
    if (!pairs.length) at("transfers").append(made("li", "quiet", "no transfers yet"));
  }

  function transfer({ sender, one, tokens }, most) {
    const last = before.get(one.replica_id);
    const now = last ? tokens - (last.received_from[sender] ?? 0) : 0;
    const rate = now > 0 ? `, ${number(now)} in the last second` : "";
    const element = made("li", now > 0 ? "transfer now" : "transfer", `${shortName(sender)} → ${shortName(one.replica_id)}: ${number(tokens)} tokens${rate}`);
    element.title = `from ${sender} to ${one.replica_id}`;
    element.style.setProperty("--share", tokens / most);
    return element;
  }

  /** How a model's weights are quantized, and their memory; made-up ones have none that is known. */
  function weights(one) {
    const size = one.weight_bytes ? `, ${(one.weight_bytes / 2 ** 20).toFixed(one.weight_bytes < 2 ** 30 ? 1 : 0)} MiB of weights a replica` : "";
    return `${one.model}: quantization ${one.quantization}${size}`;
  }

  /** Turns of a conversation, what is kept of it, and what was not computed again. */
  function session(one) {
    const saved = one.memory_tokens + one.disk_tokens;
    const disk = one.disk_tokens ? `, ${number(one.disk_tokens)} of them from the disk` : "";
    const time = one.saved_s ? `, about ${one.saved_s < 10 ? one.saved_s.toFixed(1) : Math.round(one.saved_s)} s` : "";
    const kept = one.kept_s ? `; kept for ${ago(one.kept_s).replace(" ago", "")} more` : "";
    const parts = [counted(one.turns, "turn"), `${number(one.prompt_tokens)} tokens`, `saved ${number(saved)} of ${number(saved + one.computed_tokens)}${disk}${time}${kept}`];
    const element = made("li", "", `${one.name ? shortName(one.name) : "a session"}: ${parts.join(", ")}`);
    element.title = [one.name, one.model, one.tenant].filter(Boolean).join(", ");
    element.append("; ", made("time", "", ago(one.age_s)));
    return element;
  }

  /** A client whose prompts begin with a line that changes with each call. */
  function spoiled(one) {
    const client = one.tenant ? `Tenant ${one.tenant}` : "A client";
    return made("li", "overloaded", `${client} misses the prefix cache: ${number(one.tokens)} tokens computed after a line that changes with each request (rule ${one.rule})`);
  }

  const number = (count) => count.toLocaleString("en");

  /** What this router refuses to protect itself, and how near its limits it is. */
  function overloaded(state, suspended) {
    if (!state) return;
    const active = Object.entries(state.active).map(([action, resource]) => `${action.replaceAll("_", " ")} (${resource.replaceAll("_", " ")})`);
    const used = Object.entries(state.pressures).map(([name, share]) => `${name.replaceAll("_", " ")} ${percent(share)}`);
    const parts = [active.length ? `Overload: ${active.join(", ")}` : "No overload", used.join(", ")];
    if (suspended) parts.push(`${counted(suspended, "stream")} suspended by slow clients`);
    at("overload").textContent = parts.join("; ");
    at("overload").classList.toggle("overloaded", active.length > 0);
  }

  /** For screen readers, once for each thing that happens; the list itself is drawn anew each second. */
  function announce(one) {
    const said = one ? `${shortName(one.replica_id)} ${KINDS[one.kind] ?? one.kind}` : "";
    if (newest !== null && said !== newest) at("news").textContent = said;
    newest = said;
  }

  function drawRows(replicas, areKillable) {
    const there = new Set(replicas.map((one) => one.replica_id));
    for (const [id, row] of rows) if (!there.has(id)) row.element.remove(), rows.delete(id);
    for (const one of replicas) {
      const row = rows.get(one.replica_id) ?? newRow(one);
      for (const cell of row.cells) cell.remove();
      row.cells = cellsOf(one);
      row.orders.before(...row.cells);
      row.element.classList.toggle("leaving", one.is_retiring);
      row.isDrained = one.is_retiring;
      row.button.textContent = one.is_retiring ? "Undrain" : "Drain";
      row.kill.hidden = !areKillable;
    }
  }

  function newRow(one) {
    const element = made("tr", "");
    element.setAttribute("role", "row"); // as a card (page.css) it is still read as a row of a table
    const name = made("th", "", shortName(one.replica_id));
    name.setAttribute("role", "rowheader");
    name.title = `${one.replica_id}, ${one.model}`;
    const orders = made("td", "orders");
    orders.setAttribute("role", "cell");
    const button = made("button", "order");
    const kill = made("button", "order kill", "Kill");
    const row = { element, orders, button, kill, cells: [], isDrained: false };
    for (const each of [button, kill]) {
      each.type = "button";
      each.setAttribute("aria-describedby", "order");
    }
    kill.hidden = true;
    button.addEventListener("click", () => order(one.replica_id, row.isDrained ? "undrain" : "drain"));
    kill.addEventListener("click", () => order(one.replica_id, "kill"));
    orders.append(button, kill);
    element.append(name, orders);
    at("replicas").append(element);
    rows.set(one.replica_id, row);
    return row;
  }

  /** An operator's order; what came of it is said beside the table. */
  async function order(replica, verb) {
    const headers = { "content-type": "application/json", ...authorization() };
    try {
      const answer = await fetch(`/admin/replicas/${encodeURIComponent(replica)}/${verb}`, { method: "POST", headers, body: "{}" });
      at("order").textContent = answer.ok ? `${shortName(replica)} ${DONE[verb]}.` : (await answer.json()).error.message;
    } catch (error) {
      at("order").textContent = "The router does not answer.";
    }
    look();
  }

  function cellsOf(one) {
    const columns = [...at("columns").cells].map((column) => column.textContent);
    const cells = [
      made("td", "", `${one.num_ranks}`),
      made("td", "", `${one.num_running} + ${one.num_waiting}${one.role ? `, ${one.role}` : ""}`),
      blocks(one),
      made("td", "", percent(one.prefix_hit_rate)),
      made("td", "", percent(one.acceptance)),
      made("td", "step", steps(one)),
      made("td", "", rate(one)),
    ];
    cells.forEach((cell, index) => {
      cell.setAttribute("role", "cell");
      cell.dataset.column = columns[index + 1];
    });
    return cells;
  }

  function blocks(one) {
    const cell = made("td", "");
    const meter = made("meter", "");
    meter.max = one.num_total_blocks;
    meter.value = one.num_used_blocks;
    const onDisk = one.num_disk_blocks ? `, ${one.num_disk_blocks} on the disk` : "";
    const moved = one.num_received_tokens ? `, ${one.num_received_tokens} tokens from other replicas` : "";
    const said = `${one.num_used_blocks} of ${one.num_total_blocks} blocks in use, ${one.num_cached_blocks ?? 0} cached${onDisk}${moved}`;
    meter.setAttribute("aria-label", said);
    meter.title = said;
    cell.append(meter);
    return cell;
  }

  /** The mean step since the last look, and how it is split. */
  function steps(one) {
    const last = before.get(one.replica_id) ?? {};
    const count = one.num_steps - (last.num_steps ?? 0);
    if (!(count > 0)) return "–";
    const ms = ["plan", "run", "commit"].map((name) => {
      const field = `${name}_time_s`;
      return (1000 * (one[field] - (last[field] ?? 0))) / count;
    });
    return `${ms.reduce((sum, each) => sum + each).toFixed(1)} ms (${ms.map((each) => each.toFixed(1)).join(" + ")})`;
  }

  function rate(one) {
    const last = before.get(one.replica_id);
    if (!last || one.num_tokens_generated === undefined) return "–";
    return `${Math.max(0, one.num_tokens_generated - (last.num_tokens_generated ?? 0))}/s`;
  }

  const percent = (share) => (share === undefined || share === null ? "–" : `${Math.round(100 * share)} %`);

  function event(one) {
    const moved = one.kind === "lost" && one.num_requests ? `; ${counted(one.num_requests, "request")} moved` : "";
    const element = made("li", `event ${one.kind}`, `${shortName(one.replica_id)} ${KINDS[one.kind] ?? one.kind}${moved}`);
    element.title = one.reason;
    element.append(made("time", "", ago(one.age_s)));
    return element;
  }

  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

  setInterval(look, EVERY_MS);
  at("cluster").addEventListener("toggle", look);
  at("key").addEventListener("change", look);
  look();
}
