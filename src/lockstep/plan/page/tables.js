// The table of all forecasts, which sorts, and predicted step times beside measured ones.
const Tables = (() => {
const {
  $, asTable, count, el, hours, isNumber, known, legend, mebibytes, milliseconds, nearlyAll, number, percent, range,
  signed, table, text, tipOn, yesNo,
} = Drawing;
const MOST_CHECKED = 40;

// ---- all forecasts ----
function remark(forecast) {
  const why = known(forecast.does_not_fit_by) ? `: ${forecast.does_not_fit_by}` : "";
  return [
    forecast.is_best ? "recommended" : "", forecast.is_pareto ? "Pareto front" : "",
    forecast.fits === false ? `does not fit${why}` : "", forecast.fits_without_graphs ? "fits without CUDA graphs" : "",
    forecast.is_extrapolated ? "extrapolated" : "",
  ].filter(Boolean).join(", ");
}
const words = (name, field) => ({ name, value: (one) => one[field], show: (one) => text(one[field]) });
const flag = (name, field) =>
  ({ name, value: (one) => known(one[field]) ? Number(one[field]) : null, show: (one) => yesNo(one[field]) });
const figure = (name, value, format) => ({ name, value, numeric: true, show: (one) => format(value(one)) });
const toColumns = (money) => [
  { name: "configuration", text: true, always: true, value: (one) => text(one.name), show: (one) => text(one.name) },
  { ...figure("step", (one) => one.step_ms?.mid, milliseconds), always: true },
  { name: "90 % interval", numeric: true, value: (one) => one.step_ms?.low, show: (one) => range(one.step_ms) || "–" },
  figure("samples/s", (one) => one.samples_per_s, number),
  figure("efficiency", (one) => one.efficiency, percent),
  figure("memory", (one) => one.memory_total_mib, mebibytes),
  figure("time", (one) => one.hours, hours),
  figure("cost", (one) => one.cost, money),
  figure("goodput", (one) => one.goodput?.recovery_in_place, nearlyAll),
  figure("goodput with restarts", (one) => one.goodput?.restart, nearlyAll),
  { name: "remarks", text: true, value: remark, show: remark },
  figure("workers", (one) => one.workers, number),
  figure("hosts", (one) => one.hosts, number),
  words("link", "link"),
  words("backend", "backend"),
  words("gradients", "grad_comm"),
  flag("sharded optimizer", "shard_optimizer"),
  figure("redundancy", (one) => one.redundancy, number),
  figure("batch", (one) => one.global_batch_size, number),
  figure("shards", (one) => one.shards, number),
  figure("buckets, MiB", (one) => one.bucket_mib, number),
];
// Unknown values come last in both directions.
function compare(one, other, direction) {
  if (!known(one) || !known(other)) return Number(!known(one)) - Number(!known(other));
  if (typeof one === "number" && typeof other === "number") return direction * (one - other);
  return direction * String(one).localeCompare(String(other), "en", { numeric: true });
}
// Leaves out columns in which nothing is known, or all is the same.
function forecasts(all, money) {
  const differs = (column) => all.length === 1 || new Set(all.map(column.value)).size > 1;
  const isUsed = (column) => column.always || (all.some((one) => known(column.value(one))) && differs(column));
  const columns = toColumns(money).filter(isUsed), body = el("tbody", {});
  const kind = (column) => column.numeric ? { class: "n" } : column.text ? { class: "text" } : {};
  const rows = all.map((forecast) => {
    const cells = columns.map((column, index) =>
      el(index ? "td" : "th", index ? kind(column) : { ...kind(column), scope: "row" }, column.show(forecast)));
    return { forecast, made: el("tr", forecast.is_best ? { class: "best" } : {}, ...cells) };
  });
  const put = () => body.replaceChildren(...rows.map((row) => row.made));
  const heads = columns.map((column) => {
    const button = el("button", { type: "button" }, column.name);
    const head = el("th", { ...kind(column), scope: "col" }, button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.sort((one, other) => compare(column.value(one.forecast), column.value(other.forecast), up ? 1 : -1));
      put();
      $("live").textContent = `sorted by ${column.name}, ${up ? "ascending" : "descending"}`;
    });
    return head;
  });
  put();
  return el("table", { class: "full" }, el("thead", {}, el("tr", {}, ...heads)), body);
}

// ---- predicted beside measured ----
function summarizeChecks(all) {
  const errors = all.map((one) => one.error).filter(isNumber).map(Math.abs);
  const inside = all.filter((one) => one.inside).length, total = count(all.length, "measured step time");
  const mean = errors.reduce((sum, one) => sum + one, 0) / errors.length;
  const first = `${inside} of ${total} ${inside === 1 ? "is" : "are"} inside the predicted 90 % interval.`;
  return errors.length ? `${first} The mean error is ${percent(mean)}.` : first;
}
function checkRow(one, at) {
  const { low, mid, high } = one.predicted_ms, times = range(one.predicted_ms);
  const predicted = `predicted ${milliseconds(mid)}${times ? ` (${times})` : ""}`;
  const measured = `measured ${milliseconds(one.measured_ms)}`;
  const track = el("div", { class: "track", role: "img", "aria-label": `${predicted}, ${measured}` });
  const put = (kind, left, right) => {
    const made = el("b", { class: kind });
    made.style.left = at(left / mid) + "%";
    if (isNumber(right)) made.style.width = at(right / mid) - at(left / mid) + "%";
    track.append(made);
  };
  if (times) put("range", low, high);
  put("predicted", mid);
  put(one.inside ? "measured" : "measured outside", one.measured_ms);
  tipOn(track, `${text(one.name)}\n${predicted}\n${measured}`);
  const error = el("small", one.inside ? {} : { class: "bad" }, signed(one.error) + (one.inside ? "" : ", outside"));
  return el("div", { class: "row" }, el("div", { class: "label" }, text(one.name)), track,
    el("div", { class: "end" }, milliseconds(one.measured_ms), error));
}
// Every row is relative to its own prediction, so that short and long steps can be compared.
function checks(all) {
  const isComplete = (one) => isNumber(one.measured_ms) && one.predicted_ms?.mid > 0;
  const drawn = all.filter(isComplete).slice(0, MOST_CHECKED), made = [];
  if (drawn.length) {
    const values = (one) => [one.predicted_ms.low, one.predicted_ms.high, one.measured_ms].filter(isNumber);
    const ratios = drawn.flatMap((one) => values(one).map((value) => value / one.predicted_ms.mid));
    const from = Math.min(0.9, ...ratios) - 0.02, to = Math.max(1.1, ...ratios) + 0.02;
    const at = (ratio) => 100 * (ratio - from) / (to - from), each = Math.ceil((to - from) / 4 / 0.05) * 0.05;
    const ticks = el("div", { class: "ticks" });
    for (let n = Math.ceil((from - 1) / each); n * each <= to - 1; n += 1) {
      const tick = el("span", {}, n ? signed(n * each) : "predicted");
      tick.style.left = at(1 + n * each) + "%";
      ticks.append(tick);
    }
    const pairs = [["range", "predicted 90 % interval"], ["predicted", "predicted"], ["measured", "measured"]];
    if (drawn.some((one) => !one.inside)) pairs.push(["outside", "measured, outside the interval"]);
    made.push(legend(pairs), el("div", { class: "ratio" }, ...drawn.map((one) => checkRow(one, at)),
      el("div", { class: "row foot" }, el("span", {}), ticks, el("span", {}))));
    const some = `Drawn are ${drawn.length} of ${all.length}; the table has all.`;
    if (drawn.length < all.length) made.push(el("p", { class: "note" }, some));
  }
  const figures = ["predicted", "90 % interval", "measured", "error"].map((name) => ({ name, numeric: 1 }));
  const toRow = (one) => [
    text(one.name), milliseconds(one.predicted_ms?.mid), range(one.predicted_ms) || "–", milliseconds(one.measured_ms),
    signed(one.error), yesNo(one.inside),
  ];
  const details = asTable(table([{ name: "configuration", text: 1 }, ...figures, { name: "inside" }], all.map(toRow)));
  details.open = !drawn.length;
  return [...made, details];
}
return { checks, forecasts, summarizeChecks };
})();
