/** What a view shows while it has nothing: waiting, an error, or the step that comes next. */
import { html, useLayoutEffect, useState } from "../vendor/htm-preact.js";
import { ask } from "../api.js";

/**
 * An empty state teaches the next step: what is missing here, and the command that brings it.
 *
 * @param {{title: string, children?: any, command?: string}} props
 */
export function Empty({ title, children, command }) {
  return html`<div class="empty">
    <h2>${title}</h2>
    ${children && html`<p>${children}</p>`}
    ${command && html`<pre tabindex="0"><code>${command}</code></pre>`}
  </div>`;
}

/** @param {{error: Error}} props */
export function Failed({ error }) {
  return html`<p class="notice bad" role="alert">${error.message}</p>`;
}

export function Waiting() {
  return html`<p class="waiting" role="status">Loading…</p>`;
}

/**
 * The answer to GET `path`, asked again when `path` or `again` changes; the last answer stays shown
 * meanwhile. It is asked before the browser paints, which it may do some frames later.
 *
 * @param {string | null} path null: nothing is asked
 * @param {unknown} [again]
 * @returns {{data: any, error: Error | null, path: string | null}} `path`: what was answered; null: nothing yet
 */
export function useAnswer(path, again) {
  const [state, setState] = useState(/** @type {any} */ ({ data: null, error: null, path: null }));
  useLayoutEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    ask(path, { signal: stop.signal }).then(
      (data) => setState({ data, error: null, path }),
      (error) => {
        if (!stop.signal.aborted) setState({ data: null, error, path });
      },
    );
    return () => stop.abort();
  }, [path, again]);
  return state;
}
