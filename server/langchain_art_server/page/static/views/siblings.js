/** The runs of one group side by side: scores, the judge's reasons, and where each parts. */
import { html } from "../vendor/htm-preact.js";
import { Badge } from "../components/facts.js";
import { Failed, useAnswer, Waiting } from "../components/states.js";
import { number } from "../format.js";
import { link } from "../router.js";

/** @param {{id: string}} props */
export default function Siblings({ id }) {
  const { data, error } = useAnswer(`/page/runs/${encodeURIComponent(id)}/siblings`);
  if (error) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  return html`<h1 class="run-title">Siblings of ${id}</h1>
    <p class="soft">
      ${data.runs.length} runs of one group. Each is compared with this one; a marked call is where it
      parts.
    </p>
    <div class="siblings" tabindex="0" role="region" aria-label="Siblings">
      ${data.runs.map((/** @type {any} */ run) => html`<${Sibling} key=${run.summary.id} run=${run} of=${id} />`)}
    </div>`;
}

/** @param {{run: any, of: string}} props */
function Sibling({ run, of }) {
  const { summary, parts } = run;
  return html`<article class=${summary.id === of ? "card sibling compared" : "card sibling"}>
    <h2><a href=${link("runs", [summary.id])}>${summary.id}</a></h2>
    <p>
      <${Badge} kind=${summary.status === "failed" ? "bad" : ""}>${summary.status}<//>${" "}
      <strong>reward ${summary.reward === null ? "–" : number(summary.reward)}</strong>
    </p>
    ${Object.entries(summary.scores).map(
      ([name, value]) =>
        html`<p key=${name}>${name} ${number(value)}${Object.hasOwn(run.judged, name) && html`: <span class="soft">${run.judged[name]}</span>`}</p>`,
    )}
    ${Object.entries(run.judged)
      .filter(([name]) => !Object.hasOwn(summary.scores, name))
      .map(([name, why]) => html`<p key=${name} class="soft">${name}: ${why}</p>`)}
    ${parts === null && summary.id !== of && html`<p class="hint">It said the same, call by call.</p>`}
    <ol>
      ${run.turns.map((/** @type {any} */ turn, /** @type {number} */ at) => {
        const here = parts?.turn === at;
        return html`<li key=${at} class=${here ? "parts" : parts && at > parts.turn ? "" : "same"}>
          <strong>${turn.node ?? "call"}</strong>${turn.excluded_because && html` <${Badge} kind="busy">${turn.excluded_because}<//>`}
          <pre tabindex="0">${here
              ? html`<span class="soft">${turn.reply.slice(0, parts.characters)}</span><mark>${turn.reply.slice(parts.characters)}</mark>`
              : turn.reply}</pre>
          ${turn.characters > turn.reply.length &&
          html`<p class="hint">${number(turn.characters - turn.reply.length)} more characters in the run.</p>`}
        </li>`;
      })}
    </ol>
    ${parts && parts.turn >= run.turns.length && html`<p class="hint">It ends here, before the other.</p>`}
  </article>`;
}
