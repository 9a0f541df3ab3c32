/** The runs: a table that is filtered, sorted and read by cursor; below it, one run or its siblings. */
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ask, withQuery } from "../api.js";
import { Ago, Badge, Help, Table } from "../components/facts.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { RunTable } from "../components/run_table.js";
import { duration, number } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** What the address may say of a list, as `RunsQuery` on the server. */
const FIELDS = [
  ["policy", "Policy", "policies"],
  ["version", "Version", "versions"],
  ["node", "Node", "nodes"],
  ["scenario", "Scenario", ""],
  ["step", "Learned by step", ""],
  ["reward_min", "Reward at least", ""],
  ["reward_max", "Reward at most", ""],
  ["score", "Score", "scores"],
  ["score_min", "Score at least", ""],
  ["text", "Words", ""],
];
const NUMBERS = ["step", "reward_min", "reward_max", "score_min"];
const ORDERS = [
  ["", "Newest first"],
  ["number up", "Oldest first"],
  ["reward", "Highest reward first"],
  ["reward up", "Lowest reward first"],
  ["score", "Highest score first"],
  ["tokens", "Most tokens first"],
  ["calls", "Most calls first"],
  ["seconds", "Slowest first"],
];

/** @param {{path: string[], query: URLSearchParams}} props */
export default function Runs({ path, query }) {
  const [part, setPart] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const kind = path[1] === "siblings" ? "siblings" : path[0] ? "run" : "";
  useEffect(() => {
    if (!kind) return;
    const loaded = kind === "run" ? import("./run.js") : import("./siblings.js");
    loaded.then((module) => setPart({ kind, view: module.default }), setError);
  }, [kind]);
  if (!kind) return html`<${List} query=${query} />`;
  if (error) return html`<${Failed} error=${error} />`;
  if (part?.kind !== kind) return html`<${Waiting} />`;
  return html`<${part.view} key=${path[0]} id=${path[0]} query=${query} />`;
}

/** @param {{query: URLSearchParams}} props */
function List({ query }) {
  const asked = Object.fromEntries(query);
  const [sort, up] = (asked.order ?? "").split(" ");
  const { order: _, ...which } = asked;
  const path = withQuery("/page/runs", { ...which, sort, descending: up ? "false" : "" });
  const live = useLive("runs", "rewards", "reviews", "jobs");
  const [more, setMore] = useState({ path, live, runs: [], next: null, error: null });
  const further = more.path === path ? more : { live, runs: [], next: null, error: null };
  // Once further pages are shown the first one stays, or runs between the two would be missed.
  const { data, error } = useAnswer(path, further.runs.length ? further.live : live);
  const names = useAnswer("/page/run-names").data;
  const next = further.runs.length ? further.next : (data?.next ?? null);
  const read = () =>
    ask(withQuery(path, { after: next })).then(
      (page) => setMore({ path, live: further.runs.length ? further.live : live, runs: further.runs.concat(page.runs), next: page.next, error: null }),
      (failure) => setMore({ ...further, path, error: failure }),
    );
  const runs = data ? [...data.runs, ...further.runs] : [];
  return html`
    <div class="row spread">
      <h1>Runs</h1>
      ${names && html`<span class="soft">${names.runs.toLocaleString("en")} stored</span>`}
    </div>
    <${Filters} key=${path} asked=${asked} names=${names} />
    ${error && html`<${Failed} error=${error} />`}
    ${!data && !error && html`<${Waiting} />`}
    ${data && !runs.length && html`<${Nothing} stored=${names?.runs ?? 0} />`}
    ${!Object.keys(which).length && html`<${OpenRuns} />`}
    ${runs.length > 0 && html`<${RunTable} runs=${runs} />`}
    ${further.error && html`<${Failed} error=${further.error} />`}
    ${next && html`<button class="quiet" onClick=${read}>Show more runs</button>`}
  `;
}

