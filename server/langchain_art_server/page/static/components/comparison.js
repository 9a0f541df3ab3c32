/** Two versions compared on held-out scenarios: which is better, on which, at what cost. */
import { html, useState } from "../vendor/htm-preact.js";
import { withQuery } from "../api.js";
import { Badge, Fact, Table } from "./facts.js";
import { Empty, Failed, useAnswer, Waiting } from "./states.js";
import { duration, number, signed, withSpread } from "../format.js";
import { link } from "../router.js";

const HELD_OUT = "Scenarios that no training step learns from: what a version does on them is what it has learned.";
const INTERVAL = "The 95 % interval: with other scenarios of the same kind, the difference would most likely lie in it.";
const CHANCE = "How likely chance alone would give a difference as large as this. Below 0.05 it is called significant.";

/** The policies' versions that an evaluation was of. @param {any} one */
const partsOf = (one) => one.versions.split(" + ");

/**
 * @param {{policy: string, evaluations: any[], query: URLSearchParams}} props
 */
export function Compare({ policy, evaluations, query }) {
  const mine = evaluations.filter((one) =>
    partsOf(one).some((/** @type {string} */ part) => part.split("@")[0] === policy),
  );
  const [before, after] = ["before", "after"].map((name) => query.get(name));
  return html`<section class="compare" aria-labelledby="compare">
    <h2 id="compare">Compare two versions</h2>
    ${evaluations.length < 2 || !mine.length
      ? html`<${Empty}
          title="Fewer than two versions were evaluated"
          command="Trainer(...).fit(scenarios, eval_scenarios=held_out)"
        >
          Versions are compared on held-out scenarios, which no training step learns from. A fit
          that is given some runs them before its first step and after its last:
        <//>`
      : html`<${Choose} key=${query.toString()} policy=${policy} mine=${mine} all=${evaluations} query=${query} />`}
    ${before && after && html`<${Compared} before=${before} after=${after} />`}
  </section>`;
}

/** @param {{policy: string, mine: any[], all: any[], query: URLSearchParams}} props */
function Choose({ policy, mine, all, query }) {
  const [chosen, setChosen] = useState(/** @type {Record<string, string>} */ ({}));
  const others = all.filter((one) => !mine.includes(one));
  // What was chosen stays; until then, it is the first and the last that were evaluated.
  const last = mine[mine.length - 1];
  const first = [...mine, ...others].find((one) => one !== last);
  const before = chosen.before ?? query.get("before") ?? first.versions;
  const after = chosen.after ?? query.get("after") ?? last.versions;
  /** @param {Event} event */
  const apply = (event) => {
    event.preventDefault();
    location.hash = link("versions", [policy], { before, after });
  };
  /** @param {string} name @param {string} title @param {string} value */
  const choice = (name, title, value) =>
    html`<div>
      <label for=${`compare-${name}`}>${title}</label>
      <select
        id=${`compare-${name}`}
        value=${value}
        onChange=${(/** @type {any} */ event) => setChosen({ ...chosen, [name]: event.target.value })}
      >
        ${[...mine, ...others].map(
          (one) => html`<option key=${one.versions} value=${one.versions}>${one.versions}</option>`,
        )}
      </select>
    </div>`;
  return html`<form class="card row compare-form" onSubmit=${apply} aria-label="Compare two versions">
    ${choice("before", "Before", before)} ${choice("after", "After", after)}
    <button type="submit" disabled=${before === after}>Compare</button>
  </form>`;
}

/** @param {{before: string, after: string}} props */
function Compared({ before, after }) {
  // Asked once for an address: the test of the difference takes the server up to seconds.
  const { data, error } = useAnswer(withQuery("/page/comparison", { before, after }));
  if (error) return html`<${Failed} error=${error} />`;
  if (!data || data.before.versions !== before || data.after.versions !== after) {
    return html`<${Waiting} />`;
  }
  return html`<${Verdict} data=${data} />
    <p><a class="button quiet" href=${link("review", ["blind"], { before, after })}>Compare their runs blind</a></p>
    <${Scenarios} data=${data} /> <${Nodes} data=${data} />`;
}

/** @param {{data: any}} props */
function Verdict({ data }) {
  const { comparison: found, before, after } = data;
  if (!found) {
    const lacking = (before.runs ? after : before).versions;
    return html`<p class="notice">
      No held-out run of ${lacking} has a reward, so there is nothing to compare.
    </p>`;
  }
  const clear = found.p_value < 0.05;
  const better = found.difference > 0;
  const said = !clear ? "No clear difference" : better ? "Better" : "Worse";
  return html`<div class="card" role="region" aria-label="Difference">
    <p>
      <${Badge} kind=${!clear ? "" : better ? "good" : "bad"}>${said}<//>${" "}
      <strong>${after.versions}</strong> against <strong>${before.versions}</strong>${" "}
      ${found.paired
        ? `on the same ${found.scenarios} held-out scenarios`
        : "on different scenarios: they share fewer than two, so nothing is paired"}${found.left_out
        ? `; ${found.left_out} that only one of them ran are left out`
        : ""}.
    </p>
    <div class="facts">
      <${Fact} name="Difference" value=${withSpread(found.difference, found.ci95, true)} help=${INTERVAL} />
      <${Fact} name="Chance" value=${`p = ${number(found.p_value)}`} help=${`${CHANCE} By the ${found.test}.`} />
      ${found.paired &&
      html`<${Fact} name="Wins" value=${data.wins} help="Scenarios in which the mean reward rose." />
        <${Fact} name="Losses" value=${data.losses} help="Scenarios in which it fell." bad=${data.losses > data.wins} />
        <${Fact} name="Ties" value=${data.ties} />`}
      <${Fact} name="Before" value=${withSpread(before.mean, before.ci95)} unit=${runsOf(before)} help=${HELD_OUT} />
      <${Fact} name="After" value=${withSpread(after.mean, after.ci95)} unit=${runsOf(after)} />
    </div>
  </div>`;
}

/** @param {any} side */
const runsOf = (side) => `${side.runs} runs${side.failed ? `, ${side.failed} failed` : ""}`;

/** @param {{data: any}} props */
function Scenarios({ data }) {
  if (!data.scenarios.length) return null;
  const all = data.wins + data.losses + data.ties;
  /** @param {any} row @param {string} side */
  const cell = (row, side) => {
    const runs = row[`${side}_runs`];
    const links = runs.map(
      (/** @type {string} */ id, /** @type {number} */ i) =>
        html`${" "}<a
            key=${id}
            href=${link("runs", [id])}
            aria-label=${`${number(row[side])}: run ${i + 1} of ${row.scenario}, ${data[side].versions}`}
            >${runs.length > 1 ? i + 1 : number(row[side])}</a
          >`,
    );
    return runs.length > 1 ? html`${number(row[side])} <span class="hint">runs${links}</span>` : links;
  };
  return html`<div>
    <h3>By scenario</h3>
    <${Table}
      label="By scenario"
      rows=${data.scenarios}
      id=${(/** @type {any} */ row) => row.scenario}
      columns=${[
        { title: "Scenario", cell: (/** @type {any} */ row) => row.scenario },
        { title: "Before", help: "Mean reward, and the runs that it is of.", number: true, cell: (/** @type {any} */ row) => cell(row, "before") },
        { title: "After", number: true, cell: (/** @type {any} */ row) => cell(row, "after") },
        { title: "Difference", number: true, cell: (/** @type {any} */ row) => signed(row.difference) },
        {
          title: "Result",
          cell: (/** @type {any} */ row) =>
            row.difference > 1e-12
              ? html`<${Badge} kind="good">won<//>`
              : row.difference < -1e-12
                ? html`<${Badge} kind="bad">lost<//>`
                : html`<${Badge}>tie<//>`,
        },
      ]}
    />
    ${all > data.scenarios.length &&
    html`<p class="hint">The ${data.scenarios.length} scenarios that differ most, of ${all}.</p>`}
  </div>`;
}

/** @param {{data: any}} props */
function Nodes({ data }) {
  if (!data.nodes.length) return null;
  const { before, after } = data;
  /**
   * @param {(node: any, runs: number) => number | null} of
   * @param {(value: number) => string} [say]
   */
  const both =
    (of, say = number) =>
    (/** @type {any} */ row) => {
      const [old, now] = [
        row.before && of(row.before, before.counted),
        row.after && of(row.after, after.counted),
      ].map((value) => (value === null ? "–" : say(value)));
      return `${old} → ${now}`;
    };
  const dollars = (/** @type {number} */ value) => `$${Number(value.toPrecision(3))}`;
  const priced = [before, after].some((one) => one.cost_usd !== null);
  return html`<div>
    <h3>By node, before → after</h3>
    <${Table}
      label="By node, before → after"
      rows=${data.nodes}
      id=${(/** @type {any} */ row) => `${row.node} ${row.model}`}
      columns=${[
        { title: "Node", cell: (/** @type {any} */ row) => html`<code>${row.node}</code>` },
        { title: "Model", cell: (/** @type {any} */ row) => row.model },
        { title: "Calls a run", number: true, cell: both((one, runs) => one.calls / runs) },
        { title: "Tokens read a call", help: "Of the prompt.", number: true, cell: both((one) => one.prompt_tokens / one.calls) },
        { title: "Tokens sampled a call", help: "Of the reply.", number: true, cell: both((one) => one.completion_tokens / one.calls) },
        { title: "Median latency", help: "Half of the calls took less, by the client's clock.", number: true, cell: both((one) => one.latency_p50, duration) },
        { title: "95 % latency", help: "95 of 100 calls took less.", number: true, cell: both((one) => one.latency_p95, duration) },
        ...(priced
          ? [{ title: "Cost a run", help: "US dollars: list prices of hosted models, and this server's time at its gpu_rate.", number: true, cell: both((one, runs) => (one.cost_usd === null ? null : one.cost_usd / runs), dollars) }]
          : []),
      ]}
    />
    <p class="hint">
      Of the newest ${before.counted} and ${after.counted} runs.
      ${!priced && "No cost is known: set gpu_rate below [page] in the server's settings (US dollars an hour)."}
    </p>
    ${data.notes.map((/** @type {string} */ one) => html`<p class="hint" key=${one}>${one}</p>`)}
  </div>`;
}
