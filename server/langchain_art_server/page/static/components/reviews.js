/** What people said of a run, and the form in which one more says it. */
import { html, useState } from "../vendor/htm-preact.js";
import { ask, newId } from "../api.js";
import { number } from "../format.js";
import { Ago, Badge } from "./facts.js";
import { said } from "./messages.js";

const EFFECTS = /** @type {Record<string, string>} */ ({
  teaches_preference:
    "The next “langchain-art review train” teaches the policy to prefer this reply to what it said.",
  teaches_reward: "The next “langchain-art review train” compares it with the other reviewed runs of its scenario, or calls of its node.",
  is_kept: "It is kept and shown beside the other scores. Nothing is trained on it.",
  taken_back: "What you said of it before does not count any more.",
  trained: "It is kept, and teaches nothing more: it was trained with this value.",
  ordered: "It is kept, and teaches nothing more: a job that has not ended trains it.",
  held_out: "It is kept to measure by: an evaluation ran this scenario, so it is not trained on.",
  stale: "It is kept, and compared with, but the run is too old to be trained on: correct a reply, or review a new run.",
  rolled_back: "It is kept, and compared with, but a rollback discarded the version that answered.",
  untrainable: "It is kept, and compared with, but the tokens cannot be trained on.",
  disagreement: "It is kept, but teaches nothing while the reviewers disagree.",
  other_model: "It is kept, but teaches nothing: no policy of this server answered.",
  no_reply: "It is kept, but teaches nothing: the graph got no reply from this call.",
  unchanged: "It is kept, but teaches nothing: it says what the policy said.",
  superseded: "It is kept, but teaches nothing: the graph threw this call away.",
  no_scenario: "It is kept, but teaches nothing: the run has no scenario to be compared in.",
  alone: "It is kept, and teaches something once another run of this scenario (or call of this node) is reviewed.",
  all_equal: "It is kept, and teaches something once one of those gets another reward.",
});

/** @param {{reviews: any[], run: any}} props */
export function Reviews({ reviews, run }) {
  if (!reviews.length) return html`<p class="hint">Nobody has reviewed this run yet.</p>`;
  return html`<ul class="reviews">
    ${reviews.map(
      (one) =>
        html`<li key=${`${one.source} ${one.id}`}>
          <${Badge}>${one.kind}<//> ${one.name}
          ${one.value !== null && html` <strong>${number(one.value)}</strong>`}
          ${one.call_id && html` <span class="soft">of ${callName(run, one.call_id)}</span>`}
          <span class="soft"> by ${one.reviewer ?? "somebody"} (${one.source}), </span><${Ago} at=${one.at} />
          ${one.comment && html`<p>${one.comment}</p>`}
          ${one.correction && html`<pre tabindex="0">${said(one.correction.content)}</pre>`}
        </li>`,
    )}
  </ul>`;
}

/** @param {any} run @param {string} id */
function callName(run, id) {
  const at = run.turns.findIndex((/** @type {any} */ turn) => turn.call_id === id);
  return at < 0 ? id : `call ${at + 1}`;
}

