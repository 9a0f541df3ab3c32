"""Plain `ChatOpenAI`, tagged by `extra_body`."""

import json
import sys
from importlib.metadata import version

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

base_url, *prefixes = sys.argv[1:]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Person(BaseModel):
    name: str
    age: int


def model(feature, step=0, **options):
    tags = {"trajectory_id": f"{prefix}-{feature}", "node": "agent", "step": step}
    return ChatOpenAI(
        model=options.pop("model", "tiny"),
        base_url=base_url,
        api_key="none",
        extra_body={"art": tags},
        **options,
    )


for prefix in prefixes:  # noqa: B007 - the function above reads it
    got = {"client": f"langchain-openai {version('langchain-openai')}"}

    script = (
        '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦The sum is ⁑4.⟧'
    )
    first = model("tools").bind_tools([add]).invoke(script)
    call = first.tool_calls[0]
    history = [("user", script), first, add.invoke(call)]
    chunks = list(model("tools", 1, stream_usage=True).bind_tools([add]).stream(history))
    text = "".join(chunk.text for chunk in chunks)
    counted = any(chunk.usage_metadata for chunk in chunks)
    got["tools"] = [call["name"], call["args"], text, counted]

    person = model("schema").with_structured_output(Person, method="json_schema")
    got["schema"] = person.invoke("The name is 'Bob', age 7.").model_dump()

    reply = model("logprobs", logprobs=True, top_logprobs=2).invoke("⟦Hello.⟧")
    entries = reply.response_metadata["logprobs"]["content"]
    got["logprobs"] = [
        len(entries) == reply.usage_metadata["output_tokens"],
        all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries),
    ]

    choices = model("n", n=2).generate([[HumanMessage("⟦Twice.⟧")]]).generations[0]
    got["n"] = [[index, choice.message.text] for index, choice in enumerate(choices)]

    reply = model("stop", seed=7).invoke("⟦one two three⟧", stop=["three"])
    got["stop"] = [reply.text.strip(), reply.response_metadata["finish_reason"]]

    try:
        model("error", model="nobody").invoke("hi")
    except openai.NotFoundError as error:
        got["error"] = [error.status_code, error.code]

    print(json.dumps(got))
