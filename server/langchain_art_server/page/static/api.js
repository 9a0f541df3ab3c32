/**
 * What the page asks the server. Every answer is JSON; an error is an `ApiError` with the server's
 * own words. What a model, a tool or a person said is shown as text only: no module sets innerHTML.
 */

export class ApiError extends Error {
  /** @param {number} status 0: the server did not answer. @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The token that state-changing requests carry; empty where the server has no key. */
let token = "";

/** @param {string} value */
export function setToken(value) {
  token = value;
}

/** Answers to questions that were asked before their view was there. @type {Map<string, Promise<any>>} */
const early = new Map();

/**
 * Ask what a view will ask first, while its modules are loaded; `ask` then gives that answer, once.
 *
 * @param {string} path
 */
export function askEarly(path) {
  const answer = ask(path);
  early.set(path, answer);
  answer.catch(() => early.delete(path)); // the view asks itself, and shows the error
}

/**
 * Ask, and read the answer as JSON.
 *
 * @param {string} path for instance "/v1/policies"
 * @param {{method?: string, body?: unknown, key?: string, signal?: AbortSignal}} [options] `body` is sent as
 *   JSON; with the same `key`, what is ordered is ordered once
 * @returns {Promise<any>}
 */
export async function ask(path, { method = "GET", body, key, signal } = {}) {
  const known = method === "GET" && early.get(path);
  if (known) {
    early.delete(path);
    return known;
  }
  /** @type {Record<string, string>} */
  const headers = {};
  if (method !== "GET" && token) headers["X-ART-Token"] = token;
  if (key) headers["Idempotency-Key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const sent = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method, headers, body: sent, signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer. Is it running?");
  }
  const text = await response.text();
  let answer;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(response.status, `The answer to ${path} is not JSON.`);
  }
  if (!response.ok) {
    if (response.status === 401) window.dispatchEvent(new Event("signed-out"));
    throw new ApiError(response.status, answer?.error?.message ?? `got ${response.status}`);
  }
  return answer;
}

/** An id that nothing else has. */
export function newId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...random].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * A path with a query; what is undefined, null or "" is left out.
 *
 * @param {string} path
 * @param {Record<string, string | number | boolean | null | undefined>} query
 */
export function withQuery(path, query) {
  const known = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") known.set(name, String(value));
  }
  const text = known.toString();
  return text ? `${path}?${text}` : path;
}
