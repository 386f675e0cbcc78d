// The page `live`: what its controls do. All computing is in worker.js.
"use strict";
(() => {
  const $ = (name) => document.getElementById(`live-${name}`);
  const runs = JSON.parse($("data").textContent); // in the order of the slider: {name, beta, kl: […], score: […]}
  const signed = (value) => value.toFixed(2).replace(/^-(?=[0.]*$)/, "").replace("-", "−");
  const wordsOf = ([first, second]) => `score ${signed(first)} · second judge ${signed(second)}`;
  const run = () => runs[$("beta").value], count = () => 2 ** $("n").value;
  let stream = 1, turn = 0, total = 1, loaded = 0, calls = 0, worker;

  function say(text, isFault = false) {
    $("status").textContent = text;
    $("status").classList.toggle("fault", isFault);
    if (isFault) $("progress").hidden = true;
  }

  function row(cells, className = "") {
    const line = document.createElement("tr");
    cells.forEach((text) => { line.insertCell().textContent = text; });
    return Object.assign(line, { className });
  }

  /** Color an element by how much more (blue) or less (orange) likely the policy makes its token. */
  function shade(element, difference) {
    element.style.setProperty("--share", `${Math.min(45, 20 * Math.abs(difference))}%`);
    element.classList.toggle("less", difference < 0);
  }

  // --- the worker --------------------------------------------------------------------------------------------

  const waiting = new Map(); // number of a call → what takes its result, or its error
  const call = (...message) => new Promise((result, error) => {
    waiting.set(++calls, { result, error });
    worker.postMessage([calls, ...message]);
  });
  function receive({ data: [id, kind, value] }) {
    if (kind === "bytes") $("progress").value = (loaded += value) / total;
    else waiting.get(id)[kind](kind === "error" ? new Error(value) : value);
  }

  /** Call a task that fetches about so many bytes, and show how many came. */
  async function fetching(bytes, words, ...message) {
    [total, loaded] = [bytes, 0];
    $("progress").hidden = false;
    say(words);
    await call(...message);
    $("progress").hidden = true;
  }

  // --- what the reader can do --------------------------------------------------------------------------------

  /** Show a token of the policy's text: in color there, and as a line of the strip. */
  function show({ token, logps: [reference, policy] }, kl) {
    const piece = Object.assign(document.createElement("span"), { className: "token", textContent: token });
    const line = row([token, ...[reference, policy, policy - reference, kl].map(signed)]);
    [piece, line.cells[3]].forEach((part) => shade(part, policy - reference));
    $("text-1").append(piece);
    $("strip").tBodies[0].append(line);
  }

  /** Write one text with the reference and one with the policy, from the same noise. */
  async function write() {
    const mine = ++turn, { name, beta } = run();
    await fetching(2e5, `Loading the policy of β = ${beta} …`, "policy", name);
    if (mine !== turn) return;
    const prompt = await call("begin", $("prompt").value, [[stream, "reference"], [stream, "reference", name]]);
    if (mine !== turn) return;
    say("Writing …");
    [0, 1].forEach((side) => { $(`text-${side}`).textContent = prompt; });
    $("strip").tBodies[0].replaceChildren();
    let sides = [{}, {}], steps = 0, kl = 0, begun = performance.now();
    for (; steps < $("length").value && !sides.every((one) => one.done); steps++) {
      sides = await call("step");
      if (mine !== turn) return;
      $("text-0").append(sides[0].token);
      if (sides[1].logps) show(sides[1], kl += sides[1].logps[1] - sides[1].logps[0]);
    }
    const speed = (1000 * steps) / (performance.now() - begun);
    const scores = await call("score", sides.map((one) => one.text));
    const [reference, policy] = scores.map(wordsOf);
    $("scores-0").textContent = reference;
    $("scores-1").textContent = `${policy} · KL of this text ${signed(kl)}`;
    mark([kl, scores[1][0]]);
    say(`β = ${beta}. Reference: ${reference}. Policy: ${policy}. ${speed.toFixed(0)} tokens per second in each text.`);
  }

  /** Highlight the chosen policy in the curve and the table; put the dot at this KL and score. */
  function mark(point) {
    for (const part of document.querySelectorAll("[data-run]")) part.classList.toggle("here", part.dataset.run === run().name);
    const { x, low, high } = $("dot").dataset, within = (value, from, to) => Math.min(Math.max(value, from), to);
    if (point) $("dot").setAttribute("d", `M${Math.sqrt(within(point[0], 0, x * x))},${within(point[1], low, high)}h0`);
  }

  async function judge() {
    $("own-scores").textContent = wordsOf((await call("score", [$("own").value]))[0]);
  }

  /** How a policy compares with a score, by linear interpolation of what was measured while it was trained. */
  function beside({ beta, kl, score }, best) {
    const i = score.findIndex((value) => value >= best), share = (best - score[i - 1]) / (score[i] - score[i - 1]);
    if (i < 0) return `the policy of β = ${beta} does not reach it on average`;
    return `the policy of β = ${beta} reaches it on average at KL ${signed(i ? kl[i - 1] + share * (kl[i] - kl[i - 1]) : 0)}`;
  }

  /** Write n texts with the reference, four at a time, and keep the one with the highest score. */
  async function bestOfN() {
    const mine = ++turn, n = count(), found = [];
    while (found.length < n) {
      $("best-verdict").textContent = `Writing ${n} texts: ${found.length} so far …`;
      await call("begin", $("prompt").value, [0, 1, 2, 3].slice(0, n).map(() => [stream++, "reference"]));
      let texts = [{}];
      for (let i = 0; i < $("length").value && mine === turn; i++) texts = await call("step");
      if (mine !== turn) return;
      const scores = await call("score", texts.map((one) => one.text));
      texts.forEach(({ text }, i) => found.push([text, ...scores[i]]));
      found.sort((one, other) => other[1] - one[1]);
      const lines = found.map(([text, ...pair], i) => row([text, ...pair.map(signed)], i ? "" : "here"));
      $("best-table").tBodies[0].replaceChildren(...lines);
    }
    const mean = found.reduce((sum, [, score]) => sum + score / n, 0), best = found[0][1], bound = Math.log(n) - (n - 1) / n;
    $("best-verdict").textContent = `Mean score ${signed(mean)}; kept: ${signed(best)}. KL of best-of-${n}: at most ${signed(bound)} nats. ` +
      `Compare with PPO at the score of the kept text: ${runs.map((one) => beside(one, best)).join("; ")}.`;
  }

  // --- start -------------------------------------------------------------------------------------------------

  const on = (name, event, task) => $(name).addEventListener(event, (happened) => {
    happened.preventDefault();
    task().catch((error) => say(`${error.message} Reload the page to try again.`, true));
  });
  const labels = () => Object.entries({ length: $("length").value, beta: run().beta, n: count() }).forEach(([name, text]) => {
    $(name).parentElement.querySelector("output").textContent = text;
  });

  async function start() {
    document.addEventListener("input", labels);
    labels();
    mark();
    $("opening").addEventListener("change", () => { $("prompt").value = $("opening").value; });
    if (location.protocol === "file:") throw new Error($("from-file").textContent);
    worker = new Worker(new URL("worker.js", document.querySelector('script[src$="live/page.js"]').src), { type: "module" });
    Object.assign(worker, { onmessage: receive, onerror: () => say($("no-worker").textContent, true) });
    await fetching(22e6, "Loading the reference and both judges …", "load");
    document.querySelectorAll(".live button").forEach((button) => { button.disabled = false; });
    on("write", "submit", () => (stream++, write()));
    on("beta", "change", async () => (mark(), write()));
    on("best", "submit", bestOfN);
    on("own", "input", judge);
    await judge();
    await write();
  }
  window.live = { call, ready: start().catch((error) => say(error.message, true)) };
})();
