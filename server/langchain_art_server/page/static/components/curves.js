/** Curves over steps, drawn by uPlot. What they show is said in words, too. */
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { number, withSpread } from "../format.js";
import { Help } from "./facts.js";

/** Colours of the page's tokens, then the same ones dashed. */
const COLOURS = ["--curve-1", "--curve-2", "--curve-3", "--curve-4"];
export const MOST_CURVES = 2 * COLOURS.length;

/**
 * A step, a value, and half the width of the value's interval, where it has one.
 *
 * @typedef {[number, number] | [number, number, number | null]} Point
 * @typedef {{label: string, points: Point[]}} Line
 */

/**
 * @param {{title: string, help: string, lines: Line[]}} props
 */
export function Curve({ title, help, lines }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const shape = lines.map((one) => one.label).join("\n");
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const draw = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(element, () => now.current), merged(now.current), element);
    };
    // A curve below the window is drawn when it is scrolled to, and each in a task of its own: the
    // first is there before the others are drawn.
    let task = 0;
    const seen = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        seen.disconnect();
        task = window.setTimeout(draw);
        dark.addEventListener("change", draw);
      },
      { rootMargin: "200px" },
    );
    seen.observe(element);
    const resized = new ResizeObserver(() =>
      chart.current?.setSize({ width: element.clientWidth, height: 170 }),
    );
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    return () => {
      seen.disconnect();
      clearTimeout(task);
      resized.disconnect();
      dark.removeEventListener("change", draw);
      chart.current?.destroy();
      chart.current = null;
    };
  }, [shape]);
  const now = useRef(lines);
  now.current = lines;
  useEffect(() => chart.current?.setData(merged(lines)), [lines]);
  const said = lines
    .filter((one) => one.points.length)
    .map((one) => {
      const [step, value, half] = one.points[one.points.length - 1];
      return `${one.label}: ${withSpread(value, half ?? null)} at step ${step}`;
    });
  return html`<figure class="card curve-card">
    <figcaption class="row spread">
      <h3>${title} <${Help} text=${help} /></h3>
      <span class="soft num">${lines.length === 1 ? number(last(lines[0])) : ""}</span>
    </figcaption>
    <div class="curve" ref=${place} role="img" aria-label=${`${title}. ${said.join("; ")}`}></div>
  </figure>`;
}

/** @param {{labels: string[]}} props */
export function Legend({ labels }) {
  return html`<ul class="legend">
    ${labels.map(
      (label, i) =>
        html`<li key=${label}>
          <span class=${`swatch curve-${i % COLOURS.length}${i >= COLOURS.length ? " dashed" : ""}`}></span
          >${label}
        </li>`,
    )}
  </ul>`;
}

/** @param {Line} line */
const last = (line) => line.points[line.points.length - 1]?.[1] ?? NaN;

/**
 * One x for all lines, and null where a line has no point.
 *
 * @param {Line[]} lines
 * @returns {any}
 */
function merged(lines) {
  const steps = [...new Set(lines.flatMap((one) => one.points.map((point) => point[0])))];
  steps.sort((a, b) => a - b);
  const known = lines.map((one) => new Map(one.points.map(([step, value]) => [step, value])));
  return [steps, ...known.map((points) => steps.map((step) => points.get(step) ?? null))];
}

/** What a token is here and now: light or dark. @param {HTMLElement} at @param {string} token */
function colour(at, token) {
  const probe = document.createElement("i");
  probe.style.color = `var(${token})`;
  at.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/**
 * The limits of the values, with their intervals.
 *
 * @param {Line[]} lines
 * @returns {uPlot.Range.MinMax}
 */
function limits(lines) {
  const ends = lines.flatMap((one) =>
    one.points.flatMap(([, value, half]) => [value - (half ?? 0), value + (half ?? 0)]),
  );
  if (!ends.length) return [0, 1];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  if (high > low) return uPlot.rangeNum(low, high, 0.1, true);
  // Of one value, uPlot would show all from 1 below it to 1 above it; of zero, 0 to 100.
  const around = Math.abs(low) / 10;
  return low ? [low - around, low + around] : [0, 1];
}

/**
 * Draws each value's interval as a bar through its point.
 *
 * @param {uPlot} plot
 * @param {Line[]} lines
 * @param {string[]} colours
 */
function drawIntervals(plot, lines, colours) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  const arm = 4 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - arm, top, width + 2 * arm, height);
  ctx.clip();
  ctx.lineWidth = devicePixelRatio;
  lines.forEach((line, i) => {
    ctx.strokeStyle = colours[i];
    for (const [step, value, half] of line.points) {
      if (!half) continue;
      const x = plot.valToPos(step, "x", true);
      const [low, high] = [value - half, value + half].map((end) => plot.valToPos(end, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, low);
      ctx.lineTo(x, high);
      for (const y of [low, high]) {
        ctx.moveTo(x - arm, y);
        ctx.lineTo(x + arm, y);
      }
      ctx.stroke();
    }
  });
  ctx.restore();
}

/**
 * @param {HTMLElement} element
 * @param {() => Line[]} now the lines that are drawn now
 * @returns {uPlot.Options}
 */
function options(element, now) {
  const lines = now();
  const colours = lines.map((_, i) => colour(element, COLOURS[i % COLOURS.length]));
  const [ink, line] = [colour(element, "--ink-soft"), colour(element, "--line")];
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const whole = (/** @type {uPlot} */ _plot, /** @type {number[]} */ values) =>
    values.map((value) => (Number.isInteger(value) ? String(value) : ""));
  const short = (/** @type {uPlot} */ _plot, /** @type {number[]} */ values) => 
    values.map((value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : number(value)));
  return {
    width: element.clientWidth,
    height: 170,
    legend: { show: false },
    cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: () => limits(now()) } },
    hooks: { draw: [(plot) => drawIntervals(plot, now(), colours)] },
    axes: [
      { ...axis, values: whole, size: 30 },
      { ...axis, values: short, size: 64 },
    ],
    series: [
      {},
      ...lines.map((one, i) => ({
        label: one.label,
        stroke: colours[i],
        dash: i >= COLOURS.length ? [6, 4] : undefined,
        width: 2,
        spanGaps: true,
        points: { show: one.points.length < 40, size: 5 },
      })),
    ],
  };
}
