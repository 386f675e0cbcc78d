// PPO's clipped objective, the exact frontier of a toy language, and GAE over one response: recomputed as sliders move.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("play-data").textContent);
  const { log_ref: logRef, rewards, paths } = data.toy;
  const DEFAULTS = { epsilon: 0.2, ratio: 1.3, beta: 0.5, lambda: 0.95 };
  const state = { ...DEFAULTS };
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const words = (value, digits = 4) => value.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−");

  // --- the formulas ---------------------------------------------------------------------------------------------

  const clip = (ratio) => Math.min(Math.max(ratio, 1 - state.epsilon), 1 + state.epsilon);
  const objective = (advantage, ratio) => Math.min(advantage * ratio, advantage * clip(ratio));

  /** KL and expected reward of π* ∝ π_ref exp(r/β), summed over every response. */
  function optimum(beta) {
    const logits = logRef.map((logp, i) => logp + rewards[i] / beta);
    const most = Math.max(...logits);
    const logZ = most + Math.log(sum(logits.map((logit) => Math.exp(logit - most))));
    const p = logits.map((logit) => Math.exp(logit - logZ));
    return { kl: sum(p.map((q, i) => q * (logits[i] - logZ - logRef[i]))), reward: sum(p.map((q, i) => q * rewards[i])) };
  }

  /** A_t = δ_t + λ A_{t+1}, δ_t = r_t + V_{t+1} − V_t; after the last token V is 0. */
  function gae(reward, value, lambda) {
    const advantages = [];
    let running = 0;
    for (let t = reward.length - 1; t >= 0; t--) {
      running = reward[t] + (value[t + 1] ?? 0) - value[t] + lambda * running;
      advantages.unshift(running);
    }
    return advantages;
  }

  // --- drawing --------------------------------------------------------------------------------------------------

  /** A plot with axes in an SVG; returns what draws lines, points and words at data coordinates. */
  function plot(svg, { x, y, xTicks, yTicks, xName, yName }) {
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const left = 34, right = width - 10, top = 20, bottom = height - 34;
    const px = (value) => left + ((value - x[0]) / (x[1] - x[0])) * (right - left);
    const py = (value) => bottom - ((value - y[0]) / (y[1] - y[0])) * (bottom - top);
    const add = (name, attributes, text = "") => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.textContent = text;
      svg.append(element);
    };
    svg.replaceChildren();
    for (const tick of xTicks) {
      add("line", { x1: px(tick), x2: px(tick), y1: bottom, y2: bottom + 4 });
      add("text", { x: px(tick), y: bottom + 16, "text-anchor": "middle" }, words(tick, tick % 1 ? 1 : 0));
    }
    for (const tick of yTicks) {
      add("line", { x1: left, x2: right, y1: py(tick), y2: py(tick) });
      add("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, words(tick, tick % 1 ? 1 : 0));
    }
    add("text", { x: right, y: bottom + 30, "text-anchor": "end" }, xName);
    add("text", { x: 2, y: 11 }, yName);
    return {
      line: (points, kind) => add("path", { class: kind, d: "M" + points.map(([u, v]) => `${px(u).toFixed(1)},${py(v).toFixed(1)}`).join("L") }),
      point: (u, v, kind) => add("circle", { class: kind, cx: px(u), cy: py(v), r: 4.5 }),
      text: (u, v, kind, text, anchor = "start") => add("text", { class: kind, x: px(u), y: py(v), "text-anchor": anchor }, text),
    };
  }

  /** Rows of text into a table's body; the first cell of a row heads it. */
  function fill(table, rows) {
    table.tBodies[0].replaceChildren(...rows.map((cells) => {
      const row = document.createElement("tr");
      row.append(...cells.map((text) => {
        const cell = document.createElement("td");
        cell.textContent = text;
        return cell;
      }));
      return row;
    }));
  }

  const panel = (name) => {
    const element = document.getElementById(`play-${name}`);
    return [element.querySelector("svg"), element.querySelector("table")];
  };

  function drawClip() {
    const [svg, table] = panel("clip");
    const canvas = plot(svg, { x: [0, 2], y: [-2, 2], xTicks: [0, 0.5, 1, 1.5, 2], yTicks: [-2, -1, 0, 1, 2], xName: "ratio ρ", yName: "objective" });
    const rows = [[1, "a"], [-1, "b"]].map(([advantage, kind]) => {
      const corners = [0, 1 - state.epsilon, 1 + state.epsilon, 2];
      canvas.line(corners.map((ratio) => [ratio, objective(advantage, ratio)]), kind);
      canvas.text(0.04, advantage > 0 ? 0.35 : 0.12 - objective(1, 1 - state.epsilon), kind, `A = ${words(advantage, 0)}`);
      const value = objective(advantage, state.ratio);
      canvas.point(state.ratio, value, kind);
      const clipped = advantage * clip(state.ratio) < advantage * state.ratio;
      return [`A = ${words(advantage, 0)}`, words(value), clipped ? "0, clipped" : "passes"];
    });
    fill(table, rows);
    svg.setAttribute("aria-label", `The clipped objective over the ratio for ε = ${words(state.epsilon, 2)}. At ρ = ${words(state.ratio, 2)}: ` +
      rows.map(([name, value, gradient]) => `${name}: ${value}, gradient ${gradient}`).join("; "));
  }

  const FRONTIER = Array.from({ length: 261 }, (_, i) => optimum(10 ** (-1.3 + i / 100)));

  function drawFrontier() {
    const [svg, table] = panel("frontier");
    const { beta } = state, best = optimum(beta);
    const away = (path) => Math.abs(Math.log(path.beta / beta));
    const near = paths.reduce((first, path) => (away(path) < away(first) ? path : first));
    const canvas = plot(svg, { x: [0, 7], y: [-1, 4.5], xTicks: [0, 1, 2, 3, 4, 5, 6, 7], yTicks: [-1, 0, 1, 2, 3, 4], xName: "KL to the reference (nats)", yName: "expected reward" });
    canvas.line(FRONTIER.map(({ kl, reward }) => [kl, reward]), "a");
    for (const path of paths) canvas.line(path.kl.map((kl, i) => [kl, path.reward[i]]), path === near ? "b" : "b faint");
    const end = { kl: near.kl.at(-1), reward: near.reward.at(-1) };
    canvas.point(end.kl, end.reward, "b");
    canvas.point(best.kl, best.reward, "a");
    canvas.text(7, -0.35, "a", `π* for β = ${words(beta, 2)}`, "end");
    canvas.text(7, -0.75, "b", `PPO's ${near.kl.length - 1} steps for β = ${near.beta}`, "end");
    const row = (name, { kl, reward }) => [name, words(kl), words(reward), words(reward - beta * kl)];
    const rows = [row("π*", best), row(`PPO, β = ${near.beta}`, end), row("reference", { kl: 0, reward: near.reward[0] })];
    fill(table, rows);
    svg.setAttribute("aria-label", "Expected reward over KL. " + rows.map(([name, kl, reward]) => `${name}: KL ${kl}, reward ${reward}`).join("; "));
  }

  function drawStrip() {
    const [, table] = panel("gae");
    const { token, kl, reward, value, query } = data.strip;
    const columns = [kl, reward, value, gae(reward, value, state.lambda)];
    table.caption.textContent = `After the query «${query}»; blue is positive, orange negative.`;
    fill(table, token.map((text, t) => [text, ...columns.map((column) => words(column[t]))]));
    columns.forEach((column, c) => {
      const most = Math.max(...column.map(Math.abs));
      column.forEach((number, t) => {
        const cell = table.tBodies[0].rows[t].cells[c + 1];
        cell.className = number < 0 ? "b" : "a";
        cell.style.setProperty("--share", `${((45 * Math.abs(number)) / most).toFixed(0)}%`);
      });
    });
  }

  // --- state: the sliders, and the address ------------------------------------------------------------------------

  const DRAW = { epsilon: drawClip, ratio: drawClip, beta: drawFrontier, lambda: drawStrip };
  const toSlider = (name, value) => (name === "beta" ? Math.log10(value) : value);
  const fromSlider = (name, value) => (name === "beta" ? Number((10 ** value).toPrecision(3)) : value);

  function show(name) {
    const slider = document.getElementById(`play-${name}`);
    slider.value = toSlider(name, state[name]);
    const said = words(state[name], name === "beta" && state[name] < 0.1 ? 3 : 2);
    slider.setAttribute("aria-valuetext", said);
    slider.parentElement.querySelector("output").textContent = said;
    DRAW[name]();
  }

  function load() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(DEFAULTS)) {
      const slider = document.getElementById(`play-${name}`), value = Number(given.get(name));
      const inside = given.has(name) && toSlider(name, value) >= Number(slider.min) && toSlider(name, value) <= Number(slider.max);
      state[name] = inside ? value : DEFAULTS[name];
      show(name);
    }
  }

  for (const name of Object.keys(DEFAULTS)) {
    document.getElementById(`play-${name}`).addEventListener("input", (event) => {
      state[name] = fromSlider(name, Number(event.target.value));
      show(name);
      const changed = Object.entries(state).map(([key, value]) => `${key}=${value}`);
      history.replaceState(null, "", `#${changed.join("&")}`);
    });
  }
  window.addEventListener("hashchange", () => location.hash.includes("=") && load());
  load();
})();
