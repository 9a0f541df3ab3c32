/** What the server does now: its policies, their curves, the job that runs, its health. */
import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { ask } from "../api.js";
import { Curve, Legend, MOST_CURVES } from "../components/curves.js";
import { Ago, Badge, Fact, Help, Table } from "../components/facts.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { Workers } from "../components/workers.js";
import { bytes, duration, number } from "../format.js";
import { useLatest, useLive } from "../live.js";
import { METRICS } from "../metrics.js";

/** How many fits are drawn until others are chosen. */
const SHOWN = 4;
/** @type {any[]} */
const NONE = [];

export default function Overview() {
  const { data, error } = useAnswer("/page/overview", useLive("jobs", "event", "health", "runs", "workers"));
  const happened = useLatest();
  /** @type {any[]} */
  const evaluations = useAnswer("/page/evaluations", useLive("runs", "rewards")).data?.evaluations ?? NONE;
  const [chosen, setChosen] = useState(/** @type {string[] | null} */ (null));
  if (error && !data) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  const { status, series, open_jobs: jobs } = data;
  /** @type {string[]} */
  const names = series.map(nameOf);
  const shown = (chosen ?? names.slice(0, SHOWN)).filter((name) => names.includes(name));
  return html`
    <div class="row spread">
      <h1>Overview</h1>
      <${Badge} kind=${status.ready ? "good" : "bad"}>
        ${status.ready ? "Answering calls" : "Not ready"}
      <//>
    </div>
    ${Object.entries(status.reasons).map(
      ([part, why]) => html`<p class="notice bad" role="alert" key=${part}>${part} ${why}</p>`,
    )}
    <${LearnedNothing} series=${series} reasons=${data.reasons} />
    ${data.failed && html`<p class="notice bad" role="alert">
      The last job of ${data.failed.policy} failed: ${data.failed.error}
    </p>`}
    ${jobs.map((/** @type {any} */ one) => html`<${OpenJob} key=${one.job.id} open=${one} />`)}
    ${series.length
      ? html`<${Fits} series=${series} evaluations=${evaluations} shown=${shown} choose=${setChosen} />
          <${Excluded} series=${series.filter((/** @type {any} */ one) => shown.includes(nameOf(one)))} reasons=${data.reasons} />`
      : html`<${NothingTrained} status=${status} />`}
    <${Policies} status=${status} />
    <${Workers} status=${status} />
    <${Server} status=${status} running=${happened?.running_calls ?? status.running_calls} />
    <${Clients} clients=${data.clients} />
  `;
}

/** @param {any} one a series */
const nameOf = (one) => (one.fit ? `${one.policy} · ${one.fit}` : one.policy);

/** @param {{series: any[], reasons: Record<string, string>}} props */
function LearnedNothing({ series, reasons }) {
  const empty = series.filter((one) => !one.steps[one.steps.length - 1].learned);
  return html`${empty.map((one) => {
    const step = one.steps[one.steps.length - 1];
    const why = Object.entries(step.excluded).sort((a, b) => b[1] - a[1]);
    return html`<div class="notice bad" role="alert" key=${nameOf(one)}>
      <strong>Step ${step.step} of ${nameOf(one)} learned nothing: all of it was excluded.</strong>
      <ul>
        ${why.map(([name, count]) => html`<li>${count} × ${name}: ${reasons[name] ?? ""}</li>`)}
      </ul>
    </div>`;
  })}`;
}

/** @param {{status: any}} props */
function NothingTrained({ status }) {
  if (!status.trajectories && !status.calls) {
    const command = "langchain-art demo";
    return html`<${Empty} title="No run has come yet" command=${command}>
      Point a graph's ChatART at this server and run it inside capture(); or watch the demo train:
    <//>`;
  }
  return html`<${Empty} title="Nothing has been trained yet" command="Trainer(...).fit(scenarios)">
    ${number(status.trajectories)} runs and ${number(status.calls)} calls are recorded. The curves of
    a fit appear here after its first step:
  <//>`;
}

