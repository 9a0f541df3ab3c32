/** The login, shown where the server has a key and the browser has no session. */
import { html, useState } from "./vendor/htm-preact.js";
import { ask } from "./api.js";
import { Failed } from "./components/states.js";

/** @param {{onDone: () => void}} props */
export function Login({ onDone }) {
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const [busy, setBusy] = useState(false);
  const send = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.currentTarget);
    const key = new FormData(form).get("key");
    setBusy(true);
    setError(null);
    try {
      await ask("/page/login", { method: "POST", body: { key } });
      onDone();
    } catch (found) {
      setError(/** @type {Error} */ (found));
    }
    setBusy(false);
  };
  return html`<main class="login">
    <h1>langchain-art</h1>
    <form onSubmit=${send}>
      <label for="key">API key of this server</label>
      <input id="key" name="key" type="password" autocomplete="current-password" required autofocus />
      <p class="hint">The value of ART_API_KEY that the server was started with.</p>
      <button disabled=${busy}>Log in</button>
      ${error && html`<${Failed} error=${error} />`}
    </form>
  </main>`;
}
