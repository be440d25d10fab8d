// Each part of the page, from top to bottom. A section stays hidden unless there is something to show in it.
(() => {
const {
  $, asTable, bar, count, el, hours, isNumber, known, legend, listed, mebibytes, milliseconds, nearlyAll, number,
  paintAll, percent, plot, range, rich, seconds, table, text, yesNo,
} = Drawing;
// Numbers beyond these bounds are not those of a machine, and their sums and ratios would not be numbers.
function toBounded(_, value) {
  if (!isNumber(value)) return value;
  return Math.abs(value) > 1e30 ? null : Math.abs(value) < 1e-30 ? 0 : value;
}
const P = JSON.parse($("data").textContent, toBounded);
const ALL = listed(P.forecasts);
const best = ALL.find((forecast) => forecast.is_best) || null;
const MOST_SERIES = 8, MOST_BARS = 24;

const PARTS = {
  "forward and backward": "forward", update: "update", data: "data", "exposed communication": "exposed",
  "waiting for the slowest": "waiting", other: "other",
};
const KINDS = {
  weights: "weights", gradients: "gradients", optimizer: "optimizer", activations: "activations", buckets: "buckets",
  graphs: "CUDA graphs", rest: "everything else",
};
// What distinguishes one line of the efficiency chart from another: the field, and the text of a value.
const SETTINGS = [
  ["link", String],
  ["backend", String],
  ["grad_comm", String],
  ["shard_optimizer", (value) => value ? "sharded optimizer" : ""],
  ["shards", (value) => isNumber(value) ? count(value, "shard") : value],
  ["bucket_mib", (value) => `buckets of ${number(value)} MiB`],
  ["global_batch_size", (value) => `batch ${number(value)}`],
];
function money(value) {
  const currency = P.currency || "";
  if (!isNumber(value)) return "–";
  return currency.length === 1 ? currency + number(value) : `${number(value)} ${currency}`.trim();
}
function show(id, ...lead) {
  $(id).hidden = false;
  const sentences = lead.filter(known).join(" ").replace(/(\d) (?=%|[mµ]?s\b|h\b|[MGT]iB)/g, "$1\u00a0");
  if (lead.length) $(id + "-lead").append(...rich(sentences));
}
const lines = (...pieces) => pieces.filter(Boolean).join("\n");
const leftOut = (amount) => `${number(amount)} ${amount === 1 ? "is" : "are"} left out`;

// ---- the top of the page ----
if (known(P.measured_on)) $("kicker").append(el("span", { class: "pill plain" }, `measured on ${P.measured_on}`));
if (known(P.question)) $("kicker").append(el("span", { class: "pill plain" }, `asked for: ${P.question}`));
function tile(what, figure, more) {
  const [value, ...unit] = figure.split(" ");
  $("tiles").append(el("div", { class: "tile" }, el("div", { class: "what" }, what),
    el("div", { class: "figure" }, value, unit.length ? el("small", {}, " " + unit.join(" ")) : null),
    el("div", { class: "more" }, more || "")));
}
function describeTarget() {
  const steps = isNumber(P.target?.steps) ? count(P.target.steps, "step") : "";
  const loss = isNumber(P.target?.loss) ? `to a loss of ${number(P.target.loss)}` : "";
  return [steps, loss].filter(Boolean).join(", ");
}
function tiles(one) {
  const times = range(one.step_ms), inPlace = one.goodput?.recovery_in_place;
  tile("Workers", number(one.workers), isNumber(one.hosts) ? `on ${count(one.hosts, "host")}` : "");
  tile("A step takes", milliseconds(one.step_ms?.mid), times ? `90 % interval: ${times}` : "");
  const batch = isNumber(one.global_batch_size) ? `batches of ${number(one.global_batch_size)}` : "";
  tile("Samples per second", number(one.samples_per_s), batch);
  if (isNumber(one.efficiency)) tile("Efficiency", percent(one.efficiency), "of linear scaling");
  if (isNumber(one.hours)) tile("Time", hours(one.hours), describeTarget());
  if (isNumber(one.cost)) tile("Cost", money(one.cost), "of all workers");
  const limit = isNumber(one.memory_limit_mib) ? `of ${mebibytes(one.memory_limit_mib)} ` : "";
  if (isNumber(one.memory_total_mib)) tile("Memory", mebibytes(one.memory_total_mib), limit + "per worker");
  if (isNumber(inPlace)) tile("Goodput", nearlyAll(inPlace), "with recovery in place");
}
if (best) tiles(best); else $("tiles").hidden = true;

// ---- bars of parts and of memory ----
// Sorts as `names` does, and puts what is not in it last.
function sortAs(names, list, nameOf) {
  const order = Object.keys(names), has = (one) => order.includes(nameOf(one));
  const rank = (one) => has(one) ? order.indexOf(nameOf(one)) : order.length;
  return list.sort((one, other) => rank(one) - rank(other));
}
function toParts(values, names, describe, format) {
  const found = Object.entries(values && typeof values === "object" ? values : {});
  const parts = found.filter(([, value]) => isNumber(value) && value > 0).map(([key, value]) => {
    const { color, title } = describe(key);
    return { key, name: color, title, value, text: format(value), tip: `${title}\n${format(value)}` };
  });
  return sortAs(names, parts, (part) => part.key);
}
const describePart = (name) => ({ color: Object.hasOwn(PARTS, name) ? PARTS[name] : "between", title: name });
const describeKind = (name) =>
  Object.hasOwn(KINDS, name) ? { color: name, title: KINDS[name] } : { color: "between", title: name };
const timeParts = (forecast) => toParts(forecast.parts_ms, PARTS, describePart, milliseconds);
const memoryParts = (forecast) => toParts(forecast.memory_mib, KINDS, describeKind, mebibytes);
const sum = (parts) => parts.reduce((total, part) => total + part.value, 0);
const total = (one) => isNumber(one.memory_total_mib) ? one.memory_total_mib : sum(memoryParts(one));
// A limit many times as large as the bars would leave nothing to see of them: then it is given in words only.
function memoryScale(forecasts) {
  const most = Math.max(...forecasts.map((one) => Math.max(total(one), sum(memoryParts(one)))));
  const limits = forecasts.map((one) => one.memory_limit_mib).filter(isNumber);
  return Math.max(most, ...limits.filter((limit) => limit <= 5 * most)) * 1.02;
}
function memoryBar(label, forecast, whole) {
  const limit = forecast.memory_limit_mib, why = known(forecast.does_not_fit_by) ? `: ${forecast.does_not_fit_by}` : "";
  const without = forecast.fits_without_graphs ? ": fits without CUDA graphs, slower" : "";
  const fits = isNumber(limit) ? el("small", {}, `of ${mebibytes(limit)}${without}`) : null;
  const fits_text = forecast.fits === false ? el("small", { class: "bad" }, `does not fit${why}`) : fits;
  const marks = isNumber(limit) ? [{ kind: "limit", from: limit, tip: `limit\n${mebibytes(limit)}` }] : [];
  return bar(label, memoryParts(forecast), whole, [mebibytes(total(forecast)), fits_text], marks);
}
function memoryLegend(forecasts, whole) {
  const found = new Map(forecasts.flatMap(memoryParts).map((part) => [part.key, [part.name, part.title]]));
  const pairs = sortAs(KINDS, [...found], ([key]) => key).map(([, pair]) => pair);
  const hasLimit = forecasts.some((one) => isNumber(one.memory_limit_mib) && one.memory_limit_mib <= whole);
  return legend([...pairs, ...(hasLimit ? [["limit", "limit"]] : [])]);
}
function farLimit(forecasts, whole) {
  const limits = forecasts.map((one) => one.memory_limit_mib).filter((limit) => isNumber(limit) && limit > whole);
  return limits.length ? `The limit of ${mebibytes(Math.min(...limits))} is beyond the right edge.` : "";
}

// ---- the recommended configuration ----
function settingsList(one) {
  const hosts = `${count(one.hosts, "host")} × ${number(one.workers_per_host)}`;
  const facts = [
    ["workers", number(one.workers) + (isNumber(one.hosts) && isNumber(one.workers_per_host) ? ` = ${hosts}` : "")],
    ["link", text(one.link)], ["backend", text(one.backend)], ["gradient communication", text(one.grad_comm)],
    ["sharded optimizer", yesNo(one.shard_optimizer)], ["redundancy", number(one.redundancy)],
    ["global batch size", number(one.global_batch_size)], ["shards", number(one.shards)],
    ["bucket size", isNumber(one.bucket_mib) ? `${number(one.bucket_mib)} MiB` : "–"],
  ];
  if (one.goodput) facts.push(["goodput with restarts", nearlyAll(one.goodput.restart)]);
  if (isNumber(one.checkpoint_every_s)) facts.push(["a checkpoint every", seconds(one.checkpoint_every_s)]);
  const toItem = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  return el("dl", { class: "facts" }, ...facts.map(toItem));
}
function recommend(one) {
  show("recommended", text(one.name));
  if (one.is_extrapolated) $("h-recommended").append(" ", el("span", { class: "pill extrapolated" }, "extrapolated"));
  const body = $("recommended-body"), parts = timeParts(one), kinds = memoryParts(one);
  body.append(settingsList(one));
  if (parts.length) {
    const { low, mid, high } = one.step_ms || {}, times = range(one.step_ms);
    const marks = times ? [{ kind: "interval", from: low, to: high, tip: `90 % interval\n${times}` }] : [];
    const pairs = parts.map((part) => [part.name, part.key]);
    const whole = 1.02 * Math.max(sum(parts), isNumber(high) ? high : 0);
    const end = [milliseconds(isNumber(mid) ? mid : sum(parts)), times ? el("small", {}, times) : null];
    body.append(el("h3", {}, "Parts of a step"),
      legend([...pairs, ...(times ? [["interval", "90 % interval of the whole step"]] : [])]),
      bar(["one step"], parts, whole, end, marks));
  }
  if (kinds.length) {
    const whole = memoryScale([one]), far = farLimit([one], whole);
    body.append(el("h3", {}, "Memory of one worker"));
    body.append(memoryLegend([one], whole), memoryBar(["one worker"], one, whole));
    if (far) body.append(el("p", { class: "note" }, far));
  }
  const tables = [["part of a step", "time", parts], ["memory", "size", kinds]].filter(([, , found]) => found.length);
  if (tables.length) body.append(asTable(...tables.map(([what, unit, found]) => table(
    [{ name: what }, { name: unit, numeric: 1 }, { name: "share", numeric: 1 }],
    found.map((part) => [part.title, part.text, percent(part.value / sum(found))])))));
}
if (best) recommend(best);

// ---- efficiency over workers ----
// Shards that grow with the workers, because there is one for each, are one setting and not many.
const fewest = Math.min(...ALL.map((forecast) => forecast.shards).filter(isNumber));
const growing = ALL.some((forecast) => forecast.shards !== fewest)
  && ALL.every((forecast) => forecast.shards === Math.max(fewest, forecast.workers));
const settingOf = (forecast, field) => field === "shards" && growing ? "a shard per worker" : forecast[field];
const distinct = (field) => new Set(ALL.map((forecast) => JSON.stringify(settingOf(forecast, field) ?? null))).size;
const describe = (forecast, settings) => settings.map(([field, format]) => {
  const value = settingOf(forecast, field);
  return known(value) ? format(value) : "";
}).filter(Boolean).join(", ");
const varying = SETTINGS.filter(([field]) => distinct(field) > 1);
const same = ALL.length > 1 ? describe(ALL[0], SETTINGS.filter(([field]) => distinct(field) === 1)) : "";
const sameForAll = same ? `The same for all: ${same}.` : "";

// Groups by settings; of several forecasts with as many workers, keeps the recommended or the most efficient one. A
// forecast on one host, which has no link, begins the lines of all links.
function toSeries(forecasts) {
  const groups = new Map();
  const keyOf = (forecast, settings) => JSON.stringify(settings.map(([field]) => settingOf(forecast, field) ?? null));
  const within = SETTINGS.filter(([field]) => field !== "link" && field !== "backend");
  function add(key, forecast) {
    if (!groups.has(key)) groups.set(key, new Map());
    const group = groups.get(key), other = group.get(forecast.workers);
    const wins = !other || forecast.is_best || (!other.is_best && forecast.efficiency > other.efficiency);
    if (wins) group.set(forecast.workers, forecast);
  }
  const several = forecasts.filter((forecast) => forecast.hosts > 1);
  for (const forecast of several) add(keyOf(forecast, SETTINGS), forecast);
  for (const forecast of forecasts.filter((one) => !(one.hosts > 1))) {
    const own = keyOf(forecast, within);
    const alike = several.filter((other) => !known(forecast.link) && keyOf(other, within) === own);
    const keys = new Set(alike.map((other) => keyOf(other, SETTINGS)));
    for (const key of keys.size ? keys : [keyOf(forecast, SETTINGS)]) add(key, forecast);
  }
  const inOrder = (group) => [...group.values()].sort((one, other) => one.workers - other.workers);
  const series = [...groups.values()].map(inOrder), last = (one) => one[one.length - 1];
  return series.sort((one, other) =>
    last(other).workers - last(one).workers || last(other).efficiency - last(one).efficiency);
}
// The interval of the efficiency follows from that of the step time.
function atEdge(forecast, edge) {
  const times = forecast.step_ms || {};
  return times[edge] > 0 && isNumber(times.mid) ? forecast.efficiency * times.mid / times[edge] : null;
}
function efficiencyPoint(forecast) {
  const times = range(forecast.step_ms), step = `${milliseconds(forecast.step_ms?.mid)} per step`;
  const efficiency = `${percent(forecast.efficiency)} on ${count(forecast.workers, "worker")}`;
  const remark = forecast.is_extrapolated ? "extrapolated" : "";
  return {
    x: forecast.workers, y: forecast.efficiency, low: atEdge(forecast, "high"), high: atEdge(forecast, "low"),
    hollow: forecast.is_extrapolated, best: forecast.is_best,
    tip: lines(text(forecast.name), efficiency, times ? `${step} (${times})` : step, remark),
  };
}
function drawEfficiency(plotted) {
  const all = toSeries(plotted), shown = all.slice(0, MOST_SERIES), left = all.length - shown.length, keys = [];
  const series = shown.map((forecasts, color) => ({
    name: describe(forecasts[forecasts.length - 1], varying) || "all configurations", color, joined: true,
    points: forecasts.map(efficiencyPoint),
  }));
  const points = series.flatMap((one) => one.points);
  const values = points.flatMap((point) => [point.y, point.low]).filter(isNumber);
  if (points.some((point) => point.best)) keys.push({ name: "recommended", ring: true });
  if (points.some((point) => point.hollow)) keys.push({ name: "extrapolated", color: "faint", hollow: true });
  const some = `Shown are the ${MOST_SERIES} of ${all.length} lines with the best efficiency on the most workers`;
  const several = "Of forecasts of a line with as many workers, the most efficient one is shown.";
  show("efficiency", "Efficiency is the share of linear scaling that is reached.",
    "The band around a line is its 90 % interval.", sameForAll,
    left ? `${some}; ${leftOut(left)}.` : "", all.flat().length < plotted.length ? several : "");
  $("efficiency-body").append(plot({
    title: "Efficiency over workers", series, keys, height: 330,
    x: { label: "workers", log: true, values: points.map((point) => point.x), format: number },
    y: {
      label: "efficiency, % of linear scaling", format: percent, most: Math.max(1, ...values),
      least: Math.max(0, Math.floor(10 * Math.min(...values) - 0.3) / 10),
    },
  }));
}
const plotted = ALL.filter((forecast) => isNumber(forecast.efficiency) && forecast.workers > 0);
if (plotted.length) drawEfficiency(plotted);

// ---- time against money ----
function drawMoney(priced) {
  const remark = (one) => one.fits === false ? "does not fit into memory" : one.is_pareto ? "on the Pareto front" : "";
  const toPoint = (one) => ({
    x: one.hours, y: one.cost, best: one.is_best, small: !one.is_pareto && !one.is_best,
    tip: lines(text(one.name), `${hours(one.hours)}, ${money(one.cost)}`, remark(one)),
  });
  const pick = (wanted) => priced.filter(wanted).map(toPoint).sort((one, other) => one.x - other.x);
  const fits = (forecast) => forecast.fits !== false, target = describeTarget();
  const front = "No configuration that fits is both faster and cheaper than one of the Pareto front.";
  show("money", target ? `For ${target}.` : "", front);
  $("money-body").append(plot({
    title: "Time against money",
    series: [
      { name: "Pareto front", color: 0, joined: true, points: pick((one) => fits(one) && one.is_pareto) },
      { name: "other configurations", color: "faint", points: pick((one) => fits(one) && !one.is_pareto) },
      { name: "does not fit into memory", color: 1, shape: "cross", points: pick((one) => !fits(one)) },
    ],
    keys: priced.some((one) => one.is_best) ? [{ name: "recommended", ring: true }] : [],
    x: { label: "time, hours", log: "wide", format: number },
    y: { label: `cost, ${P.currency || "money"}`, log: "wide", format: number },
  }));
}
const priced = ALL.filter((forecast) => isNumber(forecast.hours) && isNumber(forecast.cost));
if (priced.length) drawMoney(priced);

// ---- memory of all configurations ----
function drawMemory(forecasts) {
  const groups = new Map();
  for (const forecast of forecasts) {
    const key = JSON.stringify([forecast.memory_mib, total(forecast), forecast.memory_limit_mib, forecast.fits]);
    groups.set(key, [...(groups.get(key) || []), forecast]);
  }
  const all = [...groups.values()], has = (group, mark) => group.some((one) => one[mark]);
  const weight = (group) => has(group, "is_best") ? 0 : has(group, "is_pareto") ? 1 : 2;
  const chosen = new Set([...all].sort((one, other) => weight(one) - weight(other)).slice(0, MOST_BARS));
  const shown = all.filter((group) => chosen.has(group)), left = all.length - shown.length;
  const firsts = shown.map((group) => group.find((one) => one.is_best) || group[0]), whole = memoryScale(firsts);
  show("memory", "By kind, per configuration.",
    all.length < forecasts.length ? "Configurations with equal memory share a bar." : "",
    left ? `Shown are ${MOST_BARS} of ${all.length} bars; ${leftOut(left)}.` : "", farLimit(firsts, whole));
  $("memory-body").append(memoryLegend(firsts, whole), ...firsts.map((forecast, index) => {
    const more = shown[index].length - 1, name = text(forecast.name);
    const others = more ? el("small", {}, ` and ${number(more)} more`) : null;
    return memoryBar([forecast.is_best ? el("b", {}, name) : name, others], forecast, whole);
  }));
}
const withMemory = ALL.filter((forecast) => memoryParts(forecast).length);
if (withMemory.length) drawMemory(withMemory);

// ---- goodput and batch size ----
const curve = (points, across, field, tip) => points.filter((point) => isNumber(point[field]))
  .map((point) => ({ x: point[across], y: point[field], tip: tip(point) }));
const sorted = (points, across) =>
  listed(points).filter((point) => point[across] > 0).sort((one, other) => one[across] - other[across]);
function drawGoodput(points, { mtbf_hours: mtbf, notes }) {
  const tip = (point) => lines(count(point.workers, "worker"),
    `recovery in place: ${nearlyAll(point.recovery_in_place)}`,
    `restart from a checkpoint: ${nearlyAll(point.restart)}`,
    isNumber(point.checkpoint_every_s) ? `a checkpoint every ${seconds(point.checkpoint_every_s)}` : "");
  const basis = isNumber(mtbf) ? ` for a mean time of ${number(mtbf)} h between failures of one worker` : "";
  const meaning = "Goodput is the share of time that is spent on steps that are kept.";
  show("goodput", meaning, `Computed${basis}, not measured.`, ...listed(notes));
  const names = ["workers", "recovery in place", "restart", "a checkpoint every"];
  const toRow = (point) => [
    number(point.workers), nearlyAll(point.recovery_in_place), nearlyAll(point.restart),
    seconds(point.checkpoint_every_s),
  ];
  $("goodput-body").append(plot({
    title: "Goodput over workers, an extrapolation",
    series: [
      { name: "recovery in place", color: 2, joined: true, points: curve(points, "workers", "recovery_in_place", tip) },
      { name: "restart from a checkpoint", color: 1, joined: true, points: curve(points, "workers", "restart", tip) },
    ],
    x: { label: "workers", log: true, values: points.map((point) => point.workers), format: number },
    y: { label: "goodput, % of the time", format: nearlyAll, most: 1 },
  }), asTable(table(names.map((name) => ({ name, numeric: 1 })), points.map(toRow))));
}
const hasGoodput = (point) => isNumber(point.recovery_in_place) || isNumber(point.restart);
const goodput = sorted(P.failures?.curve, "workers").filter(hasGoodput);
if (goodput.length) drawGoodput(goodput, P.failures);

function drawBatch(points, { noise_scale: noise, advice }) {
  show("batch", isNumber(noise) ? `The gradient noise scale is ${number(noise)} samples.` : "", advice);
  const grid = el("div", { class: "grid" }), sizes = points.map((point) => point.global_batch_size);
  const near = isNumber(noise) && noise >= sizes[0] / 4 && noise <= sizes[sizes.length - 1] * 4;
  const charts = [["steps", "Steps to the same loss", 0], ["samples", "Samples to the same loss", 2]];
  for (const [field, heading, color] of charts) {
    const tip = (point) => `batch ${number(point.global_batch_size)}\n${number(point[field])} ${field}`;
    const found = curve(points, "global_batch_size", field, tip);
    if (found.length) grid.append(plot({
      title: heading, heading, height: 240, series: [{ name: field, color, joined: true, points: found }],
      lines: near ? [{ x: noise, name: "noise scale" }] : [],
      x: { label: "global batch size", log: true, values: sizes, format: number },
      y: { label: field, log: "wide", format: number },
    }));
  }
  $("batch-body").append(grid);
  const names = ["global batch size", "steps", "samples"];
  if (points.length) $("batch-body").append(asTable(table(names.map((name) => ({ name, numeric: 1 })),
    points.map((point) => [number(point.global_batch_size), number(point.steps), number(point.samples)]))));
}
const hasBatch = (point) => isNumber(point.steps) || isNumber(point.samples);
const batches = sorted(P.batch?.curve, "global_batch_size").filter(hasBatch);
if (batches.length || known(P.batch?.advice)) drawBatch(batches, P.batch);

// ---- tables and notes ----
const checked = listed(P.checked);
if (checked.length) {
  show("checked", Tables.summarizeChecks(checked));
  $("checked-body").append(...Tables.checks(checked));
}
if (ALL.length) {
  const left = P.forecasts_left_out ? `${count(P.forecasts_left_out, "further configuration")} left out here.` : "";
  show("forecasts", `${count(ALL.length, "configuration")}; a click on a heading sorts.`, sameForAll, left);
  $("forecasts-body").append(Tables.forecasts(ALL, money));
}
const links = listed(P.links);
if (links.length) {
  const head = [
    { name: "link", text: 1 }, { name: "bandwidth", numeric: 1 }, { name: "latency", numeric: 1 }, { name: "source" },
  ];
  const unit = (value, name) => isNumber(value) ? `${number(value)} ${name}` : "–";
  show("links");
  $("links-body").append(table(head, links.map((one) =>
    [text(one.name), unit(one.gbit_per_s, "Gbit/s"), unit(one.latency_us, "µs"), text(one.source)])));
}
if (listed(P.notes).length) {
  show("notes");
  $("notes-body").append(...listed(P.notes).map((note) => el("li", {}, ...rich(note))));
}
$("foot").append(el("p", {}, `Made ${text(P.made)} by lockstep ${text(P.version)}.`));

paintAll();
let wide = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  const now = document.documentElement.clientWidth;
  if (now !== wide) { wide = now; paintAll(); }
});
window.addEventListener("beforeprint", paintAll);
})();
