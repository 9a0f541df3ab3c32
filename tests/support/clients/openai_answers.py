"""The features, for a client of Python that gives its answers in OpenAI's shape."""

import json
import sys

import openai

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


def user(text):
    return {"role": "user", "content": text}


def report(client, ask, code=lambda error: error.code):
    """For each PREFIX, one JSON line with what each feature gave.

    Args:
        client: the client's name and version.
        ask: (tags, messages, model="tiny", **options) -> the answer to one call.
        code: of the error of an unknown model.
    """
    for prefix in sys.argv[2:]:

        def tagged(feature, messages, step=0, prefix=prefix, **options):
            tags = {"trajectory_id": f"{prefix}-{feature}", "node": "agent", "step": step}
            return ask(tags, messages, **options)

        got = {"client": client, **answers(tagged)}
        try:
            tagged("error", [user("hi")], model="nobody")
        except openai.NotFoundError as error:
            got["error"] = [error.status_code, code(error)]
        print(json.dumps(got))


def headers(tags):
    """Tags as headers, for clients that know no `extra_body` or drop it."""
    return {f"x-art-{name.replace('_', '-')}": str(value) for name, value in tags.items()}


def said_nobody(error):
    """The code of an error that has only the server's words."""
    return "model_not_found" if "nobody" in str(error) else None


def answers(ask):
    """What each feature gives; `ask(feature, messages, step=0, **options)` makes one call."""
    got = {}

    script = (
        '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦The sum is ⁑4.⟧'
    )
    messages = [user(script)]
    first = ask("tools", messages, tools=[ADD]).choices[0].message
    call = first.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask("tools", [*messages, first, result], 1, tools=[ADD], **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    counted = any(usage.completion_tokens > 0 for usage in usages)
    got["tools"] = [call.function.name, arguments, text, counted]

    reply = ask("schema", [user("The name is 'Bob', age 7.")], response_format=FORMAT)
    got["schema"] = json.loads(reply.choices[0].message.content)

    reply = ask("logprobs", [user("⟦Hello.⟧")], logprobs=True, top_logprobs=2)
    entries = reply.choices[0].logprobs.content
    got["logprobs"] = [
        len(entries) == reply.usage.completion_tokens,
        all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries),
    ]

    reply = ask("n", [user("⟦Twice.⟧")], n=2)
    got["n"] = [[choice.index, choice.message.content] for choice in reply.choices]

    reply = ask("stop", [user("⟦one two three⟧")], stop=["three"], seed=7)
    got["stop"] = [reply.choices[0].message.content.strip(), reply.choices[0].finish_reason]
    return got
