// LangGraph.js with @langchain/openai: a graph of two nodes and a tool, tagged by its config.
import { END, MessagesAnnotation, START, StateGraph } from "@langchain/langgraph";
import { ToolNode } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { concat } from "@langchain/core/utils/stream";
import { tool } from "@langchain/core/tools";
import { readFileSync } from "node:fs";
import { z } from "zod";

const [baseURL, ...prefixes] = process.argv.slice(2);
let prefix;
const { version } = JSON.parse(readFileSync("node_modules/@langchain/langgraph/package.json", "utf8"));

// All that a graph needs to be trained: its model says where in the graph it is called.
const chat = (feature, config = {}, options = {}) =>
  new ChatOpenAI({
    model: "tiny",
    apiKey: "none",
    configuration: { baseURL },
    ...options,
    modelKwargs: {
      ...options.modelKwargs,
      art: {
        trajectory_id: `${prefix}-${feature}`,
        node: config.metadata?.langgraph_node ?? "agent",
        step: config.metadata?.langgraph_step ?? 0,
      },
    },
  });

const add = tool(({ a, b }) => String(a + b), {
  name: "add",
  description: "Add two numbers.",
  schema: z.object({ a: z.number().int(), b: z.number().int() }),
});
const agent = async ({ messages }, config) => {
  const model = chat("tools", config).bindTools([add]);
  if (messages.length === 1) return { messages: [await model.invoke(messages)] };
  let said; // `streaming: true` would count tokens with a table from the internet
  for await (const chunk of await model.stream(messages)) said = said ? concat(said, chunk) : chunk;
  return { messages: [said] };
};
const next = ({ messages }) => (messages.at(-1).tool_calls?.length ? "tools" : END);
const graph = new StateGraph(MessagesAnnotation)
  .addNode("agent", agent)
  .addNode("tools", new ToolNode([add]))
  .addEdge(START, "agent")
  .addConditionalEdges("agent", next, ["tools", END])
  .addEdge("tools", "agent")
  .compile();

for (prefix of prefixes) {
  const got = { client: `LangGraph.js ${version}` };

  const script = '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦The sum is ⁑4.⟧';
  const { messages } = await graph.invoke({ messages: [{ role: "user", content: script }] });
  const call = messages[1].tool_calls[0];
  got.tools = [call.name, call.args, messages.at(-1).text, messages.at(-1).usage_metadata.output_tokens > 0];

  const person = z.object({ name: z.string(), age: z.number().int() });
  const structured = chat("schema").withStructuredOutput(person, { method: "jsonSchema" });
  got.schema = await structured.invoke("The name is 'Bob', age 7.");

  const sure = await chat("logprobs", {}, { logprobs: true, topLogprobs: 2 }).invoke('⟦Hello.⟧');
  const entries = sure.response_metadata.logprobs.content;
  got.logprobs = [
    entries.length === sure.usage_metadata.output_tokens,
    entries.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2),
  ];

  const twice = await chat("n", {}, { n: 2 }).generate([[["user", '⟦Twice.⟧']]]);
  got.n = twice.generations[0].map((choice, index) => [index, choice.text]);

  const cut = await chat("stop", {}, { stop: ["three"], modelKwargs: { seed: 7 } }).invoke('⟦one two three⟧');
  got.stop = [cut.text.trim(), cut.response_metadata.finish_reason];

  try {
    await chat("error", {}, { model: "nobody", maxRetries: 0 }).invoke("hi");
  } catch (error) {
    got.error = [error.status, error.code];
  }

  console.log(JSON.stringify(got));
}
