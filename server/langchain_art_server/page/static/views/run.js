/** One run: its calls on a time line, what each was shown and said, and what its tokens taught. */
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ask } from "../api.js";
import { Badge, Fact } from "../components/facts.js";
import { isEmpty, Messages } from "../components/messages.js";
import { ReviewForm, Reviews } from "../components/reviews.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { named, TimeLine } from "../components/timeline.js";
import { Tokens } from "../components/tokens.js";
import { duration, number, signed } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** @param {{id: string, query: URLSearchParams}} props */
export default function Run({ id, query }) {
  const [saved, setSaved] = useState(0);
  const [kinds, setKinds] = useState(["reviews", "jobs"]);
  const live = useLive(...kinds);
  const { data, error, path } = useAnswer(`/page/runs/${encodeURIComponent(id)}`, `${saved} ${live}`);
  const credits = useCredits(id, data?.audit.trained_by);
  const open = query.get("call");
  const reviewer = query.get("reviewer") ?? "";
  useEffect(() => {
    if (data) setKinds(data.stored ? ["rewards", "reviews", "jobs"] : ["calls", "runs"]);
  }, [data?.stored]);
  useEffect(() => {
    if (data && open !== null) document.getElementById(`call-${open}`)?.scrollIntoView();
  }, [data !== null, open]);
  if (error) return html`<${Failed} error=${error} />`;
  if (path && !data) {
    return html`<${Empty} title="No such run is stored here"><span class="run-id">${id}</span> was deleted, or never came to this server.<//>`;
  }
  if (!data) return html`<${Waiting} />`;
  const { run, audit } = data;
  const given = run.turns.map((/** @type {any} */ _, /** @type {number} */ at) => creditOf(credits.found, at));
  const every = given.flatMap((/** @type {any} */ one) => one?.token_advantages ?? [one?.advantage ?? 0]);
  const largest = every.reduce((/** @type {number} */ most, /** @type {number} */ one) => Math.max(most, Math.abs(one)), 0);
  const usd = sum(data.costs);
  return html`
    <div class="row spread">
      <h1 class="run-id">${id}</h1>
      <span class="row">
        ${data.trace && html`<a class="button quiet" href=${data.trace} rel="noreferrer" title="Its trace, if the run was exported">Langfuse</a>`}
        ${data.stored && html`<a class="button quiet" href=${link("runs", [id, "siblings"])}>Siblings side by side</a>`}
      </span>
    </div>
    ${!data.stored &&
    html`<p class="notice" role="status">
      These are its calls so far. The run still runs, waits for others of its group or step, or was
      not sent to the server.
    </p>`}
    <section class="card facts" aria-label="Run">
      <${Fact} name="Scenario" value=${run.scenario} />
      <${Fact} name="Status" value=${data.stored ? run.status : "running"} bad=${run.status === "failed"} />
      <${Fact} name="Reward" value=${run.reward} help="– means not scored, which is not zero." />
      ${Object.entries(run.scores).map(
        ([name, value]) => html`<${Fact} key=${name} name=${name} value=${value} />`,
      )}
      <${Fact} name="Calls" value=${run.turns.length} />
      <${Fact}
        name="Tokens that can be trained"
        value=${audit.turns.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.trained_tokens, 0)}
        unit=${`of ${number(audit.turns.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.sampled_tokens, 0))}`}
      />
      <${Fact}
        name="Cost"
        value=${usd === null ? "–" : dollars(usd)}
        unit=${data.costs.includes(null) && usd !== null ? "of calls with a price" : undefined}
        help="Of our own calls: their seconds at the server's gpu_rate; less, where other calls ran beside them. Of hosted models: the list price of their tokens."
      />
      ${credits.found.map(
        (one) =>
          html`<${Fact} key=${one.job} name="Trained" value=${`${one.policy}@${one.step}`} unit=${`reward ${one.reward}`} />`,
      )}
    </section>
    ${credits.found
      .filter((one) => one.teacher)
      .map(
        (one) => html`<p class="notice" key=${`teacher of ${one.job}`}>
          For ${one.policy}@${one.step}, the teacher ${one.teacher} scored each token as well. The
          advantages below are those by rewards.
        </p>`,
      )}
    ${run.error && html`<p class="notice bad">${run.error}</p>`}
    ${credits.error && html`<${Failed} error=${credits.error} />`}
    ${Object.entries(data.judged).map(
      ([name, why]) => html`<p class="notice" key=${name}><strong>${name}</strong>: ${why}</p>`,
    )}
    ${usd === null && html`<p class="hint">
      No price is known: set gpu_rate below [page] in the server's settings (US dollars an hour).
      ${" "}${data.unpriced.join(" ")}
    </p>`}
    ${run.turns.length > 0 &&
    html`<section class="card" aria-labelledby="time-line">
      <h2 id="time-line">Time line</h2>
      <${TimeLine} turns=${run.turns} status=${run.status} href=${(/** @type {number} */ at) => link("runs", [id], { call: String(at) })} />
    </section>`}
    <section aria-label="Calls" class="calls">
      <h2>Calls</h2>
      ${run.turns.map(
        (/** @type {any} */ turn, /** @type {number} */ at) =>
          html`<${Call}
            key=${at}
            at=${at}
            turn=${turn}
            audit=${audit.turns[at]}
            credit=${given[at]}
            largest=${largest}
            usd=${data.costs[at]}
            opened=${open === String(at)}
          />`,
      )}
    </section>
    ${data.stored &&
    html`<section class="card" aria-label="Review">
      <h2>Review</h2>
      ${reviewer && !data.reviews.some((/** @type {any} */ one) => one.reviewer === reviewer)
        ? html`<p class="hint">What others say is shown once you have said something.</p>`
        : html`<${Reviews} reviews=${data.reviews} run=${run} />`}
      <${ReviewForm} run=${run} reviewer=${reviewer} onSaved=${() => setSaved(saved + 1)} />
      ${reviewer && html`<p><a href=${link("review", [], Object.fromEntries(query))}>To what is to review</a></p>`}
    </section>`}
  `;
}

