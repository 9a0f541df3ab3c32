/**
 * The calls of a run as the graph made them: subgraphs and nodes nested, what ran at the same time
 * side by side, attempts, interrupts and tools. It is a nested list, so that it reads without sight.
 */
import { html } from "../vendor/htm-preact.js";
import { duration } from "../format.js";
import { Badge } from "./facts.js";

/**
 * A node of the graph, a call or tools: times in seconds of the client's clock; null: not known.
 *
 * @typedef {{key: string, name: string, from: number | null, to: number | null, inside: Part[],
 *   call?: number, attempt?: number, why?: string | null, failed?: boolean, tools?: boolean}} Part
 */

/** @param {any} turn */
export function named(turn) {
  return turn.path.join(" / ") || turn.node || turn.model || "call";
}

/**
 * The parts of a run as a tree.
 *
 * @param {any[]} turns
 * @returns {Part}
 */
export function partsOf(turns) {
  const root = part("", "");
  /** @type {Map<string, Part>} */
  const known = new Map();
  /** @type {{holder: Part, above: Part}[]} of each call */
  const places = [];
  turns.forEach((turn, at) => {
    let [holder, above] = [root, root];
    const steps = stepsOf(turn);
    steps.forEach(({ key, name }, depth) => {
      const attempt = depth === steps.length - 1 ? turn.attempt : 1;
      const full = `${key}#${attempt}`;
      let inner = known.get(full);
      if (!inner) {
        inner = part(full, name);
        if (attempt > 1) inner.attempt = attempt;
        known.set(full, inner);
        holder.inside.push(inner);
      }
      [holder, above] = [inner, holder];
    });
    const from = turn.started_at;
    const to = from === null ? null : from + (turn.latency ?? 0);
    places.push({ holder, above });
    holder.inside.push({
      ...part(`call ${at}`, `call ${at + 1}`),
      from,
      to,
      call: at,
      why: turn.excluded_because,
      failed: Boolean(turn.error),
    });
  });
  turns.forEach((turn, at) => addTools(turns, turn, at, places));
  measure(root);
  root.inside = root.inside.map(folded);
  return root;
}

/** @param {string} key @param {string} name @returns {Part} */
function part(key, name) {
  return { key, name, from: null, to: null, inside: [] };
}

/**
 * The nodes around a call, outermost first. LangGraph's namespace tells branches of one node apart
 * ("team:8f|1|writer:03"); its digits count what one task started.
 *
 * @param {any} turn
 */
function stepsOf(turn) {
  /** @type {{key: string, name: string}[]} */
  const steps = [];
  const parts = turn.namespace ? turn.namespace.split("|") : [];
  parts.forEach((/** @type {string} */ one, /** @type {number} */ at) => {
    if (/^\d+$/.test(one)) return;
    steps.push({ key: parts.slice(0, at + 1).join("|"), name: one.split(":")[0] });
  });
  const path = turn.path.length ? turn.path : turn.node ? [turn.node] : [];
  const outer = path.slice(0, Math.max(0, path.length - steps.length));
  // What the path has and the namespace has not: graphs around it, or a middleware within a node.
  const within = steps.length > 0 && path[0] === steps[0].name;
  const keyed = outer.map((/** @type {string} */ _, /** @type {number} */ at) =>
    within
      ? { key: `${turn.namespace}|${path.slice(steps.length, steps.length + at + 1).join("|")}`, name: path[steps.length + at] }
      : { key: path.slice(0, at + 1).join("|"), name: path[at] },
  );
  return within ? [...steps, ...keyed] : [...keyed, ...steps];
}

/**
 * What a call asked of tools, until the call that goes on from it: when they ran is not recorded.
 *
 * @param {any[]} turns @param {any} turn @param {number} at
 * @param {{holder: Part, above: Part}[]} places
 */
function addTools(turns, turn, at, places) {
  const asked = turn.reply?.tool_calls ?? [];
  if (!asked.length || turn.excluded_because) return;
  const next = turns.findIndex((one, index) => index > at && one.extends === at && !one.excluded_because);
  const { holder, above } = places[at];
  const where = next >= 0 && places[next].holder === holder ? holder : above;
  const begun = turn.started_at === null ? null : turn.started_at + (turn.latency ?? 0);
  const ended = next < 0 || begun === null ? null : turns[next].started_at;
  where.inside.push({
    ...part(`tools ${at}`, asked.map((/** @type {any} */ one) => one.function?.name ?? "tool").join(", ")),
    from: ended === null ? null : begun,
    to: ended === null ? null : Math.max(begun, ended),
    tools: true,
  });
}

