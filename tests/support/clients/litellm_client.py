"""litellm, tagged by headers: it knows no `extra_body` for every provider."""

import json
import sys
from importlib.metadata import version

import litellm

base_url, *prefixes = sys.argv[1:]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "Person", "schema": SCHEMA}}


def ask(feature, messages, step=0, model="tiny", **options):
    tags = {"trajectory-id": f"{prefix}-{feature}", "node": "agent", "step": str(step)}
    return litellm.completion(
        model=f"openai/{model}",
        base_url=base_url,
        api_key="none",
        messages=messages,
        extra_headers={f"x-art-{name}": value for name, value in tags.items()},
        **options,
    )


def user(text):
    return {"role": "user", "content": text}


for prefix in prefixes:  # noqa: B007 - the function above reads it
    got = {"client": f"litellm {version('litellm')}"}

    script = 'SCRIPT [{"call": "add", "args": {"a": 2, "b": 3}}, "The sum is {last}."]'
    messages = [user(script)]
    first = ask("tools", messages, tools=[ADD]).choices[0].message
    call = first.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask("tools", [*messages, first, result], 1, tools=[ADD], **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    counted = any(getattr(chunk, "usage", None) for chunk in chunks)
    got["tools"] = [call.function.name, arguments, text, counted]

    reply = ask("schema", [user("The name is 'Bob', age 7.")], response_format=FORMAT)
    got["schema"] = json.loads(reply.choices[0].message.content)

    reply = ask("logprobs", [user('SCRIPT ["Hello."]')], logprobs=True, top_logprobs=2)
    entries = reply.choices[0].logprobs.content
    got["logprobs"] = [
        len(entries) == reply.usage.completion_tokens,
        all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries),
    ]

    reply = ask("n", [user('SCRIPT ["Twice."]')], n=2)
    got["n"] = [[choice.index, choice.message.content] for choice in reply.choices]

    reply = ask("stop", [user('SCRIPT ["one two three"]')], stop=["three"], seed=7)
    got["stop"] = [reply.choices[0].message.content.strip(), reply.choices[0].finish_reason]

    try:
        ask("error", [user("hi")], model="nobody")
    except litellm.NotFoundError as error:
        got["error"] = [error.status_code, "model_not_found" if "nobody" in str(error) else None]

    print(json.dumps(got))