/** Runs of which the server has calls and no more. */
function OpenRuns() {
  const runs = useAnswer("/page/open-runs", useLive("calls", "runs")).data?.runs ?? [];
  if (!runs.length) return null;
  return html`<section aria-labelledby="open-runs">
    <h2 id="open-runs">
      Running ${" "}<${Help}
        text="Runs with a call in the last 10 minutes that are not stored yet. They still run, wait for others of their group or step, or were not sent. In a fit, a run is stored when its step is trained."
      />
    </h2>
    <${Table}
      label="Running"
      rows=${runs}
      id=${(/** @type {any} */ run) => run.id}
      columns=${[
        { title: "Run", cell: (/** @type {any} */ run) => html`<a href=${link("runs", [run.id])} class="run-id">${run.id}</a>` },
        { title: "Scenario", cell: (/** @type {any} */ run) => run.scenario ?? "–" },
        { title: "Status", cell: () => html`<${Badge} kind="busy">running<//>` },
        { title: "Last node", cell: (/** @type {any} */ run) => run.node ?? "–" },
        { title: "Calls", number: true, cell: (/** @type {any} */ run) => number(run.calls) },
        { title: "Tokens", number: true, cell: (/** @type {any} */ run) => number(run.tokens) },
        { title: "Took so far", number: true, cell: (/** @type {any} */ run) => duration(run.seconds) },
        { title: "Versions", cell: (/** @type {any} */ run) => run.models.join(", ") },
        { title: "Last call", cell: (/** @type {any} */ run) => html`<${Ago} at=${run.last_at} />` },
      ]}
    />
  </section>`;
}

/** @param {{stored: number}} props */
function Nothing({ stored }) {
  if (stored) return html`<${Empty} title="No run is as you ask">Take a filter away.<//>`;
  return html`<${Empty}
    title="No runs yet"
    command=${'with capture(scenario="q-1") as run:\n    graph.invoke(...)\nclient.add_group([run])'}
  >
    A run appears when a graph that was captured has ended, in a fit or in your own program.
  <//>`;
}

/**
 * What is typed stays when the list is read anew: the form is made again for another address only.
 *
 * @param {{asked: Record<string, string>, names: any}} props
 */
function Filters({ asked, names }) {
  const [wrong, setWrong] = useState("");
  /** @param {Event} event */
  const apply = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget));
    const known = [...form].filter(([, value]) => value !== "");
    const query = Object.fromEntries(known.map(([name, value]) => [name, String(value)]));
    const odd = NUMBERS.find((name) => query[name] && Number.isNaN(Number(query[name])));
    const score = query.order === "score" || query.score_min;
    if (odd) setWrong(`got “${query[odd]}”, expected a number`);
    else if (score && !query.score) setWrong("Name the score, too.");
    else {
      setWrong("");
      location.hash = link("runs", [], query);
    }
  };
  /** @param {string} name @param {string} title @param {string[][]} options */
  const choice = (name, title, options) =>
    html`<div>
      <label for=${`by-${name}`}>${title}</label>
      <select id=${`by-${name}`} name=${name}>
        ${options.map(
          ([value, said]) =>
            html`<option value=${value} selected=${value === (asked[name] ?? "")}>${said}</option>`,
        )}
      </select>
    </div>`;
  const [open] = useState(Object.keys(asked).length > 0 || matchMedia("(min-width: 60rem)").matches);
  return html`<details class="card" open=${open}>
    <summary>Filters and order</summary>
    <form class="run-filters" onSubmit=${apply} aria-label="Filter runs">
    ${FIELDS.map(
      ([name, title, list]) =>
        html`<div>
          <label for=${`by-${name}`}>${title}</label>
          <input
            id=${`by-${name}`}
            name=${name}
            defaultValue=${asked[name] ?? ""}
            list=${list ? `names-${list}` : undefined}
            inputmode=${NUMBERS.includes(name) ? "decimal" : undefined}
            placeholder=${name === "text" ? "refund or refun*" : undefined}
          />
          ${list &&
          html`<datalist id=${`names-${list}`}>
            ${(names?.[list] ?? []).slice(0, 200).map((/** @type {string} */ one) => html`<option value=${one} />`)}
          </datalist>`}
        </div>`,
    )}
    ${choice("status", "Status", [
      ["", "Any"],
      ...["completed", "failed", "interrupted", "truncated"].map((one) => [one, one]),
    ])}
    ${choice("reviewed", "Reviewed", [
      ["", "Any"],
      ["true", "by a person"],
      ["false", "not yet"],
    ])}
    ${choice("order", "Order", ORDERS)}
    <div class="row">
      <button type="submit">Filter</button>
      <a class="button quiet" href=${link("runs")}>Clear</a>
    </div>
    ${wrong && html`<p class="notice bad" role="alert">${wrong}</p>`}
    </form>
  </details>`;
}
