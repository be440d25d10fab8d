"use strict";
// Everything that comes from the trace goes into the page as text nodes, never as markup.
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const S = D.story;
const PHASES = ["forward", "backward", "update", "data", "exposed", "waiting", "between", "other"];
const MEANING = {
  forward: "forward", backward: "backward", update: "update", data: "waiting for data", exposed: "exposed communication",
  waiting: "waiting for others", between: "between steps", other: "not accounted for",
};
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return made;
}
function draw(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Figures for people.
const fixed = (value, digits) => { const text = value.toPrecision(digits); return text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, ""); };
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e9) return fixed(value / 1e9, 3) + " G";
  if (size >= 1e6) return fixed(value / 1e6, 3) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return fixed(value, size >= 1000 ? 4 : 3);
}
function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 5400) return fixed(seconds / 3600, 3) + " h";
  if (seconds >= 90) return fixed(seconds / 60, 3) + " min";
  if (seconds >= 1) return fixed(seconds, 3) + " s";
  if (seconds >= 1e-3) return fixed(seconds * 1e3, 3) + " ms";
  return seconds === 0 ? "0 ms" : fixed(seconds * 1e6, 3) + " µs";
}
function bytes(size) {
  let unit = 0;
  while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
  return fixed(size, size >= 1000 ? 4 : 3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
const percent = (share) => (share > 0 && share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)) + " %";

// One tooltip for all.
const tip = $("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - box.width - 4));
  const top = y + box.height + 20 > window.innerHeight ? y - box.height - 12 : y + 16;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(4, top))}px)`;
}
const hideTip = () => { tip.hidden = true; };
window.addEventListener("scroll", hideTip, { passive: true });
window.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
function tipOn(element, text) {
  element.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
  element.addEventListener("pointerleave", hideTip);
}

function bar(label, parts, whole, end, kind) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const stack = el("div", { class: "stack", role: "img", "aria-label": parts.filter((part) => part.value > 0).map((part) => part.tip.replace("\n", ": ")).join("; ") });
  stack.style.width = whole ? 100 * Math.min(1, total / whole) + "%" : "0";
  for (const part of parts) {
    if (!(part.value > 0)) continue;
    const piece = el("i", { class: "c-" + part.name }, part.value / whole > 0.075 ? part.text : "");
    piece.style.flex = `${part.value / total} 0 0`;
    tipOn(piece, part.tip);
    stack.append(piece);
  }
  return el("div", { class: "row " + (kind || "") }, el("div", { class: "label" }, ...label), el("div", { class: "track" }, stack), el("div", { class: "end" }, ...end));
}
const legend = (pairs) => pairs.map(([name, text]) => el("span", {}, el("span", { class: "swatch c-" + name }), text));
function table(head, rows, attributes) {
  const cell = (tag, value, column) => {
    const numeric = typeof value !== "object" && head[column] && head[column].numeric;
    return value instanceof Node ? el(tag, {}, value) : el(tag, numeric ? { class: "n" } : head[column] && head[column].text ? { class: "text" } : {}, value);
  };
  return el("table", attributes || {},
    el("thead", {}, el("tr", {}, ...head.map((one) => el("th", one.numeric ? { class: "n", scope: "col" } : { scope: "col" }, one.name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, column) => cell("td", value, column))))));
}
// Of very many, the first ones at once and the others on demand.
function fold(holder, rows, what) {
  holder.append(...rows.slice(0, 12));
  if (rows.length > 12) holder.append(el("details", {}, el("summary", {}, `${rows.length - 12} more ${what}`), ...rows.slice(12)));
}
// Text in which what stands between backticks is code.
const rich = (text) => text.split(/`([^`]+)`/).map((piece, index) => index % 2 ? el("code", {}, piece) : piece);
const gone = (id) => { $(id).hidden = true; };

// The top of the page.
for (const cause of S.causes.slice(1, 4)) $("also").append(el("li", {}, ...rich(cause.sentence.replace(/(\d) (?=%|ms|s|µs)/g, "$1\u00a0"))));
function tile(what, figure, unit, more) {
  $("tiles").append(el("div", { class: "tile" }, el("div", { class: "what" }, what),
    el("div", { class: "figure" }, figure, unit ? el("small", {}, " " + unit) : null), el("div", { class: "more" }, more || "")));
}
if (S.compute_share !== null) tile("Efficiency", percent(S.compute_share), "", "of a worker's time is forward, backward and update");
if (S.scaling) tile(`${S.scaling.workers} workers against 1`, percent(S.scaling.efficiency), "", `${number(S.scaling.samples_per_s)} over ${S.scaling.workers} × ${number(S.scaling.alone_per_s)} samples/s, measured in this run`);
if (S.samples_per_s !== null) tile("Samples per second", number(S.samples_per_s), "", S.global_batch_size ? `batches of ${number(S.global_batch_size)}` : "");
if (S.total.steps) tile("A step takes", ...time(S.total.seconds / S.total.steps).split(" "), "on average");
tile("Steps", number(S.steps_done), "", `${S.steps_in_all ? "of " + number(S.steps_in_all) + ", " : ""}in ${time(S.elapsed_s)}`);
tile("Workers", S.workers, "", [S.hosts > 1 ? `on ${S.hosts} hosts` : "", S.backend ? `over ${S.backend}` : ""].filter(Boolean).join(", "));
const loss = S.curves.find((curve) => curve.name === "loss");
if (loss && loss.last !== null) tile("Loss", Math.abs(loss.last) < 0.01 && loss.last !== 0 ? fixed(loss.last, 2) : number(loss.last), "", loss.not_finite ? `the last; ${loss.not_finite} ${loss.not_finite > 1 ? "are" : "is"} not a number` : "the last");

// Where the time went.
const present = PHASES.filter((name) => S.total.phases[name] > 0);
function usageBar(usage, kind) {
  const step = usage.steps ? usage.seconds / usage.steps : 0;
  const parts = PHASES.map((name) => {
    const share = usage.seconds ? usage.phases[name] / usage.seconds : 0;
    return { name, value: usage.phases[name], text: percent(share), tip: `${MEANING[name]}\n${percent(share)} of the time, ${time(share * step)} per step` };
  });
  const whole = usage.first === S.total.first && usage.last === S.total.last;
  const about = kind || whole || !usage.first ? "" : `steps ${usage.first.toLocaleString("en")} to ${usage.last.toLocaleString("en")}`;
  return bar([usage.worker, about ? el("small", {}, " " + about) : null], parts, usage.seconds, [time(step), el("small", {}, "per step")], kind);
}
const lateness = new Map(S.late.map((late) => [late.worker, late.seconds]));
const latestFirst = (rows) => rows.length > 12 ? [...rows].sort((one, other) => (lateness.get(other.worker) || 0) - (lateness.get(one.worker) || 0)) : rows;
if (S.total.steps) {
  $("legend").append(...legend(present.map((name) => [name, MEANING[name]])));
  if (S.usages.length > 1) $("bars").append(usageBar(S.total, "total"));
  fold($("bars"), latestFirst(S.usages).map((usage) => usageBar(usage)), "workers; those that were waited for longest come first");
  const head = [{ name: "worker" }, { name: "steps", numeric: 1 }, { name: "per step", numeric: 1 }, ...present.map((name) => ({ name: MEANING[name], numeric: 1 }))];
  $("table").append(table(head, [...S.usages, S.total].map((usage) => [usage.worker, number(usage.steps), time(usage.steps ? usage.seconds / usage.steps : null),
    ...present.map((name) => percent(usage.seconds ? usage.phases[name] / usage.seconds : 0))])));
} else gone("time");

// The timeline. `view` is what is to be seen, in microseconds from the begin of the scene.
const KIND = { wait: "waiting", communication: "exposed", bucket: "hidden" };
const kindOf = (name) => { const word = name.split(" ")[0]; return KIND[word] || (PHASES.includes(word) ? word : "other"); };
const TOP = 40, NAME = 19, MAIN = 24, COMM = 14, GAP = 12;
const stage = $("stage");
let scene = null, view = [0, 1], chosen = null, pending = 0;
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((one) => one * power >= rough) || 10);
}
function drawTimeline() {
  const width = Math.max(240, stage.clientWidth), [from, to] = view, scale = width / (to - from);
  const place = (us) => (us - from) * scale;
  const height = TOP + scene.rows.length * (NAME + MAIN + 2 + COMM + GAP);
  const canvas = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  const every = niceStep(Math.max(1e-3, (to - from) / Math.max(2, width / 110)));
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
    canvas.append(draw("line", { class: "rule", x1: place(at), x2: place(at), y1: 18, y2: height }));
    const x = place(at);
    if (x < width - 30) canvas.append(draw("text", { x: x + 3, y: 12 }, time(Math.max(0, at) / 1e6)));
  }
  let free = -1;
  for (const [step, at] of scene.steps) {
    const x = place(at);
    if (x < -200 || x > width) continue;
    canvas.append(draw("line", { class: "step", x1: x, x2: x, y1: 20, y2: height }));
    const left = Math.max(x + 3, 2), text = "step " + step;
    if (left > free && left < width - 44) { canvas.append(draw("text", { x: left, y: 31 }, text)); free = left + 7 * text.length + 6; }
  }
  scene.rows.forEach((row, index) => {
    const y = TOP + index * (NAME + MAIN + 2 + COMM + GAP);
    canvas.append(draw("text", { class: "name", x: 2, y: y + 13 }, row.worker));
    for (const [spans, top, tall] of [[row.main, y + NAME, MAIN], [row.comm, y + NAME + MAIN + 2, COMM]]) {
      canvas.append(draw("rect", { class: "lane", x: 0, y: top, width, height: tall, rx: 3 }));
      for (const span of spans) {
        const left = Math.max(-2, place(span[1])), right = Math.min(width + 2, place(span[1] + span[2]));
        if (right < 0 || left > width) continue;
        const name = scene.names[span[0]], kind = kindOf(name), wide = right - left;
        const rect = draw("rect", { class: `span c-${kind}${span === chosen ? " on" : ""}`, x: left, y: top, width: Math.max(0.7, wide - (wide > 3 ? 0.6 : 0)), height: tall, rx: wide > 6 ? 2 : 0 });
        rect.span = span; rect.row = row;
        canvas.append(rect);
        if (wide > 7 * name.length + 6 && tall > 12) canvas.append(draw("text", { class: "in on-" + kind, x: Math.max(left, 0) + 5, y: top + tall / 2 + 4 }, name));
      }
    }
  });
  stage.replaceChildren(canvas);
  stage.dataset.view = view.map((one) => one.toFixed(2)).join(" ");
}
const redraw = () => { if (!pending) pending = requestAnimationFrame(() => { pending = 0; drawTimeline(); }); };
function look(from, to) {
  const width = Math.min(scene.length, Math.max(5, to - from));
  const begin = Math.max(0, Math.min(from, scene.length - width));
  view = [begin, begin + width];
  redraw();
}
function zoom(factor, at = 0.5) {
  const [from, to] = view, fixedPoint = from + at * (to - from), width = (to - from) * factor;
  look(fixedPoint - at * width, fixedPoint + (1 - at) * width);
}
const move = (part) => look(view[0] + part * (view[1] - view[0]), view[1] + part * (view[1] - view[0]));
const describe = (row, span) => `${scene.names[span[0]]}\n${time(span[2] / 1e6)} on ${row.worker}, step ${span[3]}`;
function chooseScene(index) {
  scene = D.scenes[index];
  scene.rows = latestFirst(scene.rows);
  chosen = null;
  look(0, scene.length);
}
function nextSpan(direction) {
  const all = scene.rows.flatMap((row) => [...row.main, ...row.comm].map((span) => ({ row, span }))).filter(({ span }) => span[1] + span[2] > view[0] && span[1] < view[1]);
  if (!all.length) return;
  const at = all.findIndex(({ span }) => span === chosen);
  const { row, span } = all[at < 0 ? (direction > 0 ? 0 : all.length - 1) : (at + direction + all.length) % all.length];
  chosen = span;
  drawTimeline();
  const rect = [...stage.querySelectorAll("rect.span")].find((one) => one.span === span);
  if (rect) { rect.scrollIntoView({ block: "nearest" }); const box = rect.getBoundingClientRect(); showTip(describe(row, span), box.left, box.bottom); }
  $("live").textContent = describe(row, span);
}
if (D.scenes.length) {
  D.scenes.forEach((one, index) => $("scene").append(el("option", { value: index }, one.label)));
  $("scene").value = String(D.best);
  $("scene").addEventListener("change", (event) => chooseScene(Number(event.target.value)));
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("left").addEventListener("click", () => move(-0.25));
  $("right").addEventListener("click", () => move(0.25));
  $("reset").addEventListener("click", () => look(0, scene.length));
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => look(0, scene.length), ArrowLeft: () => move(-0.15),
    ArrowRight: () => move(0.15), ArrowDown: () => nextSpan(1), ArrowUp: () => nextSpan(-1), Home: () => look(0, view[1] - view[0]), End: () => look(scene.length, scene.length + view[1] - view[0]) };
  stage.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  stage.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && view[1] - view[0] >= scene.length) return; // all is seen: let the page scroll
    event.preventDefault();
    hideTip();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { move(event.deltaX / stage.clientWidth); return; }
    const box = stage.getBoundingClientRect();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), (event.clientX - box.left) / box.width);
  }, { passive: false });
  let drag = null;
  stage.addEventListener("pointerdown", (event) => { if (event.button === 0) drag = { x: event.clientX, view, id: event.pointerId }; });
  stage.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) {
      stage.classList.add("drag");
      if (!stage.hasPointerCapture(drag.id)) stage.setPointerCapture(drag.id);
      const shift = (drag.x - event.clientX) * (drag.view[1] - drag.view[0]) / stage.clientWidth;
      look(drag.view[0] + shift, drag.view[1] + shift);
      hideTip();
      return;
    }
    const { span, row } = event.target;
    if (span) showTip(describe(row, span), event.clientX, event.clientY); else hideTip();
  });
  const drop = () => { drag = null; stage.classList.remove("drag"); };
  for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, drop);
  stage.addEventListener("pointerleave", () => { if (!drag) hideTip(); });
  chooseScene(D.best);
  if (D.scenes_left_out) $("timeline-lead").append(` The page holds a part of what was looked at; trace.json has all of it.`);
} else {
  $("timeline-lead").textContent = "No step of this run was looked at closely.";
  stage.hidden = true;
  for (const id of ["scene", "left"]) $(id).parentNode.hidden = true;
}

