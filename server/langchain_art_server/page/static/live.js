/**
 * What happens on the server, by server-sent events. The browser reconnects by itself, and then reads
 * everything again. A page that is not looked at has no stream: browsers have few connections for one
 * server.
 */
import { useEffect, useState } from "./vendor/htm-preact.js";
import { ask } from "./api.js";

/**
 * @typedef {{changed: string[], running_calls: number, job: string | null, message: string,
 *   progress: number | null, ready: boolean}} Happened
 * @typedef {(happened: Happened | null) => void} Listener null: read everything again
 */

/** @type {Set<Listener>} */
const listeners = new Set();
/** @type {EventSource | null} */
let source = null;
/** @type {Happened | null} */
let latest = null;
let begun = false;
/** Milliseconds in which a page shows its first answers. */
const SETTLED = 1000;

/** @param {Happened | null} happened */
function tell(happened) {
  if (happened) latest = happened;
  for (const listener of [...listeners]) listener(happened);
}

function open() {
  if (source || document.hidden || !listeners.size) return;
  source = new EventSource("/page/events");
  source.addEventListener("hello", () => {
    // No event tells what changed while there was no stream: since it was closed, or, the first
    // time, since the page got its first answers. These are shown first.
    setTimeout(() => tell(null), begun ? 0 : SETTLED);
    begun = true;
  });
  source.addEventListener("message", (event) => tell(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    if (source?.readyState !== EventSource.CLOSED) return; // it reconnects
    close();
    ask("/page/session").then(
      (session) => {
        if (!session.open) window.dispatchEvent(new Event("signed-out"));
        else setTimeout(open, 3000);
      },
      () => setTimeout(open, 3000),
    );
  });
}

function close() {
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

/** @param {Listener} listener */
function listen(listener) {
  listeners.add(listener);
  open();
  return () => {
    listeners.delete(listener);
    if (!listeners.size) close();
  };
}

/**
 * A number that grows when something of these kinds changed: "runs", "calls", "rewards", "reviews",
 * "jobs", "event" (the log of the job that runs) or "health".
 *
 * @param {...string} kinds
 */
export function useLive(...kinds) {
  const [count, setCount] = useState(0);
  useEffect(
    () =>
      listen((happened) => {
        if (!happened || happened.changed.some((kind) => kinds.includes(kind))) {
          setCount((/** @type {number} */ before) => before + 1);
        }
      }),
    [kinds.join()],
  );
  return count;
}

/** The last thing that happened since the page was loaded. @returns {Happened | null} */
export function useLatest() {
  const [happened, setHappened] = useState(latest);
  useEffect(() => listen((now) => now && setHappened(now)), []);
  return happened;
}
