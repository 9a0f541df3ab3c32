"""litellm, tagged by headers: it knows no `extra_body` for every provider."""

import json
import sys
from importlib.metadata import version

import litellm
from openai_answers import answers, user

base_url, *prefixes = sys.argv[1:]


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


for prefix in prefixes:  # noqa: B007 - the function above reads it
    got = {"client": f"litellm {version('litellm')}", **answers(ask)}

    try:
        ask("error", [user("hi")], model="nobody")
    except litellm.NotFoundError as error:
        got["error"] = [error.status_code, "model_not_found" if "nobody" in str(error) else None]

    print(json.dumps(got))