/** A job that waits or runs. @param {{open: any}} props */
function OpenJob({ open: { job, progress, log } }) {
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const cancel = () => ask(`/v1/jobs/${job.id}/cancel`, { method: "POST" }).catch(setError);
  const line = log[log.length - 1]?.message ?? "waits for its turn";
  const runs = job.state === "running";
  return html`<section class="card" aria-label=${`Job of ${job.policy}`}>
    <div class="row spread">
      <h2>Training ${job.policy} <${Badge} kind=${runs ? "busy" : ""}>${job.state}<//></h2>
      <button class="quiet" onClick=${cancel}>Cancel job</button>
    </div>
    <p aria-live="polite">${line}</p>
    ${runs &&
    html`<progress aria-label="Progress" max="1" value=${progress ?? undefined}></progress>`}
    ${log.length > 0 &&
    html`<details>
      <summary>Log</summary>
      <pre tabindex="0">${log.map((/** @type {any} */ one) => `${one.message}\n`).join("")}</pre>
    </details>`}
    ${error && html`<${Failed} error=${error} />`}
  </section>`;
}

/** @param {{series: any[], evaluations: any[], shown: string[], choose: (names: string[]) => void}} props */
function Fits({ series, evaluations, shown, choose }) {
  const drawn = series.filter((one) => shown.includes(nameOf(one)));
  const curves = useMemo(
    () =>
      METRICS.map((metric) => ({
        ...metric,
        lines: drawn.map((one) => ({ label: nameOf(one), points: pointsOf(one, metric.name, evaluations) })),
      })).filter((one) => one.lines.some(({ points }) => points.some(measured(one)))),
    [series, evaluations, shown.join("\n")],
  );
  const toggle = (/** @type {string} */ name) =>
    choose(shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name]);
  return html`<section aria-labelledby="curves">
    <div class="row spread">
      <h2 id="curves">
        Curves by step <${Help} text="One point for each step of training: runs were scored, compared, and the policy was changed a little." />
      </h2>
      <${Legend} labels=${drawn.map(nameOf)} />
    </div>
    ${series.length > 1 &&
    html`<fieldset class="row fits">
      <legend class="hint">Fits side by side</legend>
      ${series.map((one) => {
        const name = nameOf(one);
        const on = shown.includes(name);
        const full = !on && shown.length >= MOST_CURVES;
        return html`<label class="row" key=${name}>
          <input type="checkbox" checked=${on} disabled=${full} onChange=${() => toggle(name)} />
          ${name} <span class="soft">${one.steps.length} steps</span>
        </label>`;
      })}
    </fieldset>`}
    <div class="cards">
      ${curves.map(
        (one) =>
          html`<${Curve} key=${one.name} title=${one.title} help=${one.help} lines=${one.lines} />`,
      )}
    </div>
  </section>`;
}

/** What is 0 where it was not measured: a penalty that is not there, a judge that was not asked. */
const ZERO_IS_NONE = ["kl_reference", "judge_seconds"];

/**
 * Whether a point says something.
 *
 * @param {import("../metrics.js").Metric} metric
 */
const measured = (metric) => (/** @type {import("../components/curves.js").Point} */ point) =>
  !ZERO_IS_NONE.includes(metric.name) || point[1] !== 0;

/**
 * @param {any} one a series
 * @param {string} name of a metric
 * @param {any[]} evaluations
 * @returns {import("../components/curves.js").Point[]}
 */
function pointsOf(one, name, evaluations) {
  if (name === "held_out") return heldOut(one, evaluations);
  return one.steps
    .filter((/** @type {any} */ step) => step.metrics[name] !== undefined)
    .map((/** @type {any} */ step) => [step.step, step.metrics[name]]);
}

/**
 * The evaluations of a fit's versions, each at the step that made the version.
 *
 * @param {any} one a series
 * @param {any[]} evaluations
 * @returns {import("../components/curves.js").Point[]}
 */
function heldOut(one, evaluations) {
  const [first] = one.steps;
  const steps = new Map([[`${one.policy}@${first.base}`, first.step - 1]]);
  for (const step of one.steps) if (step.learned) steps.set(`${one.policy}@${step.version}`, step.step);
  return evaluations.flatMap(({ versions, mean, ci95 }) => {
    const part = versions.split(" + ").find((/** @type {string} */ name) => steps.has(name));
    if (part === undefined || mean === null) return [];
    return [/** @type {import("../components/curves.js").Point} */ ([steps.get(part), mean, ci95])];
  });
}

