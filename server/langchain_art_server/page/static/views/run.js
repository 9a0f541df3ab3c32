/** One run: its calls on a time line, what each was shown and said, and what its tokens taught. */
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ask } from "../api.js";
import { Badge, Fact, TimeLine } from "../components/facts.js";
import { Messages } from "../components/messages.js";
import { ReviewForm, Reviews } from "../components/reviews.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { Tokens } from "../components/tokens.js";
import { duration, number, signed } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** @param {{id: string, query: URLSearchParams}} props */
export default function Run({ id, query }) {
  const [saved, setSaved] = useState(0);
  const live = useLive("reviews", "jobs");
  const { data, error, path } = useAnswer(`/page/runs/${encodeURIComponent(id)}`, `${saved} ${live}`);
  const credits = useCredits(id, data?.audit.trained_by);
  const open = query.get("call");
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
  const largest = Math.max(0, ...given.map((/** @type {any} */ one) => Math.abs(one?.advantage ?? 0)));
  const spans = run.turns.flatMap((/** @type {any} */ turn, /** @type {number} */ at) =>
    turn.started_at === null
      ? []
      : {
          id: String(at),
          name: `${named(turn)}${turn.attempt > 1 ? `, attempt ${turn.attempt}` : ""}`,
          from: turn.started_at,
          to: turn.started_at + (turn.latency ?? 0),
          depth: Math.max(0, turn.path.length - 1),
          kind: turn.error ? "bad" : turn.excluded_because ? "soft" : "",
          href: link("runs", [id], { call: String(at) }),
        },
  );
  return html`
    <div class="row spread">
      <h1 class="run-id">${id}</h1>
      <a class="button quiet" href=${link("runs", [id, "siblings"])}>Siblings side by side</a>
    </div>
    <section class="card facts" aria-label="Run">
      <${Fact} name="Scenario" value=${run.scenario} />
      <${Fact} name="Status" value=${run.status} bad=${run.status === "failed"} />
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
      ${credits.found.map(
        (one) =>
          html`<${Fact} key=${one.job} name="Trained" value=${`${one.policy}@${one.step}`} unit=${`reward ${one.reward}`} />`,
      )}
    </section>
    ${run.error && html`<p class="notice bad">${run.error}</p>`}
    ${credits.error && html`<${Failed} error=${credits.error} />`}
    ${Object.entries(data.judged).map(
      ([name, why]) => html`<p class="notice" key=${name}><strong>${name}</strong>: ${why}</p>`,
    )}
    ${spans.length > 0 &&
    html`<section class="card" aria-label="Time line"><${TimeLine} label="Calls" spans=${spans} /></section>`}
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
            opened=${open === String(at)}
          />`,
      )}
    </section>
    <section class="card" aria-label="Review">
      <h2>Review</h2>
      <${Reviews} reviews=${data.reviews} run=${run} />
      <${ReviewForm} run=${run} onSaved=${() => setSaved(saved + 1)} />
    </section>
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

/** @param {any} turn */
function named(turn) {
  return turn.path.join(" / ") || turn.node || turn.model || "call";
}

/**
 * @param {{at: number, turn: any, audit: any, credit: any, largest: number, opened: boolean}} props
 */
function Call({ at, turn, audit, credit, largest, opened }) {
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
      <span class="soft">${number(audit.prompt_tokens)} → ${number(audit.sampled_tokens)} tokens</span>
      ${credit && !why && html`<${Badge} kind=${credit.advantage < 0 ? "bad" : "good"}>advantage ${signed(credit.advantage)}<//>`}
      ${why && html`<${Badge} kind="busy">excluded: ${why}<//>`}
      ${turn.reward !== null && html`<${Badge}>reward ${number(turn.reward)}<//>`}
      ${turn.error && html`<${Badge} kind="bad">error<//>`}
    </summary>
    ${open &&
    html`<div class="call-body">
      ${turn.extends !== null && html`<p class="hint">Goes on from call ${turn.extends + 1}; only what is new is shown.</p>`}
      <${Messages} messages=${turn.messages} />
      ${turn.reply && html`<${Messages} messages=${[turn.reply]} />`}
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
