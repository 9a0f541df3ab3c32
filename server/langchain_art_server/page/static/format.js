/** Numbers and times as people read them. */

/** @param {number} value to three significant digits; whole numbers with separators */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

/** @param {number} value with its sign */
export function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

/**
 * A mean and half the width of its interval.
 *
 * @param {number | null} mean
 * @param {number | null} half
 * @param {boolean} [change] with its sign
 */
export function withSpread(mean, half, change = false) {
  if (mean === null) return "–";
  return `${change ? signed(mean) : number(mean)}${half === null ? "" : ` ± ${number(half)}`}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${number(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** @param {number} at seconds since 1970 */
export function ago(at) {
  return `${duration(Math.max(0, Date.now() / 1000 - at))} ago`;
}

/** @param {number} count */
export function bytes(count) {
  for (const [unit, size] of /** @type {[string, number][]} */ ([
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ])) {
    if (count >= size) return `${number(count / size)} ${unit}`;
  }
  return `${count} bytes`;
}
