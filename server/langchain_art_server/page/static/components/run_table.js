/** A table of runs (`RunSummary`), each of which leads to its own page. */
import { html } from "../vendor/htm-preact.js";
import { duration, number } from "../format.js";
import { link } from "../router.js";
import { Ago, Badge, Table } from "./facts.js";

const STATUS = /** @type {Record<string, any>} */ ({ completed: "good", failed: "bad" });

/** @param {Record<string, string>} query of the runs' own pages */
const columnsOf = (query) => [
  {
    title: "Run",
    cell: (/** @type {any} */ run) =>
      html`<a href=${link("runs", [run.id], query)} class="run-id">${run.id}</a>
        <div class="hint clipped">${run.asked}</div>
        <div class="hint clipped">${run.error ? html`<${Badge} kind="bad">error<//> ${run.error}` : run.said}</div>`,
  },
  {
    title: "Scenario",
    cell: (/** @type {any} */ run) =>
      html`<a href=${link("runs", [run.id, "siblings"])} title="Its siblings side by side"
        >${run.scenario ?? "siblings"}</a
      >`,
  },
  {
    title: "Reward",
    help: "The run's own reward and those of its calls. – means not scored, which is not zero.",
    number: true,
    cell: (/** @type {any} */ run) => (run.reward === null ? "–" : number(run.reward)),
  },
  {
    title: "Scores",
    cell: (/** @type {any} */ run) =>
      Object.entries(run.scores).map(([name, value]) => html`<div>${name} ${number(value)}</div>`),
  },
  {
    title: "Status",
    cell: (/** @type {any} */ run) =>
      html`<${Badge} kind=${STATUS[run.status] ?? "busy"}>${run.status}<//>
        ${run.reviews > 0 && html` <${Badge}>reviewed<//>`}
        ${Object.keys(run.trained_by).length > 0 && html` <${Badge}>trained<//>`}`,
  },
  { title: "Calls", number: true, cell: (/** @type {any} */ run) => number(run.calls) },
  {
    title: "Tokens",
    help: "Sampled by models, as far as they said.",
    number: true,
    cell: (/** @type {any} */ run) => number(run.tokens),
  },
  {
    title: "Took",
    number: true,
    cell: (/** @type {any} */ run) => (run.seconds === null ? "–" : duration(run.seconds)),
  },
  { title: "Versions", cell: (/** @type {any} */ run) => run.versions.join(", ") },
  { title: "Stored", cell: (/** @type {any} */ run) => html`<${Ago} at=${run.created_at} />` },
];

/** What a review of a run will do (`VerdictFate`); any other fate is shown as it is. */
const FORESEEN = /** @type {Record<string, string>} */ ({
  trains: "trains",
  disagreement: "decides: two reviewers disagree",
  held_out: "measures: held out",
  stale: "not by a reward: too old",
  rolled_back: "not by a reward: rolled back",
  no_scenario: "not by a reward: no scenario",
  other_model: "nothing: no policy of this server",
  untrainable: "nothing: no trainable call",
});

/** @param {{runs: any[], foreseen?: Record<string, string>, query?: Record<string, string>}} props */
export function RunTable({ runs, foreseen, query = {} }) {
  const columns = foreseen
    ? [
        ...columnsOf(query),
        { title: "A review", cell: (/** @type {any} */ run) => FORESEEN[foreseen[run.id] ?? ""] ?? foreseen[run.id] ?? "–" },
      ]
    : columnsOf(query);
  return html`<${Table} label="Runs" columns=${columns} rows=${runs} id=${(/** @type {any} */ run) => run.id} />`;
}
