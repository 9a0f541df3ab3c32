/** The workers that lease rollouts, and what waits for them. */
import { html } from "../vendor/htm-preact.js";
import { number } from "../format.js";
import { Ago, Badge, Help, Table } from "./facts.js";

/** Seconds since it was heard after which the server counts a worker as gone. */
const LIVE = 45;

/** @param {{status: any}} props */
export function Workers({ status }) {
  const { workers, rollouts } = status;
  const { queued = 0, leased = 0, finished = 0 } = rollouts;
  if (!workers.length && !(queued + leased + finished)) return null;
  const live = workers.filter((/** @type {any} */ one) => one.heard_seconds <= LIVE);
  return html`<section aria-labelledby="workers">
    <h2 id="workers">
      Workers <${Help} text="Processes that run rollouts for a fit, on any machine. Each leases as many as it can run, and says every few seconds that it is there." />
    </h2>
    ${queued > 0 && !live.length
      ? html`<p class="notice bad" role="alert">
          ${number(queued)} rollouts wait, and no worker runs them. Start one:
          <code>langchain-art worker MODULE:FUNCTION --server URL</code>
        </p>`
      : html`<p class="soft">
          ${number(queued)} rollouts wait, ${number(leased)} are leased, ${number(finished)} are
          finished and not taken yet.
        </p>`}
    ${workers.length > 0 &&
    html`<${Table}
      label="Workers"
      rows=${workers}
      id=${(/** @type {any} */ row) => row.id}
      columns=${[
        { title: "Worker", cell: (/** @type {any} */ row) => html`<code>${row.name || row.id}</code>` },
        { title: "Runs", cell: (/** @type {any} */ row) => row.rollout },
        { title: "Leased", help: "Rollouts that it has now, of those that it can run at once.", number: true, cell: (/** @type {any} */ row) => `${row.leased} of ${row.slots}` },
        { title: "Finished", number: true, cell: (/** @type {any} */ row) => number(row.finished) },
        { title: "Failed", help: "Of the finished ones, runs that raised; and attempts that ended with an error.", number: true, cell: (/** @type {any} */ row) => number(row.failed) },
        { title: "Leases expired", help: "It was not heard in time, and others got its rollouts.", number: true, cell: (/** @type {any} */ row) => number(row.expired) },
        { title: "Last heard", cell: (/** @type {any} */ row) => row.heard_seconds > LIVE ? html`<${Badge} kind="bad">gone<//> <${Heard} seconds=${row.heard_seconds} />` : html`<${Heard} seconds=${row.heard_seconds} />` },
      ]}
    />`}
  </section>`;
}

/** @param {{seconds: number}} props */
const Heard = ({ seconds }) => html`<${Ago} at=${Date.now() / 1000 - seconds} />`;
