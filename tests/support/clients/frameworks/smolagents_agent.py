"""smolagents: a JSON schema by the model itself, a streamed run."""

import json

from agent_report import PERSON, Person, add, report
from shown import agent, answer, model
from smolagents import ChatMessageStreamDelta

#: Its agents answer by a tool of their own, `final_answer`.
SUM = (
    '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦<tool_call>\n'
    '{"name": "final_answer", "arguments": {"answer": "The sum is 5."}}\n</tool_call>⟧'
)


def schema(base_url, run):
    form = {"name": "Person", "schema": Person.model_json_schema()}
    reply = model(base_url, run).generate(
        [{"role": "user", "content": PERSON}],
        response_format={"type": "json_schema", "json_schema": form},
    )
    return json.loads(reply.content)


def stream(base_url, run):
    events = list(agent(base_url, run, [add], stream_outputs=True).run(SUM, stream=True))
    deltas = [event for event in events if isinstance(event, ChatMessageStreamDelta)]
    return [events[-1].output, len(deltas) > 2]


report("smolagents", answer, schema, stream, question=SUM)