/** @param {{run: any, reviewer: string, onSaved: () => void}} props `reviewer` is the name that the queue was asked for */
export function ReviewForm({ run, reviewer, onSaved }) {
  const [kind, setKind] = useState("reward");
  const [call, setCall] = useState("");
  const [planned, setPlanned] = useState(/** @type {any} */ (null));
  const [told, setTold] = useState(/** @type {{bad: boolean, text: string} | null} */ (null));
  const calls = run.turns.filter((/** @type {any} */ turn) => turn.call_id);
  const reply = calls.find((/** @type {any} */ turn) => turn.call_id === call)?.reply;
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    try {
      if (planned) {
        const kept = await ask("/v1/reviews", { method: "PUT", body: { reviews: [planned.review] } });
        if (kept.refused.length) throw new Error(`The server refused it: ${kept.refused[0].reason}.`);
        setPlanned(null);
        setTold({ bad: false, text: "Saved." });
        onSaved();
        return;
      }
      const review = asReview(new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)), run.id);
      const effect = await ask("/page/review-effect", { method: "POST", body: review });
      setPlanned({ review: { ...review, id: effect.revises ?? review.id }, effect });
      setTold(null);
    } catch (error) {
      setPlanned(null);
      setTold({ bad: true, text: /** @type {Error} */ (error).message });
    }
  };
  const changed = () => {
    setPlanned(null);
    setTold(null);
  };
  return html`<form class="review-form" onSubmit=${submit} onInput=${changed} aria-label="Give a review">
    <div class="row">
      <div>
        <label for="review-kind">What you give</label>
        <select id="review-kind" name="kind" value=${kind} onChange=${(/** @type {any} */ e) => setKind(e.target.value)}>
          <option value="reward">a reward</option>
          <option value="score">a score</option>
          <option value="correction">a corrected reply</option>
        </select>
      </div>
      <div>
        <label for="review-call">To</label>
        <select id="review-call" name="call_id" value=${call} onChange=${(/** @type {any} */ e) => setCall(e.target.value)}>
          <option value="">${kind === "correction" ? "choose a call" : "the whole run"}</option>
          ${calls.map(
            (/** @type {any} */ turn) =>
              html`<option value=${turn.call_id}>${callName(run, turn.call_id)} ${turn.node ?? ""}</option>`,
          )}
        </select>
      </div>
      ${kind === "score" &&
      html`<div><label for="review-name">Name</label><input id="review-name" name="name" required maxlength="256" /></div>`}
      ${kind !== "correction" &&
      html`<div>
        <label for="review-value">Value</label>
        <input id="review-value" name="value" required inputmode="decimal" size="8" />
      </div>`}
      <div>
        <label for="review-who">Your name</label>
        <input id="review-who" name="reviewer" defaultValue=${reviewer} required maxlength="256" autocomplete="name" />
      </div>
    </div>
    ${kind === "correction" &&
    html`<div>
      <label for="review-text">What it should have said</label>
      <textarea id="review-text" name="text" required rows="6" key=${call}>${said(reply?.content)}</textarea>
    </div>`}
    <div>
      <label for="review-comment">Comment</label>
      <textarea id="review-comment" name="comment" rows="2" maxlength="65536"></textarea>
    </div>
    ${planned &&
    html`<p class="notice" role="status">
      ${EFFECTS[planned.effect.effect]} ${planned.effect.revises && "It replaces what you said before."}
    </p>`}
    ${told && html`<p class=${told.bad ? "notice bad" : "notice"} role="alert">${told.text}</p>`}
    <div class="row"><button type="submit">${planned ? "Save" : "Say what it will do"}</button></div>
  </form>`;
}

/** The review that a form says, in the shape of `PUT /v1/reviews`. @param {FormData} form @param {string} run */
function asReview(form, run) {
  /** @param {string} name */
  const given = (name) => String(form.get(name) ?? "").trim();
  const kind = given("kind");
  const value = Number(given("value"));
  if (kind !== "correction" && (given("value") === "" || !Number.isFinite(value))) {
    throw new Error(`got “${given("value")}”, expected a number`);
  }
  if (kind === "correction" && !given("call_id")) throw new Error("Choose the call that you correct.");
  const names = /** @type {Record<string, string>} */ ({ reward: "human_reward", correction: "correction" });
  return newReview(run, given("reviewer"), {
    call_id: given("call_id") || null,
    kind,
    name: names[kind] ?? given("name"),
    value: kind === "correction" ? null : value,
    correction: kind === "correction" ? { role: "assistant", content: String(form.get("text")) } : null,
    comment: given("comment") || null,
  });
}

/** A review that is said now. @param {string} run @param {string} reviewer @param {object} about */
export function newReview(run, reviewer, about) {
  return { id: newId(), source: "page", trajectory: run, reviewer, at: Date.now() / 1000, ...about };
}