/** @param {{series: any[], reasons: Record<string, string>}} props */
function Excluded({ series, reasons }) {
  const rows = series.flatMap((one) => {
    const step = one.steps[one.steps.length - 1];
    return Object.entries(step.excluded).map(([reason, count]) => ({ one, step, reason, count }));
  });
  return html`<section aria-labelledby="excluded">
    <h2 id="excluded">
      Excluded in the last step <${Help} text="What was sampled and not learned from, by reason. Some is normal; all of it is not." />
    </h2>
    ${rows.length
      ? html`<${Table}
          label="Excluded in the last step"
          rows=${rows}
          id=${(/** @type {any} */ row) => `${nameOf(row.one)} ${row.reason}`}
          columns=${[
            { title: "Fit", cell: (/** @type {any} */ row) => nameOf(row.one) },
            { title: "Step", number: true, cell: (/** @type {any} */ row) => row.step.step },
            { title: "Count", number: true, cell: (/** @type {any} */ row) => number(row.count) },
            { title: "Reason", cell: (/** @type {any} */ row) => html`<code>${row.reason}</code>` },
            { title: "What it means", cell: (/** @type {any} */ row) => reasons[row.reason] },
          ]}
        />`
      : html`<p class="soft">Nothing: every call that was sent was learned from.</p>`}
  </section>`;
}

/** @param {{status: any}} props */
function Policies({ status }) {
  return html`<section aria-labelledby="policies">
    <h2 id="policies">
      Policies <${Help} text="A policy is a model that is trained: a small adapter on the base model. Each step makes a version of it." />
    </h2>
    <${Table}
      label="Policies"
      rows=${status.policies}
      id=${(/** @type {any} */ row) => row.name}
      columns=${[
        { title: "Policy", cell: (/** @type {any} */ row) => row.name },
        { title: "Serves", cell: (/** @type {any} */ row) => `${row.name}@${row.version}` },
        { title: "Versions kept", number: true, cell: (/** @type {any} */ row) => row.checkpoints },
        { title: "Rank", help: "Size of the adapter: more can learn more, and costs more.", number: true, cell: (/** @type {any} */ row) => row.lora.rank },
      ]}
    />
  </section>`;
}

/** @param {{status: any, running: number}} props */
function Server({ status, running }) {
  return html`<section class="card" aria-labelledby="server">
    <h2 id="server">Server</h2>
    <div class="facts">
      <${Fact} name="Base model" value=${status.base_model} />
      <${Fact} name="Device" value=${`${status.device}, ${status.dtype}`} />
      <${Fact} name="Runs" value=${status.trajectories} help="What a graph did for one scenario, from input to output." />
      <${Fact} name="Calls" value=${status.calls} help="Requests to the model; a run has one or more." />
      <${Fact} name="Calls now" value=${running} />
      <${Fact} name="Engine restarts" value=${status.engine_restarts} bad=${status.engine_restarts > 0} help="The processes that sample and learn are started again when they end by accident." />
      <${Fact} name="Stored" value=${bytes(status.stored_bytes)} />
      <${Fact} name="Up" value=${duration(status.uptime)} />
    </div>
    ${status.replicas.length > 0 && html`<${Replicas} replicas=${status.replicas} />`}
    <p class="hint">${status.sampler}, ${status.learner}, langchain-art ${status.version}</p>
  </section>`;
}

/** @param {{replicas: any[]}} props */
function Replicas({ replicas }) {
  return html`<${Table}
    label="Replicas of the sampler"
    rows=${replicas}
    id=${(/** @type {any} */ row) => row.name}
    columns=${[
      { title: "Replica", cell: (/** @type {any} */ row) => row.name },
      { title: "State", help: "One that ends is started again, and loads the versions that it missed before it gets calls.", cell: (/** @type {any} */ row) => row.problem ?? "answers" },
      { title: "Calls now", number: true, cell: (/** @type {any} */ row) => row.running_calls },
      { title: "Restarts", number: true, cell: (/** @type {any} */ row) => row.restarts },
      { title: "Versions missing", number: true, cell: (/** @type {any} */ row) => row.missing },
    ]}
  />`;
}

/** @param {{clients: any[]}} props */
function Clients({ clients }) {
  if (!clients.length) return html`<p class="soft">No client has called since the server started.</p>`;
  return html`<section aria-labelledby="clients">
    <h2 id="clients">Clients</h2>
    <${Table}
      label="Clients"
      rows=${clients}
      id=${(/** @type {any} */ row) => row.address}
      columns=${[
        { title: "Address", cell: (/** @type {any} */ row) => html`<code>${row.address}</code>` },
        { title: "Calls now", number: true, cell: (/** @type {any} */ row) => row.running },
        { title: "Last seen", cell: (/** @type {any} */ row) => row.running ? "now" : html`<${Ago} at=${Date.now() / 1000 - row.idle_seconds} />` },
      ]}
    />
  </section>`;
}
