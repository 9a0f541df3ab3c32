/** What was said: messages of one call as text, reasoning first, tool calls with their arguments. */
import { html } from "../vendor/htm-preact.js";

/** @param {{messages: any[]}} props */
export function Messages({ messages }) {
  return messages.map(
    (one, index) =>
      html`<div class="message" key=${index}>
        <h3>${one.role}${one.name ? ` ${one.name}` : ""}</h3>
        ${one.reasoning_content && html`<pre class="soft" tabindex="0" title="Reasoning">${said(one.reasoning_content)}</pre>`}
        ${said(one.content) && html`<pre tabindex="0">${said(one.content)}</pre>`}
        ${images(one.content).map(
          (name) => html`<p key=${name}><img src=${`/page/images/${name}`} alt=${`Image ${name.slice(0, 12)}`} /></p>`,
        )}
        ${(one.tool_calls ?? []).map(
          (/** @type {any} */ call) =>
            html`<pre tabindex="0">${call.function?.name}(${call.function?.arguments})</pre>`,
        )}
      </div>`,
  );
}

/** Whether a message says nothing and calls nothing. @param {any} message */
export function isEmpty(message) {
  return !said(message.content) && !images(message.content).length && !message.reasoning_content && !message.tool_calls?.length;
}

/** @param {any} content */
export function said(content) {
  if (typeof content === "string") return content;
  if (!content) return "";
  if (!Array.isArray(content)) return JSON.stringify(content, null, 1);
  const texts = content.filter((part) => !part?.sha256);
  return texts.map((part) => part?.text ?? JSON.stringify(part)).join("\n");
}

/** Names of the images in a message. @param {any} content @returns {string[]} */
function images(content) {
  return Array.isArray(content) ? content.map((part) => part?.sha256).filter(Boolean) : [];
}