// The same trace for Perfetto. Nothing leaves this page before its button is pressed.
async function traceBuffer() {
  const packed = Uint8Array.from(atob($("trace").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
const say = (text) => { $("perfetto-note").textContent = text; $("perfetto-note").hidden = false; };
if ($("trace").textContent.trim()) {
  $("download").addEventListener("click", async (event) => {
    event.preventDefault();
    const url = URL.createObjectURL(new Blob([await traceBuffer()], { type: "application/json" }));
    const link = el("a", { href: url, download: "trace.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  });
  $("perfetto").addEventListener("click", async () => {
    const origin = "https://ui.perfetto.dev", other = window.open(origin);
    if (!other) { say("The browser did not let this page open a window. Download trace.json, and open it at ui.perfetto.dev."); return; }
    if (location.protocol === "file:") say("If Perfetto does not take the trace from a page on your disk: download trace.json, and drop it there.");
    const buffer = await traceBuffer();
    const finish = () => { clearInterval(ping); clearTimeout(limit); window.removeEventListener("message", answer); };
    const answer = (event) => {
      if (event.source !== other || event.data !== "PONG") return;
      finish();
      other.postMessage({ perfetto: { buffer, title: "lockstep " + S.name, fileName: "trace.json" } }, origin);
    };
    const ping = setInterval(() => other.postMessage("PING", origin), 100);
    const limit = setTimeout(() => { finish(); say("Perfetto did not answer. Download trace.json, and open it at ui.perfetto.dev."); }, 30000);
    window.addEventListener("message", answer);
  });
} else for (const id of ["perfetto", "download"]) $(id).hidden = true;

// Who waited for whom.
const REASON = { compute: "computing", data: "data", between: "between steps", "": "not slower on average" };
const late = S.late.filter((one) => one.share >= 0.005);
if (late.length) {
  const against = (one, what) => `${time(one.own_s[what])} (${time(one.typical_s[what])})`;
  $("waits-body").append(
    el("p", { class: "lead" }, "In brackets: the median of the other workers. All figures are per step, but for the time waited."),
    el("div", { class: "wide" }, table(
      [{ name: "waited for" }, { name: "by the others", numeric: 1 }, { name: "of their time", numeric: 1 }, { name: "slower in" }, { name: "computing", numeric: 1 }, { name: "data", numeric: 1 }, { name: "between", numeric: 1 }],
      late.slice(0, 12).map((one) => [one.worker, time(one.seconds), percent(one.share), REASON[one.reason], against(one, "compute"), against(one, "data"), against(one, "between")]), { class: "full" })));
  const names = S.usages.map((usage) => usage.worker);
  if (names.length > 1 && names.length <= 12) {
    const found = new Map(S.waits.map((wait) => [wait.waiter + "\n" + wait.waited_for, wait.seconds]));
    const most = Math.max(...S.waits.map((wait) => wait.seconds));
    const cell = (waiter, other) => {
      const seconds = found.get(waiter + "\n" + other) || 0, made = el("td", {}, waiter === other ? "" : seconds ? time(seconds) : "–");
      if (seconds) made.style.background = `color-mix(in srgb, var(--waiting) ${Math.round(60 * seconds / most)}%, transparent)`;
      return made;
    };
    $("waits-body").append(el("div", { class: "wide" }, el("table", { class: "matrix" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "waits ↓ for →"), ...names.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...names.map((waiter) => el("tr", {}, el("th", { scope: "row" }, waiter), ...names.map((other) => cell(waiter, other))))))));
  }
} else if (S.usages.length > 1) $("waits-body").append(el("p", { class: "lead" }, S.waits.length ? `Workers waited ${percent(S.total.seconds ? S.total.phases.waiting / S.total.seconds : 0)} of the time for each other, and for none of them much longer than for the others.` : "No worker waited for another."));
else gone("waits");

// Buckets.
if (S.buckets.length) {
  const longest = Math.max(...S.buckets.map((bucket) => bucket.hidden_s + bucket.exposed_s));
  const sum = (what) => S.buckets.reduce((total, bucket) => total + bucket[what], 0);
  const all = sum("hidden_s") + sum("exposed_s");
  $("buckets-body").append(el("div", { class: "legend" }, ...legend([["hidden", `hidden (${percent(all ? sum("hidden_s") / all : 0)})`], ["exposed", `exposed (${percent(all ? sum("exposed_s") / all : 0)})`]])));
  const shown = S.buckets.length > 40 ? [...S.buckets].sort((a, b) => b.exposed_s - a.exposed_s).slice(0, 40) : S.buckets;
  if (shown.length < S.buckets.length) $("buckets-body").append(el("p", { class: "note" }, `The 40 most exposed of ${S.buckets.length}.`));
  for (const bucket of shown) {
    const part = (name, seconds) => ({ name, value: seconds, text: time(seconds), tip: `bucket ${bucket.number}, ${name}\n${time(seconds)} per step${bucket.parameters ? "\n" + bucket.parameters : ""}` });
    $("buckets-body").append(bar(["bucket " + bucket.number, bucket.bytes ? el("small", {}, " " + bytes(bucket.bytes)) : null],
      [part("hidden", bucket.hidden_s), part("exposed", bucket.exposed_s)], longest, [time(bucket.hidden_s + bucket.exposed_s), el("small", {}, "per step")]));
  }
} else gone("buckets");

// Curves.
function chart(curve, level, title) {
  const known = curve.points.filter(([, value]) => value !== null), holder = el("div", { class: "plot", tabindex: "0", role: "img" });
  const note = curve.not_finite ? `${curve.not_finite} not a number, first at step ${curve.first_not_finite}` : `last ${number(curve.last)} ${curve.unit}`;
  const box = el("div", { class: "chart" }, el("header", {}, el("h3", {}, title || curve.name[0].toUpperCase() + curve.name.slice(1), el("small", {}, "")), el("span", curve.not_finite ? { class: "bad" } : {}, note)), holder);
  const values = known.map(([, value]) => value).concat(level ? [level.value] : [], curve.name === "throughput" || !known.length ? [0] : []);
  const bound = (value) => Math.max(-8e307, Math.min(8e307, value)); // so that a difference is still a number
  let low = bound(Math.min(...values)), high = bound(Math.max(...values));
  const log = low > 0 && high / low > 200;
  if (log) box.querySelector("h3 small").textContent = " log scale";
  const warp = log ? Math.log10 : (value) => value;
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= log ? 0 : room; high += room; }
  const [bottom, top] = [warp(low), warp(high)], room = (top - bottom) * 0.06 || 1;
  const first = curve.points[0][0], last = curve.points[curve.points.length - 1][0];
  holder.setAttribute("aria-label", `${curve.name}${log ? ", log scale," : ""} from step ${first} to ${last}: ${number(known.length ? known[0][1] : null)} to ${number(curve.last)}, least ${number(low)}, greatest ${number(high)}`);
  let cursor = -1, geometry = null;
  function paint() {
    const width = Math.max(220, holder.clientWidth), height = 190, left = 58, right = width - 8, under = height - 24, over = 10;
    const x = (step) => last === first ? (left + right) / 2 : left + (step - first) / (last - first) * (right - left);
    const y = (value) => under - (warp(bound(value)) - bottom + room) / (top - bottom + 2 * room) * (under - over);
    const canvas = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const marks = [];
    if (log) { const each = Math.max(1, Math.ceil((top - bottom) / 4)); for (let power = Math.ceil(bottom - room); power <= top + room; power += each) marks.push(10 ** power); }
    else { const each = niceStep((high - low) / 5); for (let at = Math.ceil(low / each) * each; at <= high + each * 1e-6 && marks.length < 12; at += each) marks.push(Math.abs(at) < each * 1e-6 ? 0 : at); }
    for (const mark of marks.filter(Number.isFinite)) {
      canvas.append(draw("line", { class: "rule", x1: left, x2: right, y1: y(mark), y2: y(mark) }), draw("text", { x: left - 7, y: y(mark) + 4, "text-anchor": "end" }, number(mark)));
    }
    canvas.append(draw("line", { class: "axis", x1: left, x2: right, y1: under, y2: under }));
    const each = Math.max(1, niceStep((last - first) / Math.max(2, width / 80) || 1));
    const ticks = [];
    for (let step = Math.ceil(first / each) * each; step <= last; step += each) ticks.push(step);
    (ticks.length ? ticks : [first]).forEach((step) => canvas.append(draw("text", { x: Math.min(x(step), right - 16), y: height - 8, "text-anchor": "middle" }, step.toLocaleString("en"))));
    let path = "", pen = false;
    for (const [step, value] of curve.points) {
      if (value === null) { canvas.append(draw("line", { class: "gap", x1: x(step), x2: x(step), y1: under - 7, y2: under })); pen = false; continue; }
      path += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = true;
    }
    if (known.length < 12) known.forEach(([step, value]) => canvas.append(draw("circle", { class: "dot", cx: x(step), cy: y(value), r: 2.6 })));
    canvas.append(draw("path", { class: "line", d: path || "M0 0" }));
    if (level) canvas.append(draw("line", { class: "level", x1: left, x2: right, y1: y(level.value), y2: y(level.value) }),
      draw("text", { class: "level-name", x: right, y: y(level.value) - 5, "text-anchor": "end" }, level.name));
    if (cursor >= 0) {
      const [step, value] = curve.points[cursor];
      canvas.append(draw("line", { class: "cursor", x1: x(step), x2: x(step), y1: over, y2: under }));
      if (value !== null) canvas.append(draw("circle", { class: "dot", cx: x(step), cy: y(value), r: 3.6 }));
    }
    geometry = { x, y };
    holder.replaceChildren(canvas);
  }
  const read = () => `step ${curve.points[cursor][0].toLocaleString("en")}\n${curve.points[cursor][1] === null ? "not a number" : number(curve.points[cursor][1]) + " " + curve.unit}`;
  holder.addEventListener("pointermove", (event) => {
    const at = event.clientX - holder.getBoundingClientRect().left;
    let best = 0;
    curve.points.forEach(([step], index) => { if (Math.abs(geometry.x(step) - at) < Math.abs(geometry.x(curve.points[best][0]) - at)) best = index; });
    cursor = best;
    paint();
    showTip(read(), event.clientX, event.clientY);
  });
  const leave = () => { cursor = -1; paint(); hideTip(); };
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("blur", leave);
  holder.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!by) return;
    event.preventDefault();
    cursor = Math.max(0, Math.min(curve.points.length - 1, cursor + by));
    paint();
    const box = holder.getBoundingClientRect();
    showTip(read(), box.left + geometry.x(curve.points[cursor][0]), box.top + 60);
    $("live").textContent = read();
  });
  charts.push(paint);
  return box;
}
const charts = [];
if (S.curves.length) $("curves-body").append(...S.curves.map((curve) => chart(curve))); else gone("curves");
if (S.metrics.length) {
  const many = S.metrics.filter((curve) => curve.points.length > 1).slice(0, 24);
  $("metrics-charts").append(...many.map((curve) => chart(curve, null, curve.name)));
  const least = (curve) => { const known = curve.points.map(([, value]) => value).filter((value) => value !== null); return known.length ? [Math.min(...known), Math.max(...known)] : [null, null]; };
  const head = [{ name: "metric", text: 1 }, { name: "last", numeric: 1 }, { name: "at step", numeric: 1 }, { name: "least", numeric: 1 }, { name: "greatest", numeric: 1 }];
  $("metrics-table").append(table(head, S.metrics.slice(0, 200).map((curve) => [curve.name, number(curve.last), number(curve.points[curve.points.length - 1][0]), ...least(curve).map(number)])));
} else gone("metrics");
if (S.noise) {
  $("noise-lead").append(...rich(S.noise.advice));
  $("noise-body").append(chart(S.noise.curve, S.noise.batch > 0 ? { value: S.noise.batch, name: "batch " + number(Math.round(S.noise.batch)) } : null));
} else gone("noise");

// Memory.
if (S.memory.length) {
  const most = Math.max(...S.memory.map((one) => one.total_bytes));
  const names = [["weights", "weights"], ["gradients", "gradients"], ["buckets", "buckets to exchange them"], ["optimizer", "optimizer"], ["graphs", "CUDA graphs"], ["rest", "activations and everything else"]]
    .filter(([name]) => S.memory.some((one) => one.parts[name] > 0));
  $("memory-lead").textContent = S.memory[0].where === "device" ? "The most that each worker had on its device at any time." : "The most that each worker's process had at any time; its libraries are part of it.";
  if (S.sharding) $("memory-lead").textContent += " " + S.sharding;
  $("memory-body").append(el("div", { class: "legend" }, ...legend(names)));
  fold($("memory-body"), S.memory.map((one) => bar([one.worker], names.map(([name, text]) => ({ name, value: one.parts[name], text: bytes(one.parts[name]), tip: `${text}\n${bytes(one.parts[name])}` })), most, [bytes(one.total_bytes)])), "workers");
} else gone("memory");

// Events and environment.
if (S.happenings.length) {
  const head = [{ name: "after" }, { name: "step", numeric: 1 }, { name: "what" }, { name: "", text: 1 }, { name: "took", numeric: 1 }, { name: "size", numeric: 1 }, { name: "workers", text: 1 }];
  const WORDS = { checkpoint: "checkpoint saved", evaluate: "evaluation" }, ABOUT_ONE = ["worker lost", "worker started"];
  const ROUTINE = ["checkpoint", "evaluate"], few = (what) => S.happenings.filter((one) => one.what === what).length <= 5;
  const toRows = (happenings) => happenings.map((one) => [time(Math.max(0, one.at_s)), one.step === null ? "" : number(one.step), ["error", "worker lost"].includes(one.what) ? el("span", { class: "bad" }, one.what) : WORDS[one.what] || one.what, one.text,
    one.took_s === null ? "" : time(one.took_s), one.bytes === null ? "" : bytes(one.bytes), ABOUT_ONE.includes(one.what) ? "" : one.workers.length === S.usages.length && one.workers.length > 1 ? "all" : one.workers.slice(0, 8).join(", ") + (one.workers.length > 8 ? " …" : "")]);
  const listed = (happenings) => {
    const rows = toRows(happenings), used = head.map((_, column) => column < 3 || rows.some((row) => row[column] !== ""));
    const keep = (row) => row.filter((_, column) => used[column]);
    return table(keep(head), rows.map(keep), { class: "full" });
  };
  const main = S.happenings.filter((one) => !ROUTINE.includes(one.what) || few(one.what));
  if (main.length) $("events-body").append(listed(main));
  for (const what of ROUTINE.filter((one) => !few(one))) {
    const own = S.happenings.filter((one) => one.what === what), took = own.map((one) => one.took_s).filter((one) => one !== null);
    const times = took.length ? `: ${time(took.reduce((a, b) => a + b, 0) / took.length)} each on average, ${time(Math.max(...took))} the longest` : "";
    $("events-body").append(el("details", {}, el("summary", {}, `${own.length} × ${WORDS[what]}${times}`), listed(own)));
  }
  if (D.happenings_left_out) $("events-body").append(el("p", { class: "note" }, ...rich(`${D.happenings_left_out} more are left out here; \`lockstep report --json\` has all.`)));
} else gone("events");
const facts = Object.entries(S.environment);
if (facts.length) {
  const list = el("dl", {});
  for (const [name, values] of facts) {
    const found = Object.entries(values);
    list.append(el("dt", {}, name), el("dd", {}, ...found.flatMap(([value, workers], index) => [index ? el("br", {}) : null, value, found.length > 1 ? el("small", {}, ` (${workers.slice(0, 8).join(", ")}${workers.length > 8 ? " …" : ""})`) : null])));
  }
  $("environment-body").append(list);
} else gone("environment");

const LAST = { ended: "ended", "is running": "last heard of", "stopped without an end": "last heard of" };
const foot = [`Begun ${D.begun}, ${LAST[S.status]} ${time(S.elapsed_s)} later. Written ${D.written} by lockstep ${D.version}.`];
if (S.status === "is running") foot.push("The run is not over: make the report again to see more of it.");
if (S.left_out) foot.push(`${S.left_out} lines of the trace could not be read and are left out.`);
$("foot").append(...foot.map((text) => el("p", {}, text)));

const paintAll = () => { if (scene) drawTimeline(); charts.forEach((paint) => paint()); document.querySelectorAll(".stack i").forEach((piece) => piece.classList.toggle("tight", piece.scrollWidth > piece.clientWidth)); };
paintAll();
let wide = document.documentElement.clientWidth;
window.addEventListener("resize", () => { const now = document.documentElement.clientWidth; if (now !== wide) { wide = now; paintAll(); } });
window.addEventListener("beforeprint", paintAll);
})();
