/** The jobs, and what each node of the graph learned from: `#/jobs`, and `#/jobs/JOB` for one. */
import { html } from "../vendor/htm-preact.js";
import { Curve, Legend, MOST_CURVES } from "../components/curves.js";
import { Ago, Badge, Fact, PolicyLinks, Table } from "../components/facts.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { duration, number } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** @type {Record<string, "good" | "bad" | "busy" | "">} */
const KINDS = { succeeded: "good", failed: "bad", running: "busy", queued: "", cancelled: "" };
/** What a node's numbers mean. */
const TOKENS = "Sampled tokens of this node that the step learned from.";
const MEAN = "Above 0, what the node did was on average made more likely; below 0, less.";
const STRENGTH = "How strongly the node was pushed, whichever way: 0 means that it learned nothing.";

/** @param {import("../router.js").Place} props */
export default function Jobs({ path, query }) {
  return path[0]
    ? html`<${Job} key=${path[0]} id=${path[0]} />`
    : html`<${All} wanted=${query.get("policy")} />`;
}

/** @param {{wanted: string | null}} props */
function All({ wanted }) {
  const { data, error } = useAnswer("/page/jobs", useLive("jobs", "event"));
  if (error && !data) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  if (!data.jobs.length) {
    return html`<h1>Jobs</h1>
      <${Empty} title="No job has been sent yet" command="Trainer(...).fit(scenarios)">
        A job is one step of training. A fit sends one for each of its steps:
      <//>`;
  }
  /** @type {string[]} */
  const policies = [...new Set(data.jobs.map((/** @type {any} */ one) => one.policy))];
  const policy = policies.find((one) => one === wanted) ?? policies[0];
  const jobs = data.jobs.filter((/** @type {any} */ one) => one.policy === policy);
  return html`<h1>Jobs</h1>
    <${PolicyLinks} policies=${policies} chosen=${policy} to=${(/** @type {string} */ one) => link("jobs", [], { policy: one })} />
    <${Nodes} jobs=${jobs} policy=${policy} />
    <section aria-labelledby="jobs">
      <h2 id="jobs">Jobs of ${policy}</h2>
      <${Table}
        label=${`Jobs of ${policy}`}
        rows=${jobs}
        id=${(/** @type {any} */ one) => one.id}
        columns=${[
          {
            title: "Job",
            cell: (/** @type {any} */ one) =>
              html`<a href=${link("jobs", [one.id])}><code>${one.key}</code></a>`,
          },
          {
            title: "State",
            cell: (/** @type {any} */ one) =>
              html`<${Badge} kind=${KINDS[one.state]}>${one.state}<//>`,
          },
          {
            title: "Made",
            help: "The version that it published.",
            cell: (/** @type {any} */ one) =>
              !one.result ? "" : learned(one) ? `@${one.result.version}` : "nothing",
          },
          { title: "Sent", cell: (/** @type {any} */ one) => html`<${Ago} at=${one.created_at} />` },
          {
            title: "Tokens",
            number: true,
            cell: (/** @type {any} */ one) => number(one.result?.metrics.tokens_trained ?? NaN),
          },
        ]}
      />
      ${data.more && html`<p class="hint">The last ${data.jobs.length} jobs of the server are shown.</p>`}
    </section>`;
}

/** @param {any} job whose version is the one that it began with if all was excluded */
const learned = (job) => job.result.version !== job.base_version;

/** Curves by node over the jobs' versions. @param {{jobs: any[], policy: string}} props */
function Nodes({ jobs, policy }) {
  const steps = jobs.filter((one) => one.result && learned(one)).reverse();
  /** @type {Map<string, number>} */
  const tokens = new Map();
  for (const job of steps) {
    for (const [name, node] of Object.entries(job.result.nodes)) {
      tokens.set(name, (tokens.get(name) ?? 0) + /** @type {any} */ (node).tokens);
    }
  }
  const names = [...tokens.keys()].sort((a, b) => (tokens.get(b) ?? 0) - (tokens.get(a) ?? 0));
  const shown = names.slice(0, MOST_CURVES);
  if (!shown.length) return null;
  /** @param {string} field */
  const lines = (field) =>
    shown.map((label) => ({
      label,
      points: /** @type {[number, number][]} */ (
        steps
          .filter((one) => one.result.nodes[label])
          .map((one) => [one.result.version, one.result.nodes[label][field]])
      ),
    }));
  return html`<section aria-labelledby="nodes">
    <div class="row spread">
      <h2 id="nodes">Nodes of ${policy}, by version</h2>
      <${Legend} labels=${shown} />
    </div>
    <div class="cards">
      <${Curve} title="Tokens" help=${TOKENS} lines=${lines("tokens")} />
      <${Curve} title="Mean advantage" help=${MEAN} lines=${lines("advantage_mean")} />
      <${Curve} title="Strength of the push" help=${STRENGTH} lines=${lines("advantage_abs")} />
    </div>
    ${names.length > shown.length &&
    html`<p class="hint">The ${shown.length} nodes with the most tokens, of ${names.length}.</p>`}
  </section>`;
}

/** @param {{id: string}} props */
function Job({ id }) {
  const path = `/page/jobs/${encodeURIComponent(id)}`;
  const { data, error } = useAnswer(path, useLive("jobs", "event"));
  if (error && !data) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  const { job, log, reasons } = data;
  const seconds = job.finished_at && duration(Math.max(0, job.finished_at - job.created_at));
  return html`<p><a href=${link("jobs", [], { policy: job.policy })}>Jobs of ${job.policy}</a></p>
    <h1><code>${job.key}</code></h1>
    <section class="card facts" aria-label="Job">
      <${Fact} name="State" value=${job.state} bad=${job.state === "failed"} />
      <${Fact} name="Began with" value=${job.base_version === null ? null : `@${job.base_version}`} />
      <${Fact} name="Made" value=${job.result && (learned(job) ? `@${job.result.version}` : "nothing")} />
      <${Fact} name="From sent to ended" value=${seconds} />
      <${Fact} name="Tokens trained" value=${job.result?.metrics.tokens_trained} />
    </section>
    ${job.error && html`<p class="notice bad" role="alert">${job.error}</p>`}
    ${job.result && html`<${OfNodes} nodes=${job.result.nodes} reasons=${reasons} />`}
    <section aria-labelledby="log">
      <h2 id="log">Log</h2>
      <pre tabindex="0">${log.map((/** @type {any} */ one) => `${one.message}\n`).join("")}</pre>
    </section>`;
}

/** @param {{nodes: Record<string, any>, reasons: Record<string, string>}} props */
function OfNodes({ nodes, reasons }) {
  /** @param {any} node */
  const excluded = (node) =>
    html`${Object.entries(node.excluded).map(
      ([name, count]) =>
        html`<div key=${name}>${count} × <code>${name}</code>: ${reasons[name] ?? ""}</div>`,
    )}`;
  return html`<section aria-labelledby="by-node">
    <h2 id="by-node">By node</h2>
    <${Table}
      label="By node"
      rows=${Object.entries(nodes)}
      id=${(/** @type {any} */ row) => row[0]}
      columns=${[
        { title: "Node", cell: (/** @type {any} */ row) => html`<code>${row[0]}</code>` },
        { title: "Calls", number: true, cell: (/** @type {any} */ row) => number(row[1].calls) },
        { title: "Tokens", help: TOKENS, number: true, cell: (/** @type {any} */ row) => number(row[1].tokens) },
        { title: "Mean advantage", help: MEAN, number: true, cell: (/** @type {any} */ row) => number(row[1].advantage_mean) },
        { title: "Strength", help: STRENGTH, number: true, cell: (/** @type {any} */ row) => number(row[1].advantage_abs) },
        { title: "Excluded", cell: (/** @type {any} */ row) => excluded(row[1]) },
      ]}
    />
  </section>`;
}
