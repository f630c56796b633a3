// The page's own script. Data lie in the page as gzip in base64; whatever is shown goes in as text, never as markup.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]/gu;
  const shown = (value) =>
    String(value ?? "").replace(STEERING, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
  const make = (name, text, cls) => {
    const found = document.createElement(name);
    if (text !== undefined) found.textContent = shown(text);
    if (cls) found.className = cls;
    return found;
  };
  const unpacked = async (id) => {
    const packed = atob(byId(id).textContent.trim());
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  // --- theme: what the reader's system prefers, until a click says otherwise ---
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = dark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme;

  // --- charts ---
  let specs = null;
  const draw = async () => {
    for (const place of document.querySelectorAll("[data-chart]")) {
      try {
        await vegaEmbed(place, specs.charts[Number(place.dataset.chart)], {
          ast: true, // no code is made of expressions: the page's policy forbids it
          actions: false,
          defaultStyle: false,
          config: specs.themes[theme],
          renderer: place.dataset.renderer,
          tooltip: { disableDefaultStyle: true },
          loader: { load: () => Promise.reject(new Error("nothing is fetched")) },
        });
        place.dataset.drawn = theme;
      } catch (error) {
        place.classList.add("bad");
        place.textContent = "This chart could not be drawn: " + shown(error.message);
      }
    }
  };

  // --- transcripts ---
  const LOT = 200;
  let rows = null;
  let order = [];
  let sorting = { key: "reward", down: true };
  let lot = LOT;
  let open = -1;
  let task = null; // name of the only task in the list
  const chunks = new Map();
  const figure = (value, digits) =>
    value === null || value === undefined
      ? "–"
      : Number(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const short = (id) => (id.length > 38 ? id.slice(0, 22) + "…" + id.slice(-15) : id); // ids differ at both ends
  const idOf = (r) => (task !== null && rows.id[r].startsWith(task) ? "…" + rows.id[r].slice(task.length) : short(rows.id[r]));
  const COLUMNS = [
    ["rollout", (r) => rows.id[r], (r) => (rows.runs.length > 1 ? short(rows.runs[rows.run[r]]) + ": " : "") + idOf(r)],
    ["status", (r) => rows.statuses[rows.status[r]], null],
    ["reward", (r) => rows.reward[r], (r) => figure(rows.reward[r], 2)],
    ["seconds", (r) => rows.seconds[r], (r) => figure(rows.seconds[r], 1)],
    ["turns", (r) => rows.turns[r], null],
    ["tokens", (r) => rows.tokens[r], (r) => figure(rows.tokens[r], 0)],
    ["attempts", (r) => rows.attempts[r], null],
    ["CPU s", (r) => rows.cpu[r], (r) => figure(rows.cpu[r], 1)],
    ["MB", (r) => rows.memory[r], (r) => figure(rows.memory[r], 0)],
  ];
  const NUMBERS = new Set(["reward", "seconds", "turns", "tokens", "attempts", "CPU s", "MB"]);

  const select = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [run, policy, status] = ["run", "policy", "status"].map((name) => byId("by-" + name).value);
    const only = byId("with-transcript").checked;
    order = [];
    for (let r = 0; r < rows.id.length; r += 1) {
      if (run !== "" && rows.run[r] !== Number(run)) continue;
      if (policy !== "" && rows.policy[r] !== Number(policy)) continue;
      if (status !== "" && rows.status[r] !== Number(status)) continue;
      if (task !== null && rows.tasks[rows.task[r]] !== task) continue;
      if (only && rows.place[r] === null) continue;
      const text = (rows.id[r] + " " + (rows.error[r] || "")).toLowerCase();
      if (words.every((word) => text.includes(word))) order.push(r);
    }
    const value = COLUMNS.find(([name]) => name === sorting.key)[1];
    const sign = sorting.down ? -1 : 1;
    order.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return a - b;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (x < y ? -1 : 1) * sign;
    });
    lot = LOT;
    list();
  };

  const list = () => {
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const [name] of COLUMNS) {
      const cell = make("th", name, NUMBERS.has(name) ? "n" : "");
      if (sorting.key === name) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      cell.addEventListener("click", () => {
        sorting = { key: name, down: sorting.key === name ? !sorting.down : NUMBERS.has(name) };
        select();
      });
      head.append(cell);
    }
    const body = table.createTBody();
    for (const r of order.slice(0, lot)) {
      const line = body.insertRow();
      line.dataset.row = r;
      if (r === open) line.className = "on";
      for (const [name, value, text] of COLUMNS) {
        const cell = make("td", (text || value)(r), NUMBERS.has(name) ? "n" : "");
        if (name === "rollout") cell.title = shown(rows.id[r]);
        if (name === "status" && rows.status[r] >= 0) {
          cell.className = { completed: "", truncated: "warn" }[value(r)] ?? "bad";
        }
        line.append(cell);
      }
    }
    byId("list").replaceChildren(table);
    byId("count").textContent = `${order.length.toLocaleString("en")} of ${rows.id.length.toLocaleString("en")} rollouts`;
    if (task !== null) {
      const all = make("button", `only ${task} ✕`);
      all.title = "show all tasks";
      all.addEventListener("click", () => {
        task = null;
        select();
      });
      byId("count").append(" ", all);
    }
    if (order.length > lot) {
      const more = make("button", `show ${Math.min(LOT, order.length - lot)} more`);
      more.addEventListener("click", () => {
        lot += LOT;
        list();
      });
      byId("list").append(more);
    }
  };

  const read = async (r) => {
    open = r;
    const reader = byId("reader");
    const facts = [
      rows.statuses[rows.status[r]],
      "reward " + figure(rows.reward[r], 3),
      figure(rows.seconds[r], 1) + " s",
      rows.turns[r] + " turns",
      figure(rows.tokens[r], 0) + " tokens in " + rows.sequences[r] + (rows.sequences[r] === 1 ? " sequence" : " sequences"),
      rows.attempts[r] + (rows.attempts[r] === 1 ? " attempt" : " attempts"),
      rows.cpu[r] === null ? "" : figure(rows.cpu[r], 1) + " s of CPU",
      rows.memory[r] === null ? "" : "at most " + figure(rows.memory[r], 0) + " MB",
      rows.nodes[rows.node[r]],
    ];
    const parts = [make("h3", rows.id[r]), make("p", facts.filter(Boolean).join(" · "), "faint")];
    if (rows.error[r]) parts.push(make("p", rows.kinds[rows.kind[r]] + ": " + rows.error[r], "bad"));
    if (rows.place[r] === null) {
      parts.push(make("p", "The transcript of this rollout is not in the page; see it with", "note"));
      parts.push(make("pre", `megaflow-hpc show RUN ${rows.id[r]}`));
    } else {
      const [chunk, at] = rows.place[r];
      if (!chunks.has(chunk)) chunks.set(chunk, await unpacked("transcripts-" + chunk));
      if (open !== r) return; // another was asked for meanwhile
      parts.push(...chunks.get(chunk)[at].map(message));
      if (!chunks.get(chunk)[at].length) parts.push(make("p", "No messages were recorded.", "note"));
    }
    reader.replaceChildren(...parts);
    reader.scrollTop = 0;
    for (const line of document.querySelectorAll("#list tr[data-row]")) {
      line.className = Number(line.dataset.row) === r ? "on" : "";
    }
    const place = new URLSearchParams({ run: rows.runs[rows.run[r]], rollout: rows.id[r] });
    history.replaceState(null, "", "#" + place);
  };

  const message = (said) => {
    const known = ["system", "user", "assistant", "tool", "verifier"].includes(said.role) ? said.role : "";
    const found = make("div", undefined, "message " + known);
    found.append(make("div", said.role, "role"));
    for (const [part, cls] of [["thought", "thought"], ["text", ""], ["calls", "calls"]]) {
      if (!said[part]) continue;
      const text = make("pre", said[part], cls);
      if (said[part].length > 3000) {
        const fold = make("details");
        fold.append(make("summary", `${said[part].length} characters: ${said[part].slice(0, 160)}…`, "faint"), text);
        found.append(fold);
      } else {
        found.append(text);
      }
    }
    for (const [name, label] of Object.entries(said.images ?? {})) {
      const url = byId("image-" + name)?.textContent;
      if (!url) continue; // not in the page; the label is in the text
      const picture = make("img");
      picture.src = url;
      picture.alt = picture.title = label;
      found.append(picture);
    }
    return found;
  };

  const browse = async () => {
    rows = await unpacked("rollouts");
    for (const [name, names] of [["run", rows.runs], ["policy", rows.policies], ["status", rows.statuses]]) {
      const choice = byId("by-" + name);
      names.forEach((text, value) => {
        const option = make("option", text);
        option.value = value;
        choice.append(option);
      });
      choice.hidden = names.length < 2;
      choice.addEventListener("change", select);
    }
    byId("search").addEventListener("input", select);
    byId("with-transcript").addEventListener("change", select);
    byId("list").addEventListener("click", (event) => {
      const line = event.target.closest("tr[data-row]");
      if (line) read(Number(line.dataset.row));
    });
    document.addEventListener("keydown", (event) => {
      const step = { j: 1, k: -1 }[event.key];
      if (!step || event.target.closest("input, select")) return;
      const next = order[order.indexOf(open) + step];
      if (next !== undefined) read(next);
    });
    byId("with-transcript").checked = rows.place.some((place) => place !== null);
    select();
    window.addEventListener("hashchange", follow);
    if (!(await follow()) && order.length) await read(order[0]);
  };

  // Links to #run=…&rollout=… open a rollout. Links to #run=…&task=…&policy=… list the rollouts of a task and open one.
  const follow = async () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    if (!wanted.has("rollout") && !wanted.has("task")) return false;
    const at = (names, value) => (value === null ? "" : String(names.indexOf(value)));
    const run = at(rows.runs, wanted.get("run"));
    if (wanted.has("task")) {
      task = wanted.get("task");
      byId("by-run").value = run;
      byId("by-policy").value = at(rows.policies, wanted.get("policy"));
      byId("by-status").value = "";
      byId("search").value = "";
      byId("with-transcript").checked = false;
      select();
    }
    const matches = (r) => rows.id[r] === wanted.get("rollout") && (run === "" || rows.run[r] === Number(run));
    const found = wanted.has("task")
      ? order.find((r) => rows.place[r] !== null) ?? order[0]
      : rows.id.findIndex((_, r) => matches(r));
    if (found === undefined || found < 0) {
      const missing = make("p", "This rollout is not in the page's list; see it with", "note");
      byId("reader").replaceChildren(missing, make("pre", `megaflow-hpc show RUN ${wanted.get("rollout") ?? ""}`));
    } else {
      await read(found);
    }
    byId("reader").scrollIntoView({ block: "nearest" });
    return true;
  };

  const start = async () => {
    byId("theme").addEventListener("click", async () => {
      theme = theme === "dark" ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      await draw();
    });
    specs = await unpacked("charts");
    await draw();
    await browse();
    document.documentElement.dataset.ready = "yes";
  };
  start().catch((error) => {
    const said = make("p", "This browser could not show the charts and transcripts: " + error.message, "bad");
    document.querySelector("main").prepend(said);
    document.documentElement.dataset.ready = "failed";
  });
})();
