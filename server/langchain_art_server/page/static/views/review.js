/** Runs that are worth a person's look, what the next step by reviews trains, and the step. */
import { html } from "../vendor/htm-preact.js";
import { withQuery } from "../api.js";
import { ReviewPlan } from "../components/review_plan.js";
import { RunTable } from "../components/run_table.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { number } from "../format.js";
import { useLive } from "../live.js";
import { link } from "../router.js";
import Blind from "./blind.js";

const PICKS = [
  ["disagreement", "Judges disagree"],
  ["lowest", "Lowest reward"],
  ["uncertain", "Siblings differ most"],
  ["random", "Random"],
];

/** @param {import("../router.js").Place} props */
export default function Review({ path, query }) {
  return path[0] === "blind" ? html`<${Blind} query=${query} />` : html`<${Queue} query=${query} />`;
}

/** @param {{query: URLSearchParams}} props */
function Queue({ query }) {
  const [pick, policy, reviewer] = [query.get("pick") ?? "disagreement", query.get("policy"), query.get("reviewer")];
  const own = { ...(reviewer && { reviewer }), ...(policy && { policy }) };
  const { data, error } = useAnswer(withQuery("/page/review-queue", { pick, policy, reviewer }), useLive("reviews"));
  /** @param {SubmitEvent} event */
  const named = (event) => {
    event.preventDefault();
    const who = String(new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)).get("reviewer")).trim();
    location.hash = link("review", [], { pick, ...(policy && { policy }), ...(who && { reviewer: who }) });
  };
  return html`<h1>To review</h1>
    <${ReviewPlan} wanted=${policy} query=${own} />
    <nav class="row" aria-label="Which runs come first">
      ${PICKS.map(
        ([name, title]) =>
          html`<a class=${name === pick ? "button" : "button quiet"} href=${link("review", [], { ...own, pick: name })} aria-current=${name === pick ? "true" : undefined}
            >${title}</a
          >`,
      )}
    </nav>
    <form class="row compare-form" onSubmit=${named} aria-label="For whom">
      <div>
        <label for="queue-who">Your name</label>
        <input id="queue-who" name="reviewer" key=${reviewer} defaultValue=${reviewer ?? ""} maxlength="256" autocomplete="name" />
      </div>
      <button class="quiet" type="submit">Show what I have not reviewed</button>
    </form>
    ${error && html`<${Failed} error=${error} />`} ${!data && !error && html`<${Waiting} />`}
    ${data &&
    html`<p class="hint">
      Of the newest ${number(data.among)} runs that ${reviewer ? "you may review: up to two people each, and a third where they disagree" : "nobody has reviewed"};
      ${" "}${number(data.not_ordered)} of them lack what this order needs (two scores, or a reward).
      ${data.several > 0 &&
      ` ${number(data.several)} runs have several reviewers, whose agreement (Krippendorff's alpha: 1 is all, 0 is chance) is ${data.alpha === null ? "not defined" : number(data.alpha)}.`}
    </p>`}
    ${data &&
    (data.runs.length
      ? html`<${RunTable} runs=${data.runs} foreseen=${data.foreseen} query=${{ ...own, pick }} />`
      : html`<${Empty} title="No run fits this order">Choose another one above.<//>`)}`;
}
