"use strict";
// Elements, figures as text, tooltips, bars, tables and plots. All text becomes text nodes, never markup.
const Drawing = (() => {
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const known = (value) => value !== null && value !== undefined && value !== "";
const listed = (value) => Array.isArray(value) ? value.filter((one) => one !== null) : [];

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  const present = children.filter((child) => child !== null && child !== undefined);
  made.append(...present.map((child) => child instanceof Node ? child : String(child)));
  return made;
}
function draw(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
// Text in which what is between backticks is code.
const rich = (text) => String(text).split(/`([^`]+)`/).map((piece, index) => index % 2 ? el("code", {}, piece) : piece);

// ---- figures as text ----
const text = (value) => known(value) ? String(value) : "–";
const yesNo = (value) => known(value) ? (value ? "yes" : "no") : "–";
const fixed = (value, digits) => {
  const text = value.toPrecision(digits);
  return text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
};
function number(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) {
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  if (size >= 1e9) return fixed(value / 1e9, size >= 1e12 ? 6 : 3) + " G";
  if (size >= 1e6) return fixed(value / 1e6, size >= 999.5e6 ? 4 : 3) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return fixed(value, size >= 999.5 ? 4 : 3);
}
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 5400) return number(value / 3600) + " h";
  if (value >= 90) return number(value / 60) + " min";
  if (value >= 1) return number(value) + " s";
  return value >= 1e-3 || value === 0 ? number(value * 1e3) + " ms" : number(value * 1e6) + " µs";
}
const milliseconds = (value) => isNumber(value) ? seconds(value / 1e3) : "–";
const hours = (value) => isNumber(value) ? seconds(value * 3600) : "–";
function mebibytes(value) {
  if (!isNumber(value)) return "–";
  const unit = value >= 1023.5 * 1024 ? 2 : value >= 1023.5 ? 1 : 0;
  return number(value / 1024 ** unit) + " " + ["MiB", "GiB", "TiB"][unit];
}
function percent(share) {
  if (!isNumber(share)) return "–";
  return (share > 0 && share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)) + " %";
}
// A share near 1 with as many digits as its distance from 1 needs: 99.95 %.
function nearlyAll(share) {
  if (!isNumber(share)) return "–";
  const digits = share < 1 && share > 0 ? Math.ceil(-Math.log10(1 - share)) - 2 : 0;
  return (100 * share).toFixed(Math.max(0, Math.min(4, digits))) + " %";
}
// An interval of step times: "138 to 187 ms"; nothing if it is not known.
function range(times) {
  if (!isNumber(times?.low) || !isNumber(times?.high)) return "";
  const [low, high] = [times.low, times.high].map((value) => milliseconds(value).split(" "));
  return `${low[1] === high[1] ? low[0] : low.join("\u00a0")} to ${high.join("\u00a0")}`;
}
const signed = (share) => isNumber(share) ? (share > 0 ? "+" : share < 0 ? "−" : "") + percent(Math.abs(share)) : "–";

// ---- one tooltip for all ----
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

// ---- bars and tables ----
// parts: { name, value, text, tip }; whole: the value at the right edge; marks: { kind, from, to, tip }.
function bar(label, parts, whole, end, marks) {
  const present = parts.filter((part) => part.value > 0), total = present.reduce((sum, part) => sum + part.value, 0);
  const spoken = [...present, ...marks].map((one) => one.tip.replace("\n", ": ")).join("; ");
  const stack = el("div", { class: "stack", role: "img", "aria-label": spoken });
  stack.style.width = whole > 0 ? 100 * Math.min(1, total / whole) + "%" : "0";
  for (const part of present) {
    const piece = el("i", { class: "c-" + part.name }, part.value / whole > 0.06 ? part.text : "");
    piece.style.flex = `${part.value / total} 0 0`;
    tipOn(piece, part.tip);
    stack.append(piece);
  }
  const track = el("div", { class: "track" }, stack);
  for (const mark of marks.filter((one) => isNumber(one.from) && one.from <= whole)) {
    const made = el("b", { class: mark.kind });
    made.style.left = `calc(${100 * mark.from / whole}% - 1px)`;
    if (isNumber(mark.to)) made.style.width = 100 * (mark.to - mark.from) / whole + "%";
    tipOn(made, mark.tip);
    track.append(made);
  }
  return el("div", { class: "row" },
    el("div", { class: "label" }, ...label), track, el("div", { class: "end" }, ...end));
}
const legend = (pairs) => el("div", { class: "legend" },
  ...pairs.map(([name, text]) => el("span", {}, el("span", { class: "swatch c-" + name }), text)));
// head: { name, numeric, text }, where text marks a column whose cells may wrap.
function table(head, rows, attributes) {
  const kind = (column) => head[column].numeric ? { class: "n" } : head[column].text ? { class: "text" } : {};
  return el("table", attributes || {},
    el("thead", {}, el("tr", {}, ...head.map((one, column) => el("th", { ...kind(column), scope: "col" }, one.name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, column) => el("td", kind(column), value))))));
}
const asTable = (...tables) =>
  el("details", {}, el("summary", {}, "As a table"), ...tables.map((one) => el("div", { class: "wide" }, one)));

// ---- plots ----
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((one) => one * power >= rough * 0.999) || 10);
}
// The range of an axis, and where a value is in it. axis: { label, format, log, least, most, values }; `log` may be
// "wide": only if the values span more than a factor of 12. There is a tick mark at each of `values`, if there are any.
function makeScale(axis, found) {
  const bound = (value) => Math.max(-8e307, Math.min(8e307, value)); // so that a difference is still a number
  let low = bound(Math.min(axis.least ?? Infinity, ...found)), high = bound(Math.max(axis.most ?? -Infinity, ...found));
  const log = low > 0 && (axis.log === "wide" ? high / low > 12 : Boolean(axis.log)), warp = log ? Math.log10 : Number;
  if (low === high && log) [low, high] = [low / 2, high * 2];
  if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const room = 0.05 * (warp(high) - warp(low)), ticks = [];
  const begin = low === axis.least ? warp(low) : warp(low) - room;
  const end = high === axis.most ? warp(high) : warp(high) + room;
  if (axis.values) ticks.push(...new Set([...axis.values].sort((one, other) => one - other)));
  else if (log) {
    const powers = Math.ceil(end) - Math.floor(begin);
    for (let power = Math.floor(begin); power <= end; power += Math.max(1, Math.ceil(powers / 12))) {
      for (const one of powers > 3 ? [1] : [1, 2, 5]) ticks.push(one * 10 ** power);
    }
  } else {
    const each = niceStep((high - low) / 5);
    for (let n = Math.ceil(begin / each); n <= end / each * 1.000001 && ticks.length < 14; n += 1) ticks.push(n * each);
  }
  return {
    log, low, high,
    at: (value) => (warp(bound(value)) - begin) / (end - begin),
    ticks: ticks.filter((one) => isNumber(one) && warp(one) >= begin - 1e-9 && warp(one) <= end + 1e-9),
  };
}
const SHAPES = {
  circle: (r) => `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
  square: (r) => `M${-r * 0.9} ${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`,
  triangle: (r) => `M0 ${-r * 1.2}L${r * 1.15} ${r * 0.85}H${-r * 1.15}Z`,
  diamond: (r) => `M0 ${-r * 1.3}L${r * 1.3} 0L0 ${r * 1.3}L${-r * 1.3} 0Z`,
  cross: (r) => `M${-r} ${-r}L${r} ${r}M${-r} ${r}L${r} ${-r}`,
};
const shapeOf = (series) => series.shape || Object.keys(SHAPES)[series.color % 4] || "circle";
function marker(series, point, x, y) {
  const name = `mark s-${series.color}${point.hollow ? " hollow" : ""}`;
  const path = SHAPES[shapeOf(series)](point.small ? 2.8 : 4);
  return draw("path", { class: name, d: path, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
}
const ring = (x, y, kind) => draw("circle", { class: kind, cx: x, cy: y, r: 8.5 });
function plotKey(series) {
  const picture = draw("svg", { viewBox: "0 0 26 14", "aria-hidden": "true" });
  if (series.joined) picture.append(draw("path", { class: `series s-${series.color}`, d: "M0 7H26" }));
  picture.append(series.ring ? ring(13, 7, "best") : marker(series, { hollow: series.hollow }, 13, 7));
  if (series.ring) picture.lastChild.setAttribute("r", 6);
  return el("span", { class: "key" }, picture, series.name);
}

const MOVES = {
  ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9,
};
const plots = []; // functions that draw again, for another width
// spec: { title, heading, height, x, y, series, keys, lines }. series: { name, color, shape, joined, points }; points:
// { x, y, low, high, tip, hollow, small, best }, of which x, y and tip must be there. keys: further entries of the
// legend. lines: { x, name }.
function plot(spec) {
  const series = spec.series.filter((one) => one.points.length);
  const points = series.flatMap((one) => one.points.map((point) => ({ ...point, series: one })));
  points.sort((one, other) => one.x - other.x);
  const scales = {
    x: makeScale(spec.x, points.map((point) => point.x).concat((spec.lines || []).map((line) => line.x))),
    y: makeScale(spec.y, points.flatMap((point) => [point.y, point.low, point.high].filter(isNumber))),
  };
  const holder = el("div", { class: "plot", tabindex: "0", role: "img" });
  const nameOf = (axis) => spec[axis].label + (scales[axis].log ? " (log scale)" : "");
  const extent = (axis) => [scales[axis].low, scales[axis].high].map(spec[axis].format).join(" to ");
  const spoken = `${spec.title}. Across: ${nameOf("x")}, ${extent("x")}. Upwards: ${nameOf("y")}, ${extent("y")}.`;
  holder.setAttribute("aria-label", `${spoken} The arrow keys go from point to point.`);
  const keys = [...series, ...(spec.keys || [])].filter((one) => one.name);
  const box = el("div", { class: "chart" }, spec.heading ? el("h3", {}, spec.heading) : null,
    keys.length > 1 ? el("div", { class: "legend" }, ...keys.map(plotKey)) : null, holder);
  let chosen = -1, place = null;
  function paint() {
    const width = Math.max(220, holder.clientWidth), height = spec.height || 290;
    const left = 56, right = width - 12, over = 26, under = height - 42;
    const x = (value) => left + scales.x.at(value) * (right - left);
    const y = (value) => under - scales.y.at(value) * (under - over);
    const canvas = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const put = (...made) => canvas.append(...made);
    let free = Infinity;
    for (const tick of scales.y.ticks) {
      if (y(tick) > free) continue;
      free = y(tick) - 15;
      put(draw("line", { class: "rule", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      put(draw("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, spec.y.format(tick)));
    }
    put(draw("line", { class: "axis", x1: left, x2: right, y1: under, y2: under }));
    free = 0;
    for (const tick of scales.x.ticks) {
      const text = spec.x.format(tick), half = 3.4 * text.length + 3;
      put(draw("line", { class: "axis", x1: x(tick), x2: x(tick), y1: under, y2: under + 4 }));
      if (x(tick) - half < free || x(tick) + half > width) continue;
      free = x(tick) + half;
      put(draw("text", { x: x(tick), y: under + 17, "text-anchor": "middle" }, text));
    }
    put(draw("text", { class: "axis-name", x: 2, y: 12 }, nameOf("y")));
    const middle = { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" };
    put(draw("text", { class: "axis-name", ...middle }, nameOf("x")));
    for (const line of spec.lines || []) {
      const isRight = scales.x.at(line.x) > 0.5, at = x(line.x), text = { x: at + (isRight ? -5 : 5), y: over + 10 };
      put(draw("line", { class: "level", x1: at, x2: at, y1: over, y2: under }));
      put(draw("text", { class: "level-name", ...text, "text-anchor": isRight ? "end" : "start" }, line.name));
    }
    const path = (list, value) => list.map((point) => `${x(point.x).toFixed(1)} ${y(value(point)).toFixed(1)}`);
    for (const one of series.filter((each) => each.joined)) {
      const isOn = chosen >= 0 ? points[chosen].series === one : one.points.some((point) => point.best);
      const banded = one.points.filter((point) => isNumber(point.low) && isNumber(point.high));
      const edge = [...path(banded, (point) => point.high), ...path([...banded].reverse(), (point) => point.low)];
      const name = banded.length > 1 ? `band${isOn ? " on" : ""}` : "bound";
      if (banded.length) put(draw("path", { class: `${name} s-${one.color}`, d: `M${edge.join("L")}Z` }));
    }
    for (const one of series.filter((each) => each.joined && each.points.length > 1)) {
      put(draw("path", { class: `series s-${one.color}`, d: `M${path(one.points, (point) => point.y).join("L")}` }));
    }
    for (const point of [...points].reverse()) put(marker(point.series, point, x(point.x), y(point.y)));
    for (const point of points.filter((each) => each.best)) put(ring(x(point.x), y(point.y), "best"));
    if (chosen >= 0) put(ring(x(points[chosen].x), y(points[chosen].y), "chosen"));
    place = { x, y };
    holder.replaceChildren(canvas);
  }
  function choose(index) {
    chosen = index;
    paint();
    if (index < 0) { hideTip(); return; }
    const corner = holder.getBoundingClientRect();
    showTip(points[index].tip, corner.left + place.x(points[index].x), corner.top + place.y(points[index].y));
  }
  const chooseNearest = (event) => {
    const corner = holder.getBoundingClientRect();
    const [x, y] = [event.clientX - corner.left, event.clientY - corner.top];
    const far = (point) => Math.hypot(place.x(point.x) - x, place.y(point.y) - y);
    choose(points.reduce((best, one, index) => far(one) < far(points[best]) ? index : best, 0));
  };
  for (const name of ["pointermove", "pointerdown"]) holder.addEventListener(name, chooseNearest);
  for (const leave of ["pointerleave", "blur"]) holder.addEventListener(leave, () => choose(-1));
  holder.addEventListener("keydown", (event) => {
    const by = MOVES[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(points.length - 1, chosen + by)));
    $("live").textContent = points[chosen].tip;
  });
  plots.push(paint);
  return box;
}

function paintAll() {
  plots.forEach((paint) => paint());
  for (const piece of document.querySelectorAll(".stack i")) {
    piece.classList.toggle("tight", piece.scrollWidth > piece.clientWidth);
  }
}
return {
  $, asTable, bar, count, el, hours, isNumber, known, legend, listed, mebibytes, milliseconds, nearlyAll, number,
  paintAll, percent, plot, range, rich, seconds, signed, table, text, tipOn, yesNo,
};
})();
