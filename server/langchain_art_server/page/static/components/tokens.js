/** The sampled tokens of one call, coloured by what each taught or by how probable it was. */
import { html, useState } from "../vendor/htm-preact.js";
import { number, signed } from "../format.js";
import { Fact } from "./facts.js";
import { Failed, useAnswer, Waiting } from "./states.js";

/** Log-probabilities (nats) from which on a token is coloured fully. */
const IMPROBABLE = 4;

/**
 * @param {{call: string, credit: {advantage: number, token_advantages: number[] | null,
 *   excluded_because: string | null} | null, excluded: string | null, largest: number}} props
 *   `largest` advantage of the run, either way; `excluded`: why nothing is trained, by the audit
 */
export function Tokens({ call, credit, excluded, largest }) {
  const { data, error } = useAnswer(`/page/calls/${encodeURIComponent(call)}/tokens`);
  const [by, setBy] = useState("advantage");
  const [at, setAt] = useState(-1);
  if (error) return html`<${Failed} error=${error} />`;
  if (!data) return html`<${Waiting} />`;
  const count = data.token_ids.length;
  const why = credit ? credit.excluded_because : excluded;
  /** @param {number} index */
  const advantage = (index) => credit?.token_advantages?.[index] ?? credit?.advantage ?? 0;
  /** @param {number} index */
  const shade = (index) => {
    if (by === "advantage") {
      if (!credit || why) return undefined;
      const size = largest ? Math.abs(advantage(index)) / largest : 0;
      const colour = advantage(index) >= 0 ? "--good" : "--bad";
      return mixed(colour, 10 + 28 * size);
    }
    return mixed("--busy", (38 * Math.min(-data.logprobs[index], IMPROBABLE)) / IMPROBABLE);
  };
  /** @param {KeyboardEvent} event */
  const move = (event) => {
    const step = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1 })[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(count - 1, at + step)));
  };
  /** @param {Event} event one listener for all tokens */
  const chosen = (event) => {
    const token = /** @type {HTMLElement} */ (event.target).dataset.at;
    if (token !== undefined) setAt(Number(token));
  };
  return html`<div class="tokens-of">
    <div class="row">
      <span class="soft">${number(count)} sampled tokens, coloured by</span>
      ${["advantage", "log-probability"].map(
        (one) =>
          html`<button class="quiet" aria-pressed=${by === one} onClick=${() => setBy(one)}>${one}</button>`,
      )}
    </div>
    ${data.texts === null &&
    html`<p class="hint">The server has no tokenizer file of this model; tokens are shown by number.</p>`}
    <p
      class=${why ? "tokens excluded" : "tokens"}
      tabindex="0"
      role="group"
      aria-label="Sampled tokens: choose one with a click or the arrow keys"
      onClick=${chosen}
      onKeyDown=${move}
    >
      ${data.token_ids.map((/** @type {number} */ id, /** @type {number} */ index) => {
        const text = data.texts ? data.texts[index] || "◌" : `#${id} `;
        return html`<span
          key=${index}
          data-at=${index}
          class=${index === at ? "token chosen" : "token"}
          style=${{ background: shade(index) }}
          >${text === "\n" ? "↵\n" : text}</span
        >`;
      })}
    </p>
    <div class="facts" role="status">
      ${at < 0
        ? html`<span class="soft">Choose a token to see its numbers.</span>`
        : html`<${Fact} name="Token" value=${data.texts?.[at] ? JSON.stringify(data.texts[at]) : `#${data.token_ids[at]}`} />
            <${Fact}
              name="Advantage"
              value=${credit && !why ? signed(advantage(at)) : "none"}
              help="How much more (or less) probable training made this token, compared with the other runs of its group. All tokens of a call have the same, unless they were given one by one."
            />
            <${Fact}
              name="Log-probability"
              value=${data.logprobs[at].toFixed(4)}
              unit=${`p ${number(Math.exp(data.logprobs[at]))}`}
              help="Under the version that sampled it, at its temperature."
            />
            ${why && html`<${Fact} name="Excluded because" value=${why} bad=${true} />`}`}
    </div>
  </div>`;
}

/** @param {string} colour @param {number} percent */
function mixed(colour, percent) {
  return `color-mix(in srgb, var(${colour}) ${percent.toFixed(0)}%, transparent)`;
}
