/** Runs that are worth a person's look, of those that nobody has reviewed. */
import { html } from "../vendor/htm-preact.js";
import { withQuery } from "../api.js";
import { RunTable } from "../components/run_table.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { number } from "../format.js";
import { link } from "../router.js";

const PICKS = [
  ["disagreement", "Judges disagree"],
  ["lowest", "Lowest reward"],
  ["uncertain", "Siblings differ most"],
  ["random", "Random"],
];

/** @param {{query: URLSearchParams}} props */
export default function Review({ query }) {
  const pick = query.get("pick") ?? "disagreement";
  const { data, error } = useAnswer(withQuery("/page/review-queue", { pick, policy: query.get("policy") }));
  return html`<h1>To review</h1>
    <nav class="row" aria-label="Which runs come first">
      ${PICKS.map(
        ([name, title]) =>
          html`<a class=${name === pick ? "button" : "button quiet"} href=${link("review", [], { pick: name })} aria-current=${name === pick ? "true" : undefined}
            >${title}</a
          >`,
      )}
    </nav>
    ${error && html`<${Failed} error=${error} />`} ${!data && !error && html`<${Waiting} />`}
    ${data &&
    html`<p class="hint">
      Of the newest ${number(data.among)} runs that nobody has reviewed; ${number(data.not_ordered)} of them lack
      what this order needs (two scores, or a reward).
    </p>`}
    ${data &&
    (data.runs.length
      ? html`<${RunTable} runs=${data.runs} foreseen=${data.foreseen} />`
      : html`<${Empty} title="No run fits this order">Choose another one above.<//>`)}`;
}
