/** What the next step by reviews trains, node by node and verdict by verdict, and the step. */
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ask, newId } from "../api.js";
import { PolicyLinks, Table } from "./facts.js";
import { Failed, useAnswer } from "./states.js";
import { number } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** @param {{wanted: string | null, query: Record<string, string>}} props */
export function ReviewPlan({ wanted, query }) {
  /** @type {any[]} */
  const policies = useAnswer("/v1/policies").data?.data ?? [];
  const policy = policies.find((one) => one.name === wanted)?.name ?? policies[0]?.name;
  if (!policy) return null;
  return html`<section aria-labelledby="plan">
    <h2 id="plan">What the next step trains</h2>
    <${PolicyLinks}
      policies=${policies.map((one) => one.name)}
      chosen=${policy}
      to=${(/** @type {string} */ one) => link("review", [], { ...query, policy: one })}
    />
    <${Planned} key=${policy} policy=${policy} />
  </section>`;
}

/** @param {{policy: string}} props */
function Planned({ policy }) {
  const [plan, setPlan] = useState(/** @type {any} */ (null));
  const [jobs, setJobs] = useState(/** @type {any[]} */ ([]));
  const [wrong, setWrong] = useState(/** @type {Error | null} */ (null));
  const live = useLive("reviews", "jobs");
  useEffect(() => {
    const stop = new AbortController();
    ask("/v1/reviews/plan", { method: "POST", body: { policy }, signal: stop.signal }).then(
      // One key a plan: it is ordered once, however often the button is pressed.
      (found) => setPlan({ ...found, key: newId() }),
      (error) => {
        if (!stop.signal.aborted) setWrong(error);
      },
    );
    return () => stop.abort();
  }, [policy, live]);
  const train = async () => {
    setWrong(null);
    try {
      const order = { method: "POST", body: { policy, plan: plan.digest }, key: plan.key };
      setJobs((await ask("/v1/reviews/train", order)).jobs);
    } catch (error) {
      setWrong(/** @type {Error} */ (error));
    }
  };
  if (!plan) return wrong && html`<${Failed} error=${wrong} />`;
  const nodes = Object.entries(plan.nodes);
  /** @type {Map<string, number>} */
  const fates = new Map();
  for (const one of plan.verdicts) {
    const name = `${one.kind} ${one.fate}`;
    fates.set(name, (fates.get(name) ?? 0) + 1);
  }
  return html`${wrong && html`<${Failed} error=${wrong} />`}
    ${jobs.length > 0 &&
    html`<p class="notice" role="status">
      Ordered: ${jobs.map((one, at) => html`${at > 0 && ", "}<a key=${one.id} href=${link("jobs", [one.id])}>job ${at + 1}</a>`)}.
    </p>`}
    ${nodes.length > 0
      ? html`<${Table}
            label="By node"
            rows=${nodes}
            id=${(/** @type {any} */ row) => row[0]}
            columns=${[
              { title: "Node", cell: (/** @type {any} */ row) => html`<code>${row[0]}</code>` },
              { title: "Calls by rewards", help: "Of the run, of the call itself, or both.", number: true, cell: (/** @type {any} */ row) => number(row[1].calls) },
              { title: "Corrected replies", number: true, cell: (/** @type {any} */ row) => number(row[1].corrections) },
            ]}
          />
          <p>
            <button onClick=${train}>
              Train ${policy} on ${number(Object.keys(plan.rewards).length)} runs, ${number(Object.keys(plan.turns).length)} calls and
              ${" "}${number(plan.pairs.length)} corrections
            </button>
          </p>`
      : html`<p class="hint">Nothing: review several runs of one scenario, or correct a reply.</p>`}
    ${fates.size > 0 &&
    html`<p class="hint">
      Verdicts: ${[...fates].map(([name, count], at) => `${at > 0 ? ", " : ""}${number(count)} × ${name.replace(" ", ": ").replaceAll("_", " ")}`)}.
    </p>`}`;
}
