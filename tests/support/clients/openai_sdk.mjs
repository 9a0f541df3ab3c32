// The OpenAI SDK for JavaScript.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const [baseURL, ...prefixes] = process.argv.slice(2);
let prefix;
const client = new OpenAI({ baseURL, apiKey: "none" });
const { version } = JSON.parse(readFileSync("node_modules/openai/package.json", "utf8"));
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
const parameters = { type: "object", properties: numbers, required: ["a", "b"] };
const tools = [{ type: "function", function: { name: "add", parameters } }];
const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

const user = (content) => ({ role: "user", content });
const ask = (feature, messages, options = {}, step = 0) =>
  client.chat.completions.create({
    model: "tiny",
    messages,
    art: { trajectory_id: `${prefix}-${feature}`, node: "agent", step },
    ...options,
  });

for (prefix of prefixes) {
  const got = { client: `openai (JavaScript) ${version}` };

  const script = '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦The sum is ⁑4.⟧';
  const first = (await ask("tools", [user(script)], { tools })).choices[0].message;
  const call = first.tool_calls[0];
  const args = JSON.parse(call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: String(args.a + args.b) };
  const streaming = { tools, stream: true, stream_options: { include_usage: true } };
  let text = "";
  let usage;
  for await (const chunk of await ask("tools", [user(script), first, result], streaming, 1)) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  got.tools = [call.function.name, args, text, usage.completion_tokens > 0];

  const format = { type: "json_schema", json_schema: { name: "Person", schema } };
  const person = await ask("schema", [user("The name is 'Bob', age 7.")], { response_format: format });
  got.schema = JSON.parse(person.choices[0].message.content);

  const sure = await ask("logprobs", [user('⟦Hello.⟧')], { logprobs: true, top_logprobs: 2 });
  const entries = sure.choices[0].logprobs.content;
  got.logprobs = [
    entries.length === sure.usage.completion_tokens,
    entries.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2),
  ];

  const twice = await ask("n", [user('⟦Twice.⟧')], { n: 2 });
  got.n = twice.choices.map((choice) => [choice.index, choice.message.content]);

  const cut = await ask("stop", [user('⟦one two three⟧')], { stop: ["three"], seed: 7 });
  got.stop = [cut.choices[0].message.content.trim(), cut.choices[0].finish_reason];

  try {
    await ask("error", [user("hi")], { model: "nobody" });
  } catch (error) {
    if (!(error instanceof OpenAI.NotFoundError)) throw error;
    got.error = [error.status, error.code];
  }

  console.log(JSON.stringify(got));
}
