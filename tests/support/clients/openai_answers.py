"""The features whose answers a client of Python gives in OpenAI's shape."""

import json

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
