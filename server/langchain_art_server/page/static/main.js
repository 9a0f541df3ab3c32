/** The page's frame: menu, the view of the address, and the login where the server has a key. */
import { html, render, useCallback, useErrorBoundary, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { ask, askEarly, setToken } from "./api.js";
import { Failed, Waiting } from "./components/states.js";
import { Login } from "./login.js";
import { here, link, usePlace, VIEWS } from "./router.js";

function Page() {
  const place = usePlace();
  const [session, setSession] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const look = useCallback(() => {
    ask("/page/session").then((found) => {
      setToken(found.token);
      setSession(found);
      setError(null);
    }, setError);
  }, []);
  useLayoutEffect(() => {
    look();
    const out = () => setSession((/** @type {any} */ known) => known && { ...known, open: false });
    addEventListener("signed-out", out);
    return () => removeEventListener("signed-out", out);
  }, []);
  if (error) return html`<main><${Failed} error=${error} /></main>`;
  if (!session) return html`<main><${Waiting} /></main>`;
  if (!session.open) return html`<${Login} onDone=${look} />`;
  const leave = async () => {
    await ask("/page/logout", { method: "POST" }).catch(() => undefined);
    look();
  };
  return html`
    <a class="skip" href="#content" onClick=${toContent}>Skip to content</a>
    <header class="top">
      <a class="brand" href=${link("overview")}>langchain-art</a>
      <nav aria-label="Views">
        ${VIEWS.map(
          (one) =>
            html`<a
              href=${link(one.name)}
              aria-current=${one.name === place.view ? "page" : undefined}
              >${one.title}</a
            >`,
        )}
      </nav>
      ${session.locked && html`<button class="quiet" onClick=${leave}>Log out</button>`}
    </header>
    <main id="content" tabindex="-1"><${Shown} key=${place.view} place=${place} /></main>
  `;
}

/** @param {Event} event the router owns the hash, so the focus is moved by hand */
function toContent(event) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

/** The view of the address, whose module is loaded now. @param {{place: any}} props */
function Shown({ place }) {
  const entry = VIEWS.find((one) => one.name === place.view);
  const [view, setView] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const [broken] = useErrorBoundary((found) => console.error(found));
  useLayoutEffect(() => {
    entry?.load().then((module) => setView(() => module.default), setError);
    document.title = `${entry?.title ?? "Not found"} · langchain-art`;
  }, [entry]);
  if (!entry) return html`<${Failed} error=${Error(`There is no view “${place.view}”.`)} />`;
  if (error || broken) return html`<${Failed} error=${error ?? broken} />`;
  return view ? html`<${view} path=${place.path} query=${place.query} />` : html`<${Waiting} />`;
}

// While the session is asked for; without one, the view asks again after the login.
const entry = VIEWS.find((one) => one.name === here().view);
const first = entry?.first?.();
if (first) askEarly(first);
entry?.load();
const root = /** @type {HTMLElement} */ (document.getElementById("page"));
root.replaceChildren();
render(html`<${Page} />`, root);
