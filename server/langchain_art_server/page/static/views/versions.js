/** The versions of each policy: what serves, pinned ones, going back, comparing, taking one along. */
import { html, useState } from "../vendor/htm-preact.js";
import { ask } from "../api.js";
import { Compare } from "../components/comparison.js";
import { Ago, Badge, PolicyLinks, Table } from "../components/facts.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { bytes, number, withSpread } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";

/** @param {import("../router.js").Place} props */
export default function Versions({ path, query }) {
  const live = useLive("health", "jobs");
  const { data, error } = useAnswer("/v1/policies", live);
  if (error && !data) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  /** @type {any[]} */
  const policies = data.data;
  if (!policies.length) {
    const command = "langchain-art serve MODEL --policy my-agent";
    return html`<h1>Versions</h1>
      <${Empty} title="This server has no policy" command=${command}>
        A policy is what is trained. Name one when the server is started, or create it from a fit:
      <//>`;
  }
  const chosen = policies.find((one) => one.name === path[0]) ?? policies[0];
  return html`<h1>Versions</h1>
    <${PolicyLinks}
      policies=${policies.map((one) => one.name)}
      chosen=${chosen.name}
      to=${(/** @type {string} */ one) => link("versions", [one])}
    />
    <${OfPolicy} key=${chosen.name} policy=${chosen} live=${live} query=${query} />`;
}

/** @param {{policy: any, live: number, query: URLSearchParams}} props */
function OfPolicy({ policy, live, query }) {
  const place = `/v1/policies/${encodeURIComponent(policy.name)}`;
  const [done, setDone] = useState(0);
  const [back, setBack] = useState(/** @type {any} */ (null));
  const [refused, setRefused] = useState(/** @type {Error | null} */ (null));
  const { data, error } = useAnswer(`${place}/checkpoints`, `${live} ${done}`);
  /** @type {any[] | undefined} */
  const evaluations = useAnswer("/page/evaluations", useLive("runs", "rewards")).data?.evaluations;
  if (error && !data) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  /** @param {string} where @param {string} method @param {unknown} [body] */
  const change = async (where, method, body) => {
    setRefused(null);
    try {
      await ask(`${place}/${where}`, { method, body });
      setBack(null);
    } catch (found) {
      setRefused(/** @type {Error} */ (found));
    }
    setDone((/** @type {number} */ count) => count + 1);
  };
  const pin = (/** @type {any} */ one) =>
    change(`checkpoints/${one.version}/pin`, one.pinned ? "DELETE" : "PUT");
  return html`<section aria-labelledby="of-policy">
    <h2 id="of-policy">${policy.name}</h2>
    ${refused && html`<${Failed} error=${refused} />`}
    ${back &&
    html`<div class="notice" role="status">
      <p>
        Calls to <strong>${policy.name}</strong> will be answered by
        <strong> ${back.name}</strong>, and the next training step starts from it. Calls that run
        now end with the version that they began with. Newer versions are kept.
      </p>
      <div class="row">
        <button onClick=${() => change("rollback", "POST", { version: back.version })}>
          Serve ${back.name}
        </button>
        <button class="quiet" onClick=${() => setBack(null)}>Leave it as it is</button>
      </div>
    </div>`}
    <${Table}
      label=${`Versions of ${policy.name}`}
      rows=${[...data.data].reverse()}
      id=${(/** @type {any} */ one) => one.version}
      columns=${[
        { title: "Version", cell: nameOf },
        { title: "Made", cell: (/** @type {any} */ one) => html`<${Ago} at=${one.created_at} />` },
        {
          title: "From",
          help: "The version that the training step started from.",
          cell: (/** @type {any} */ one) => (one.parent === null ? "base model" : `@${one.parent}`),
        },
        {
          title: "Reward",
          help: "Mean reward of the runs that made this version: they were sampled before it.",
          number: true,
          cell: (/** @type {any} */ one) => number(one.metrics.reward_mean ?? NaN),
        },
        {
          title: "Held out",
          help: "Mean reward on held-out scenarios, which no step learns from, and its 95 % interval.",
          number: true,
          cell: (/** @type {any} */ one) => {
            const found = evaluations?.find((known) => known.versions === one.name);
            return found ? withSpread(found.mean, found.ci95) : "–";
          },
        },
        { title: "Size", number: true, cell: (/** @type {any} */ one) => bytes(one.bytes) },
        {
          title: "What to do",
          cell: (/** @type {any} */ one) => html`<span class="row">
            <button
              class="quiet"
              aria-label=${`${one.pinned ? "Unpin" : "Pin"} ${one.name}`}
              title="A pinned version is never deleted to save space."
              onClick=${() => pin(one)}
            >
              ${one.pinned ? "Unpin" : "Pin"}
            </button>
            ${!one.serving &&
            html`<button
              class="quiet"
              aria-label=${`Serve ${one.name}…`}
              onClick=${() => setBack(one)}
            >
              Serve…
            </button>`}
            <a
              class="button quiet"
              aria-label=${`Download ${one.name}`}
              href=${`${place}/checkpoints/${one.version}/adapter`}
              download=${`${one.name}.tar`}
              >Download</a
            >
          </span>`,
        },
      ]}
    />
    <p class="hint">A download is a tar archive in PEFT's format, for vLLM or transformers.</p>
  </section>
  ${evaluations && html`<${Compare} policy=${policy.name} evaluations=${evaluations} query=${query} />`}`;
}

/** @param {any} one a version */
function nameOf(one) {
  const out = one.rolled_back;
  return html`<strong>@${one.version}</strong> ${one.serving && html`<${Badge} kind="good">serves<//>`}
    ${" "}${one.pinned && html`<${Badge}>pinned<//>`}
    ${out &&
    html`<${Badge} kind="bad">rolled back<//>
      <p class="hint">
        To @${out.to}, <${Ago} at=${out.at} />: ${out.why || "no reason was given."}
      </p>`}`;
}
