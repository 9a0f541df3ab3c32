/** Small parts that every view is made of: a number with its help, a table, a badge. */
import { html } from "../vendor/htm-preact.js";
import { ago, number } from "../format.js";

/**
 * A word of help beside a term: shown on hover, focus and touch.
 *
 * @param {{text: string}} props
 */
export function Help({ text }) {
  return html`<span class="help" tabindex="0" role="note" aria-label=${text} data-help=${text}
    >?</span
  >`;
}

/**
 * A number with its name.
 *
 * @param {{name: string, value: any, help?: string, unit?: string, bad?: boolean}} props
 */
export function Fact({ name, value, help, unit, bad }) {
  const shown = typeof value === "number" ? number(value) : (value ?? "–");
  return html`<div class=${bad ? "fact bad" : "fact"}>
    <span class="fact-name">${name} ${help && html`<${Help} text=${help} />`}</span>
    <span class="fact-value">${shown}${unit && html`<small> ${unit}</small>`}</span>
  </div>`;
}

/**
 * A table that scrolls sideways by itself where it is wider than the page.
 *
 * @template R
 * @param {{
 *   label: string,
 *   columns: {title: string, help?: string, cell: (row: R) => any, number?: boolean}[],
 *   rows: R[],
 *   id: (row: R) => string | number,
 * }} props
 */
export function Table({ label, columns, rows, id }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead>
        <tr>
          ${columns.map(
            (one) =>
              html`<th scope="col" class=${one.number ? "num" : ""}>
                ${one.title} ${one.help && html`<${Help} text=${one.help} />`}
              </th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr key=${id(row)}>
              ${columns.map((one) => html`<td class=${one.number ? "num" : ""}>${one.cell(row)}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {{kind?: "good" | "bad" | "busy" | "", children?: any}} props */
export function Badge({ kind = "", children }) {
  return html`<span class=${`badge ${kind}`}>${children}</span>`;
}

/** A time, said as how long ago it was. @param {{at: number}} props `at` in seconds since 1970 */
export function Ago({ at }) {
  const when = new Date(at * 1000);
  return html`<time datetime=${when.toISOString()} title=${when.toLocaleString()}>${ago(at)}</time>`;
}

/**
 * Links to each policy of a view, where there are several.
 *
 * @param {{policies: string[], chosen: string, to: (policy: string) => string}} props
 */
export function PolicyLinks({ policies, chosen, to }) {
  if (policies.length < 2) return null;
  return html`<nav class="row" aria-label="Policies">
    ${policies.map(
      (one) =>
        html`<a key=${one} class="button quiet" aria-current=${one === chosen ? "true" : undefined} href=${to(one)}
          >${one}</a
        >`,
    )}
  </nav>`;
}
