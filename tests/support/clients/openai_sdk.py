"""The OpenAI SDK for Python, 2.x or 3.x."""

import json
import sys

import openai
from openai_answers import answers, user

base_url, *prefixes = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none")


def ask(feature, messages, step=0, model="tiny", **options):
    tags = {"trajectory_id": f"{prefix}-{feature}", "node": "agent", "step": step}
    return client.chat.completions.create(
        model=model, messages=messages, extra_body={"art": tags}, **options
    )


for prefix in prefixes:  # noqa: B007 - the function above reads it
    got = {"client": f"openai {openai.__version__}", **answers(ask)}

    try:
        ask("error", [user("hi")], model="nobody")
    except openai.NotFoundError as error:
        got["error"] = [error.status_code, error.code]

    print(json.dumps(got))
