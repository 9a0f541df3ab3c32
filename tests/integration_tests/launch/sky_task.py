"""Run by SkyPilot's Python: what its command line makes of arguments, as JSON; nothing is run.

Of ``launch`` the task is told that it would hand to SkyPilot's API server; of others, the options.
"""

# pyright: basic
from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from sky.client import sdk  # pyright: ignore[reportMissingImports]
from sky.client.cli import command  # pyright: ignore[reportMissingImports]


def tell(task: Any, **options: Any) -> None:
    [resources] = task.resources
    resources.override_autostop_config(options["down"], options["idle_minutes_to_autostop"])
    found = {
        "cluster": options["cluster_name"],
        "asks": options["_need_confirmation"],
        "workdir": task.workdir,
        "accelerators": resources.accelerators,
        "cloud": str(resources.cloud),
        "ports": resources.ports,
        "idle_minutes": resources.autostop_config.idle_minutes,
        "down": resources.autostop_config.down,
        "envs": task.envs,
        "secrets": {name: one.get_secret_value() for name, one in task.secrets.items()},
        "setup": task.setup,
        "run": task.run,
    }
    print(json.dumps(found))  # noqa: T201
    sys.exit(0)


name, *arguments = sys.argv[1:]
if name == "launch":
    with patch.object(sdk, "launch", tell):
        command.cli([name, *arguments])
else:
    context = command.cli.commands[name].make_context(name, arguments)
    print(json.dumps({key: str(value) for key, value in context.params.items()}))  # noqa: T201
