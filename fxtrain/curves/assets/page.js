"use strict";
(() => {
  const COLORS = 8;
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const EVAL_DASH = [4, 4];
  const HEIGHT = 240;
  // Distances between ticks of updates and rows, which are whole numbers.
  const WHOLE = Array.from({ length: 15 }, (_, i) => [1, 2, 5].map((one) => one * 10 ** i)).flat();
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 3 });

  // --- columns ---
  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Array.from({ length: bytes.length / 8 }, (_, i) => view.getFloat64(8 * i, true));
  }
  const unpacked = new Map();
  function column(curve, name) {
    if (!unpacked.has(curve)) unpacked.set(curve, {});
    const columns = unpacked.get(curve);
    return (columns[name] ??= unpack(curve[name]));
  }

  // --- what the controls say ---
  const chosen = { over: "updates", smoothing: 0, logarithmic: false, zoom: null };
  const hidden = new Set();

  /** Points of a curve, sorted by the horizontal axis; a value that is not finite is null. */
  function points(curve) {
    const start = chosen.over === "time" ? data.runs[curve.run].start : 0;
    const xs = column(curve, chosen.over);
    const ys = column(curve, "values");
    const order = [...xs.keys()].filter((i) => Number.isFinite(xs[i]));
    if (order.some((at, i) => i && xs[at] < xs[order[i - 1]])) order.sort((a, b) => xs[a] - xs[b]);
    const fits = (y) => Number.isFinite(y) && (y > 0 || !chosen.logarithmic);
    return [order.map((i) => xs[i] - start), order.map((i) => (fits(ys[i]) ? ys[i] : null))];
  }

  /** An exponential moving average without the bias of its start. */
  function smooth(values, weight) {
    let total = 0, mass = 0;
    return values.map((value) => {
      if (value === null) return null;
      total = weight * total + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return total / mass;
    });
  }

  function duration(seconds) {
    const sign = seconds < 0 ? "-" : "";
    const whole = Math.abs(seconds);
    if (whole < 60) return `${sign}${+whole.toFixed(3)} s`;
    const [h, m, s] = [whole / 3600, (whole / 60) % 60, whole % 60].map(Math.floor);
    return sign + (h ? `${h}:${String(m).padStart(2, "0")}` : m) + `:${String(s).padStart(2, "0")}`;
  }
  const position = (x) => {
    if (x === null || x === undefined) return "-";
    return chosen.over === "time" ? duration(x) : (+x.toFixed(2)).toLocaleString("en");
  };
  const number = (y) => (y === null || y === undefined ? "-" : String(+y.toPrecision(6)));

  // --- colors ---
  const style = getComputedStyle(document.documentElement);
  const token = (name) => style.getPropertyValue(name).trim();
  const color = (run) => token(`--run-${run % COLORS}`);
  const dash = (run) => DASHES[Math.floor(run / COLORS + run) % DASHES.length];
  function keys() {
    for (const key of document.querySelectorAll("svg.key")) {
      const run = Number(key.dataset.run);
      key.firstElementChild.style.stroke = color(run);
      key.firstElementChild.style.strokeDasharray = dash(run).join(" ");
    }
  }

  // --- charts ---
  const charts = data.metrics.map((metric, at) => {
    const figure = document.createElement("figure");
    const heading = document.createElement("h3");
    heading.textContent = metric.name;
    heading.id = `metric-${at}`;
    const place = document.createElement("div");
    place.className = "plot";
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-labelledby", heading.id);
    place.setAttribute("aria-describedby", "keys");
    figure.append(heading, place);
    byId("charts").append(figure);
    return { metric, figure, place, plot: null, visible: false, stale: true };
  });

  /** The horizontal range of all curves that are shown, so that charts share one axis. */
  function range() {
    if (chosen.zoom) return chosen.zoom;
    let low = Infinity, high = -Infinity;
    for (const { metric } of charts)
      for (const curve of metric.curves) {
        if (hidden.has(curve.run)) continue;
        for (const x of points(curve)[0]) {
          if (x < low) low = x;
          if (x > high) high = x;
        }
      }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }
  let shared = [0, 1];

  function nearest(plot, series, at) {
    const ys = plot.data[series];
    const filled = (i) => ys[i] !== null && ys[i] !== undefined;
    for (let away = 0; at - away >= 0 || at + away < ys.length; away++) {
      if (filled(at - away)) return at - away;
      if (filled(at + away)) return at + away;
    }
    return at;
  }

  function zoom(low, high) {
    if (!(high > low)) return;
    chosen.zoom = [low, high];
    apply();
  }
  function reset() {
    chosen.zoom = null;
    apply();
  }
  function apply() {
    shared = range();
    for (const { plot } of charts) plot?.setScale("x", { min: shared[0], max: shared[1] });
  }

  /** The vertical range: 0 to 1 where every value is 0, and else with a margin. */
  function spread(plot, low, high) {
    if (low === null || (low === 0 && high === 0)) return [0, 1];
    return uPlot.rangeNum(low, high, 0.1, true);
  }

  function axis(extra) {
    const line = { stroke: token("--grid"), width: 1 };
    return { stroke: token("--quiet"), font: "12px system-ui", grid: line, ticks: line, ...extra };
  }

  /** Evaluation is in the chart of the training metric, under its own name. */
  const isEval = (metric, curve) => curve.name !== metric.name;
  function labelOf(metric, curve) {
    const { label } = data.runs[curve.run];
    return isEval(metric, curve) ? `${label} (${curve.name})` : label;
  }

  function seriesOf(metric, curves) {
    const found = [{ label: chosen.over, value: (_, x) => position(x) }];
    for (const curve of curves) {
      const dashes = isEval(metric, curve) ? EVAL_DASH : dash(curve.run);
      const look = { stroke: color(curve.run), dash: dashes };
      const label = labelOf(metric, curve);
      if (chosen.smoothing)
        found.push({ ...look, label, width: 1, alpha: 0.25, class: "raw", points: { show: false } });
      found.push({ ...look, label, width: 2, value: (_, y) => number(y) });
    }
    return found;
  }

  function tablesOf(curves) {
    return curves.flatMap((curve) => {
      const [xs, ys] = points(curve);
      const main = [xs, chosen.smoothing ? smooth(ys, chosen.smoothing) : ys];
      return chosen.smoothing ? [[xs, ys], main] : [main];
    });
  }

  function draw(chart) {
    chart.plot?.destroy();
    chart.plot = null;
    chart.stale = false;
    const curves = chart.metric.curves.filter((curve) => !hidden.has(curve.run));
    const tables = tablesOf(curves);
    if (!tables.some(([xs]) => xs.length)) return;
    const logarithm = { distr: 3, range: (u, low, high) =>
      low === null ? [1, 10] : uPlot.rangeLog(low, high, 10, true) };
    const options = {
      width: chart.place.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: () => shared }, y: chosen.logarithmic ? logarithm : { range: spread } },
      axes: [
        axis({ values: (_, ticks) => ticks.map((x) =>
          chosen.over === "time" ? duration(x) : compact.format(x)), space: 70,
          ...(chosen.over === "time" ? {} : { incrs: WHOLE }) }),
        axis({ size: 64, values: (_, ticks) => ticks.map((y) => (y === null ? "" : number(y))) }),
      ],
      series: seriesOf(chart.metric, curves),
      cursor: {
        sync: { key: "report", setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        dataIdx: (plot, series, at) => (series ? nearest(plot, series, at) : at),
        bind: { dblclick: () => () => { reset(); return null; } },
      },
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (!width) return;
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
        }],
      },
    };
    chart.plot = new uPlot(options, uPlot.join(tables), chart.place);
    chart.plot.setScale("x", { min: shared[0], max: shared[1] });
    const canvas = chart.place.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", described(chart, curves));
  }

  function described(chart, curves) {
    const parts = curves.map((curve) => {
      const last = points(curve)[1].filter((y) => y !== null).at(-1);
      return `${labelOf(chart.metric, curve)}, last value ${number(last)}`;
    });
    return `${chart.metric.name} over ${chosen.over}: ${parts.join("; ")}`;
  }

  function redraw() {
    shared = range();
    for (const chart of charts) {
      chart.stale = true;
      if (chart.visible) draw(chart);
    }
  }

  // --- keyboard ---
  function move(chart, by) {
    const plot = chart.plot;
    const xs = plot.data[0];
    const left = plot.cursor.left;
    const now = left >= 0 ? plot.posToIdx(left) : by > 0 ? -1 : xs.length;
    const at = Math.min(Math.max(now + by, 0), xs.length - 1);
    const top = plot.over.clientHeight / 2;
    plot.setCursor({ left: plot.valToPos(xs[at], "x"), top }, true);
    const curves = chart.metric.curves.filter((curve) => !hidden.has(curve.run));
    const per = chosen.smoothing ? 2 : 1;
    const said = curves.map((curve, i) => {
      const ys = plot.data[per * (i + 1)];
      return `${labelOf(chart.metric, curve)} ${number(ys[nearest(plot, per * (i + 1), at)])}`;
    });
    byId("status").textContent = `${chosen.over} ${position(xs[at])}: ${said.join(", ")}`;
  }
  function scaled(chart, factor) {
    const [low, high] = shared;
    const left = chart.plot.cursor.left;
    const middle = left >= 0 ? chart.plot.posToVal(left, "x") : (low + high) / 2;
    zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }
  function pressed(chart, event) {
    const actions = {
      ArrowRight: () => move(chart, 1), ArrowLeft: () => move(chart, -1),
      PageDown: () => move(chart, 20), PageUp: () => move(chart, -20),
      Home: () => move(chart, -Infinity), End: () => move(chart, Infinity),
      "+": () => scaled(chart, 0.5), "=": () => scaled(chart, 0.5), "-": () => scaled(chart, 2),
      Escape: reset, 0: reset,
    };
    const plain = !(event.ctrlKey || event.metaKey || event.altKey);
    if (!plain || !chart.plot || !Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // --- controls ---
  byId("controls").hidden = byId("keys").hidden = !charts.length;
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("over").addEventListener("change", (event) => {
    chosen.over = event.target.value;
    chosen.zoom = null;
    redraw();
  });
  byId("smoothing").addEventListener("input", (event) => {
    chosen.smoothing = Number(event.target.value);
    byId("smoothed").textContent = chosen.smoothing;
    redraw();
  });
  byId("logarithmic").addEventListener("change", (event) => {
    chosen.logarithmic = event.target.checked;
    redraw();
  });
  byId("filter").addEventListener("input", (event) => {
    const part = event.target.value.toLowerCase();
    for (const { metric, figure } of charts)
      figure.hidden = ![metric, ...metric.curves].some(({ name }) =>
        name.toLowerCase().includes(part));
  });
  byId("reset").addEventListener("click", reset);
  for (const box of document.querySelectorAll("input.show"))
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(Number(box.value));
      else hidden.add(Number(box.value));
      redraw();
    });

  // --- a click on the head of a column sorts the runs, and the next one in reverse ---
  const words = new Intl.Collator("en", { numeric: true });
  /** Numbers before text; what is empty comes last in both directions. */
  function compared(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    if (Number.isFinite(x) && Number.isFinite(y)) return sign * (x - y);
    if (Number.isFinite(x) !== Number.isFinite(y)) return Number.isFinite(x) ? -1 : 1;
    return sign * words.compare(a, b);
  }
  for (const button of document.querySelectorAll("button.sort"))
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const body = head.closest("table").tBodies[0];
      const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const key = (row) => row.cells[head.cellIndex].dataset.key;
      const sign = order === "ascending" ? 1 : -1;
      body.append(...[...body.rows].sort((a, b) => compared(key(a), key(b), sign)));
    });

  // --- charts are drawn when they come near the window, and follow the width of the page ---
  const NEAR = 300;
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.figure === entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible && chart.stale) draw(chart);
    }
  }, { rootMargin: `${NEAR}px` });
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const { plot } = charts.find((one) => one.place === entry.target);
      const width = Math.floor(entry.contentRect.width);
      if (plot && width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  });
  shared = range();
  keys();
  for (const chart of charts) {
    chart.visible = chart.figure.getBoundingClientRect().top < innerHeight + NEAR;
    if (chart.visible) draw(chart);
    seen.observe(chart.figure);
    sized.observe(chart.place);
    chart.place.addEventListener("keydown", (event) => pressed(chart, event));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { keys(); redraw(); });
})();
