/**
 * Where the page is: `#/runs/RUN?policy=NAME` is the view "runs" with the path ["RUN"] and a query.
 * A view is a module of `views/`, loaded when it is first shown; its default export is a component
 * that is given `path` and `query`.
 */
import { useEffect, useState } from "./vendor/htm-preact.js";

/**
 * @typedef {{path: string[], query: URLSearchParams}} Place
 * @typedef {(props: Place) => any} View
 * @typedef {{name: string, title: string, load: () => Promise<{default: View}>, first?: () => string | null}} Entry
 *   `first`: what the view of the address asks the server first, as it will write it
 */

/** In the order of the menu. @type {Entry[]} */
export const VIEWS = [
  {
    name: "overview",
    title: "Overview",
    first: () => "/page/overview",
    load: () => {
      import("./components/curves.js"); // with what it draws by: not file by file
      import("./vendor/uplot.js");
      import("./metrics.js");
      return import("./views/overview.js");
    },
  },
  {
    name: "runs",
    title: "Runs",
    first: () => {
      const [id, more] = here().path;
      return id && !more ? `/page/runs/${encodeURIComponent(id)}` : null;
    },
    load: () => {
      import("./components/reviews.js"); // as above
      import("./components/run_table.js");
      if (here().path.length === 1) {
        import("./components/timeline.js");
        import("./components/messages.js");
        import("./components/tokens.js");
        import("./views/run.js");
      }
      return import("./views/runs.js");
    },
  },
  { name: "review", title: "Review", load: () => import("./views/review.js") },
  { name: "jobs", title: "Jobs", load: () => import("./views/jobs.js") },
  { name: "versions", title: "Versions", load: () => import("./views/versions.js") },
];

/** @returns {Place & {view: string}} */
export function here() {
  const [where = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [view, ...path] = where.split("/").map(decoded);
  return { view: view || VIEWS[0].name, path, query: new URLSearchParams(query) };
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a stray % that somebody typed
  }
}

/**
 * The address of a view, for `href`.
 *
 * @param {string} view
 * @param {string[]} [path]
 * @param {Record<string, string>} [query]
 */
export function link(view, path = [], query = {}) {
  const where = [view, ...path].map(encodeURIComponent).join("/");
  const known = new URLSearchParams(query).toString();
  return `#/${where}${known ? `?${known}` : ""}`;
}

/** Where the page is, kept up to date. */
export function usePlace() {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const moved = () => setPlace(here());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}