/**
 * What the jobs that trained on the run gave to its calls.
 *
 * @param {string} id
 * @param {Record<string, string> | undefined} trainedBy policy -> job
 * @returns {{found: any[], error: Error | null}}
 */
function useCredits(id, trainedBy) {
  const [state, setState] = useState(/** @type {any} */ ({ found: [], error: null }));
  const jobs = Object.values(trainedBy ?? {});
  useEffect(() => {
    if (!jobs.length) return;
    const base = `/page/runs/${encodeURIComponent(id)}/credit/`;
    Promise.all(jobs.map((job) => ask(base + encodeURIComponent(job)))).then(
      (found) => setState({ found, error: null }),
      (error) => setState({ found: [], error }),
    );
  }, [id, jobs.join()]);
  return state;
}

/** @param {any[]} credits @param {number} at the job that trained the call, else the last one */
function creditOf(credits, at) {
  const given = credits.map((one) => one.turns[at]).filter(Boolean);
  return given.find((one) => one.excluded_because === null) ?? given.at(-1) ?? null;
}

/** @param {(number | null)[]} costs US dollars @returns {number | null} null: none is known */
function sum(costs) {
  const known = costs.filter((one) => one !== null);
  return known.length ? known.reduce((all, one) => all + one, 0) : null;
}

/** @param {number} usd */
function dollars(usd) {
  return usd.toLocaleString("en", { style: "currency", currency: "USD", maximumSignificantDigits: 3 });
}

/**
 * @param {{at: number, turn: any, audit: any, credit: any, largest: number, usd: number | null, opened: boolean}} props
 */
function Call({ at, turn, audit, credit, largest, usd, opened }) {
  const [open, setOpen] = useState(opened);
  useEffect(() => {
    if (opened) setOpen(true);
  }, [opened]);
  const why = credit ? credit.excluded_because : audit.excluded_because;
  return html`<details
    class="card call"
    id=${`call-${at}`}
    open=${open}
    onToggle=${(/** @type {any} */ event) => setOpen(event.currentTarget.open)}
  >
    <summary>
      <strong>${at + 1}. ${named(turn)}</strong>
      <span class="soft">${turn.model}</span>
      ${turn.latency !== null && html`<span class="soft">${duration(turn.latency)}</span>`}
      <span class="soft">${audit.prefix === null && !turn.usage ? "tokens not reported" : `${number(audit.prompt_tokens)} → ${number(audit.sampled_tokens)} tokens`}</span>
      ${usd !== null && html`<span class="soft">${dollars(usd)}</span>`}
      ${turn.attempt > 1 && html`<${Badge} kind="busy">attempt ${turn.attempt}<//>`}
      ${credit && !why && html`<${Badge} kind=${credit.advantage < 0 ? "bad" : "good"}>advantage ${signed(credit.advantage)}<//>`}
      ${why && html`<${Badge} kind="busy">excluded: ${why}<//>`}
      ${turn.reward !== null && html`<${Badge}>reward ${number(turn.reward)}<//>`}
      ${turn.edited && html`<${Badge}>changed by the graph<//>`}
      ${turn.error && html`<${Badge} kind="bad">error<//>`}
    </summary>
    ${open &&
    html`<div class="call-body">
      ${turn.extends !== null && html`<p class="hint">Goes on from call ${turn.extends + 1}; only what is new is shown.</p>`}
      <${Messages} messages=${turn.messages} />
      ${turn.reply && html`<${Messages} messages=${[turn.reply]} />`}
      ${turn.edited && html`<${Edited} message=${turn.edited} />`}
      ${turn.error && html`<p class="notice bad">${turn.error}</p>`}
      ${turn.tools.length > 0 &&
      html`<details>
        <summary class="soft">${turn.tools.length} tools</summary>
        <pre tabindex="0">${JSON.stringify(turn.tools, null, 1)}</pre>
      </details>`}
      ${audit.prefix !== null && turn.call_id
        ? html`<${Tokens} call=${turn.call_id} credit=${credit} excluded=${audit.excluded_because} largest=${largest} />`
        : html`<p class="hint">The server has no tokens of this call.</p>`}
    </div>`}
  </details>`;
}

/** What the graph made of a reply by changing it in place. @param {{message: any}} props */
function Edited({ message }) {
  return html`<details class="edited">
    <summary class="soft">changed by the graph to …</summary>
    ${isEmpty(message) ? html`<p class="hint">An empty reply.</p>` : html`<${Messages} messages=${[message]} />`}
    <p class="hint">Above is what was sampled: its tokens are those that training sees, and judges read it.</p>
  </details>`;
}