/** @param {Part} one a node lasts from its first call to its last; its parts in the order of their start */
function measure(one) {
  one.inside.forEach((inner) => inner.inside.length && measure(inner));
  const timed = one.inside.filter((inner) => inner.from !== null);
  if (!timed.length) return;
  one.from = Math.min(...timed.map((inner) => /** @type {number} */ (inner.from)));
  one.to = Math.max(...timed.map((inner) => /** @type {number} */ (inner.to)));
  one.inside.sort((a, b) => (a.from ?? Infinity) - (b.from ?? Infinity));
}

/** @param {Part} one a node of a single call is that call @returns {Part} */
function folded(one) {
  const inside = one.inside.map(folded);
  const only = inside.length === 1 ? inside[0] : null;
  if (only && only.call !== undefined && !only.attempt && !only.inside.length) {
    return { ...only, key: one.key, name: one.name, attempt: one.attempt };
  }
  return { ...one, inside };
}

/**
 * Parts in the order of their start, those that ran at the same time together.
 *
 * @param {Part[]} parts
 * @returns {Part[][]}
 */
function together(parts) {
  /** @type {Part[][]} */
  const groups = [];
  let end = -Infinity;
  for (const one of parts) {
    if (one.from !== null && one.from < end && !one.tools) groups[groups.length - 1].push(one);
    else groups.push([one]);
    end = one.from === null || one.tools ? -Infinity : Math.max(end, one.to ?? end);
  }
  return groups;
}

/** @param {{turns: any[], status: string, href: (call: number) => string}} props */
export function TimeLine({ turns, status, href }) {
  const root = partsOf(turns);
  const from = root.from ?? 0;
  const whole = (root.to ?? 0) - from || 1;
  /** @param {Part[]} parts @returns {any} */
  const list = (parts) =>
    together(parts).map((group) =>
      group.length === 1
        ? row(group[0])
        : html`<li key=${`with ${group[0].key}`} class="together">
            <span class="hint">${group.length} side by side</span>
            <ol>${group.map(row)}</ol>
          </li>`,
    );
  /** @param {Part} one */
  const row = (one) => {
    const seconds = one.from === null ? null : /** @type {number} */ (one.to) - one.from;
    const kind = one.failed ? "bad" : one.why ? "soft" : one.tools ? "tools" : one.call === undefined ? "around" : "";
    return html`<li key=${one.key}>
      <span class="part">
        <span class="part-name">
          ${one.tools && html`<span class="soft">tools </span>`}
          ${one.call === undefined ? one.name : html`<a href=${href(one.call)}>${one.name}</a>`}
          ${(one.attempt ?? 1) > 1 && html` <${Badge} kind="busy">attempt ${one.attempt}<//>`}
          ${one.failed && html` <${Badge} kind="bad">error<//>`}
          ${one.why && one.why !== "error" && html` <${Badge} kind="busy">${one.why}<//>`}
        </span>
        <span class="part-track" aria-hidden="true">
          ${seconds !== null && html`<span class=${`part-bar ${kind}`} style=${placed(one, seconds)}></span>`}
        </span>
        <span class="part-seconds">
          ${seconds === null
            ? html`<span class="unseen">time not known</span>`
            : html`${one.tools && html`<span title="Until the next call began: when tools ran is not recorded.">≤ </span>`}${duration(seconds)}
                <span class="unseen">, from ${duration(/** @type {number} */ (one.from) - from)} on</span>`}
        </span>
      </span>
      ${one.inside.length > 0 && html`<ol>${list(one.inside)}</ol>`}
    </li>`;
  };
  /** @param {Part} one @param {number} seconds */
  const placed = (one, seconds) => ({
    "margin-left": `${Math.min(99.4, (100 * (/** @type {number} */ (one.from) - from)) / whole)}%`,
    width: `${Math.max(0.6, (100 * seconds) / whole)}%`,
  });
  return html`<ol class="timeline" aria-label="Time line of the run">
    ${list(root.inside)}
    ${status === "interrupted" &&
    html`<li key="waits"><${Badge} kind="busy">interrupted<//> <span class="soft">The graph waits to be resumed.</span></li>`}
  </ol>`;
}
