/** Two versions compared blind: two runs of one held-out scenario, and which of them is better. */
import { html, useState } from "../vendor/htm-preact.js";
import { ask, withQuery } from "../api.js";
import { Badge, Fact } from "../components/facts.js";
import { Messages } from "../components/messages.js";
import { newReview } from "../components/reviews.js";
import { Empty, Failed, useAnswer, Waiting } from "../components/states.js";
import { number } from "../format.js";
import { link } from "../router.js";

const CHANCE = "How likely a fair coin gives as uneven a count. Below 0.05 it is called significant. By the exact sign test, over scenarios.";
const RATE = "Of the scenarios that are no ties, how many go to the later version, with the 95 % interval by Wilson.";

/** @param {{query: URLSearchParams}} props */
export default function Blind({ query }) {
  const [before, after, reviewer] = ["before", "after", "reviewer"].map((name) => query.get(name) ?? "");
  const [said, setSaid] = useState(0);
  const { data, error } = useAnswer(withQuery("/page/blind", { before, after, reviewer }), said);
  const place = { before, after };
  /** @param {SubmitEvent} event */
  const begin = (event) => {
    event.preventDefault();
    const who = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)).get("reviewer");
    location.hash = link("review", ["blind"], { ...place, reviewer: String(who ?? "").trim() });
  };
  return html`<h1>Compared blind</h1>
    ${error && html`<${Failed} error=${error} />`} ${!data && !error && html`<${Waiting} />`}
    ${data?.left &&
    html`<${Choose}
      key=${`${data.left.id} ${data.right.id}`}
      pair=${data}
      reviewer=${reviewer}
      onSaid=${() => setSaid((/** @type {number} */ count) => count + 1)}
      result=${link("review", ["blind"], place)}
    />`}
    ${data?.preference &&
    html`${data.preference.preferences > 0 && html`<${Preferred} found=${data.preference} before=${before} after=${after} />`}
      ${reviewer
        ? html`<p class="notice" role="status">You have compared all ${number(data.pairs)} pairs.</p>`
        : data.pairs
          ? html`<form class="card row compare-form" onSubmit=${begin} aria-label="Compare blind">
              <div>
                <label for="blind-who">Your name</label>
                <input id="blind-who" name="reviewer" required maxlength="256" autocomplete="name" />
              </div>
              <button type="submit">Compare ${number(data.pairs)} pairs</button>
            </form>`
          : html`<${Empty} title="No scenario was run by both">Evaluate both versions on the same held-out scenarios.<//>`}`}
    ${data?.preference && html`<p class="hint"><a href=${link("versions", [after.split("@")[0]], place)}>Their rewards, compared</a></p>`}`;
}

/** @param {{pair: any, reviewer: string, onSaid: () => void, result: string}} props */
function Choose({ pair, reviewer, onSaid, result }) {
  const [refused, setRefused] = useState(/** @type {Error | null} */ (null));
  const [comment, setComment] = useState("");
  /** @param {number} value 1: the left run is better */
  const choose = async (value) => {
    const about = { kind: "score", name: `better_than:${pair.right.id}`, value, comment: comment.trim() || null };
    const review = newReview(pair.left.id, reviewer, about);
    try {
      const kept = await ask("/v1/reviews", { method: "PUT", body: { reviews: [review] } });
      if (kept.refused.length) throw new Error(`The server refused it: ${kept.refused[0].reason}.`);
      scrollTo(0, 0);
      onSaid();
    } catch (error) {
      setRefused(/** @type {Error} */ (error));
    }
  };
  return html`<p class="soft">
      Pair ${number(pair.compared + 1)} of ${number(pair.pairs)}, of the scenario ${pair.scenario}. One run is of
      each version; which one is left is drawn. <a href=${result}>Stop, and show the result</a>
    </p>
    <div class="siblings" tabindex="0" role="region" aria-label="Two runs">
      ${[["Left", pair.left], ["Right", pair.right]].map(
        ([title, run]) => html`<article key=${title} class="card sibling" aria-label=${title}>
          <h2>${title}</h2>
          <ol>
            ${run.calls.map(
              (/** @type {any} */ call, /** @type {number} */ at) =>
                html`<li key=${at}>
                  <strong>${call.node ?? "call"}</strong>
                  <${Messages} messages=${[...call.messages, ...(call.reply ? [call.reply] : [])]} />
                </li>`,
            )}
          </ol>
        </article>`,
      )}
    </div>
    <div class="card review-form" role="group" aria-label="Which is better">
      <div>
        <label for="blind-comment">Comment</label>
        <textarea id="blind-comment" rows="2" maxlength="65536" value=${comment} onInput=${(/** @type {any} */ e) => setComment(e.target.value)}></textarea>
      </div>
      <div class="row">
        <button onClick=${() => choose(1)}>Left is better</button>
        <button class="quiet" onClick=${() => choose(0.5)}>Neither</button>
        <button onClick=${() => choose(0)}>Right is better</button>
      </div>
      ${refused && html`<${Failed} error=${refused} />`}
    </div>`;
}

/** @param {{found: any, before: string, after: string}} props */
function Preferred({ found, before, after }) {
  const clear = found.p_value < 0.05;
  const better = found.better > found.worse;
  const kind = !clear ? "" : better ? "good" : "bad";
  return html`<div class="card" role="region" aria-label="Preference">
    <p>
      <${Badge} kind=${kind}>${!clear ? "No clear preference" : better ? "Preferred" : "Not preferred"}<//>${" "}
      <strong>${after}</strong> against <strong>${before}</strong>, by ${number(found.preferences)} choices of
      ${" "}${number(found.reviewers)} ${found.reviewers === 1 ? "reviewer" : "reviewers"}.
    </p>
    <div class="facts">
      <${Fact} name="Better" value=${found.better} unit="scenarios" />
      <${Fact} name="Worse" value=${found.worse} bad=${found.worse > found.better} />
      <${Fact} name="Ties" value=${found.ties} />
      ${found.rate !== null && html`<${Fact} name="Rate" value=${found.rate} unit=${`${number(found.low)} to ${number(found.high)}`} help=${RATE} />`}
      <${Fact} name="Chance" value=${`p = ${number(found.p_value)}`} help=${CHANCE} />
    </div>
  </div>`;
}
