// Charts, drawn by uPlot. Each says in words what it shows and has its numbers as a table beside it.
import { count, real, timeOfDay } from "./format.js";
import { html, uPlot, useEffect, useRef, useState } from "./lib.js";
import { useStore } from "./store.js";
import { colour, theme } from "./theme.js";
import { Table } from "./ui.js";

const HEIGHT = 180;

/** Keeps a uPlot in an element: made anew when its shape or the theme changes, else only given new numbers. */
function Plot({ shape, options, data }) {
  const place = useRef(null), plot = useRef(null);
  const shade = useStore(theme);
  useEffect(() => {
    const width = () => Math.max(200, place.current.clientWidth);
    plot.current = new uPlot({ width: width(), height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false, y: false } }, ...options(colour) }, data, place.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: width(), height: HEIGHT }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [shape, shade]);
  useEffect(() => plot.current.setData(data), [data]);
  return html`<div class="plot" ref=${place} aria-hidden="true"></div>`;
}

function axes(colours, more = {}) {
  const axis = { stroke: colours("--muted"), grid: { stroke: colours("--line"), width: 1 }, ticks: { stroke: colours("--line"), width: 1 }, font: "11px system-ui" };
  return [{ ...axis, size: 30, ...more.x }, { ...axis, size: 46, ...more.y }];
}

/** The numbers of a chart, for those who do not see it or want them exactly. */
function Numbers({ label, columns, rows }) {
  const [open, setOpen] = useState(false);
  return html`<details class="numbers" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${label} as a table</summary>
    ${open && html`<${Table} label=${label} columns=${columns.map((name) => [name, "n"])} rows=${rows.map((row) => html`<tr>${row.map((cell) => html`<td class="n">${cell}</td>`)}</tr>`)} />`}
  </details>`;
}

const LINES = [
  ["arrived", "Arrived", "--c1", []],
  ["rewarded", "Rewarded", "--c2", [6, 3]],
  ["reserved", "Reserved", "--c3", [2, 3]],
  ["consumed", "Consumed", "--c4", [10, 3, 2, 3]],
];

/** Rollouts per minute over the window. */
export function FlowChart({ statistics }) {
  const perMinute = 60 / statistics.bucket_seconds;
  const buckets = statistics.buckets.slice(0, -1); // the last one is not over yet
  const times = buckets.map((bucket) => Date.parse(bucket.begin) / 1000);
  const data = [times, ...LINES.map(([field]) => buckets.map((bucket) => bucket[field] * perMinute))];
  const options = (colours) => ({
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    axes: axes(colours, { x: { values: (_, ticks) => ticks.map((tick) => timeOfDay(tick * 1000).slice(0, 5)), space: 60 } }),
    scales: { y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.1] } },
    series: [{}, ...LINES.map(([, label, name, dash]) => ({ label, stroke: colours(name), width: 2, dash, points: { show: false } }))],
  });
  return html`<figure class="chart">
    <figcaption>Rollouts per minute, UTC
      <ul class="legend">${LINES.map(([, label, name, dash]) => html`<li><svg width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" class="line ${name.slice(2)}" stroke-dasharray=${dash.join(" ")} /></svg>${label}</li>`)}</ul>
    </figcaption>
    <${Plot} shape=${`flow ${statistics.buckets.length}`} options=${options} data=${data} />
    <${Numbers} label="The flow" columns=${["From (UTC)", ...LINES.map(([, label]) => label)]} rows=${buckets.map((bucket) => [timeOfDay(bucket.begin), ...LINES.map(([field]) => count(bucket[field]))])} />
  </figure>`;
}

/** Bars with the limit as a line. bars: [label, n]; limit: after so many bars, with the text beside it. */
export function Histogram({ label, unit, bars, limit, limitText }) {
  const data = [bars.map((_, number) => number + 0.5), bars.map(([, n]) => n)];
  const options = (colours, bad = colours("--bad")) => ({
    axes: axes(colours, {
      x: { splits: () => bars.map((_, number) => number + (unit === "drift" ? 0 : 0.5)), values: (_, splits) => splits.map((_, number) => (unit !== "drift" || number % 5 === 0 ? bars[number][0] : "")), grid: { show: false } },
      y: { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? count(tick) : "")) },
    }),
    scales: { x: { time: false, range: [0, bars.length] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.15] } },
    series: [{}, { label, fill: colours("--c1"), stroke: colours("--c1"), paths: uPlot.paths.bars({ size: [0.86, 60] }), points: { show: false } }],
    hooks: {
      draw: [
        (plot) => {
          const x = plot.valToPos(limit, "x", true), { top, height } = plot.bbox, pen = plot.ctx;
          pen.save();
          pen.strokeStyle = pen.fillStyle = bad;
          pen.lineWidth = 2 * devicePixelRatio;
          pen.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
          pen.beginPath();
          pen.moveTo(x, top);
          pen.lineTo(x, top + height);
          pen.stroke();
          pen.font = `${11 * devicePixelRatio}px system-ui`;
          pen.textAlign = limit > bars.length / 2 ? "right" : "left";
          pen.fillText(limitText, x + (limit > bars.length / 2 ? -6 : 6) * devicePixelRatio, top + 12 * devicePixelRatio);
          pen.restore();
        },
      ],
    },
  });
  return html`<figure class="chart">
    <figcaption>${label}</figcaption>
    <${Plot} shape=${`${label} ${bars.map(([name]) => name)} ${limitText}`} options=${options} data=${data} />
    <${Numbers} label=${label} columns=${[unit === "drift" ? "From" : "Lag", "Rollouts"]} rows=${bars.map(([name, n]) => [name, count(n)])} />
  </figure>`;
}

/** Sums of several versions: what was judged at each lag, and in each bin of drift. */
export function summed(statistics, versions) {
  const lags = {};
  const drifts = statistics.drift_edges.map(() => 0);
  for (const version of versions) {
    for (const [lag, n] of Object.entries(version.lags)) lags[lag] = (lags[lag] ?? 0) + n;
    version.drifts.forEach((n, bin) => (drifts[bin] += n));
  }
  const known = Object.keys(lags).map(Number);
  const last = Math.min(Math.max(statistics.max_lag + 1, ...known), statistics.max_lag + 8);
  const first = Math.min(0, ...known);
  const lagBars = [];
  for (let lag = first; lag <= last; lag += 1) lagBars.push([String(lag), lags[lag] ?? 0]);
  const beyond = known.filter((lag) => lag > last).reduce((sum, lag) => sum + lags[lag], 0);
  if (beyond) lagBars.push([`>${last}`, beyond]);
  return {
    lags: lagBars,
    lagLimit: statistics.max_lag - first + 1,
    drifts: drifts.map((n, bin) => [real(statistics.drift_edges[bin]), n]),
    driftLimit: statistics.drift_edges.findIndex((edge) => Math.abs(edge - statistics.max_drift) < 1e-9 * Math.max(1, edge)),
  };
}
