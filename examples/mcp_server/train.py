"""Train an agent for an MCP server: ``python -m examples.mcp_server.train``.

Nobody wrote tasks for the server, and nobody says which answers are right. A model writes the
tasks from what the server offers (`tasks`), and RULER's comparison of the runs of a task is the
only reward. Both models are scripted unless others are named (``--task-writer openai/o3 --judge
openai/o3``). Held-out tasks are measured by the right answers all the same, which the example
knows of its own data set and which neither model is shown.

``--server "uvx mcp-server-time"`` is any other server on standard input and output. It takes a real
model (``--base-url``), task writer and judge; its held-out tasks are measured by the judge.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.language_models import BaseChatModel

from examples.mcp_server import dataset, server
from examples.mcp_server.agent import answer, build_agent
from examples.mcp_server.scripted_models import ScriptedJudge, ScriptedWriter
from examples.mcp_server.session import McpServer
from examples.mcp_server.tasks import Split, Task, write_tasks
from examples.support.command import Given, train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import ChatART, FitResult, RulerEvaluator, Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "mcp-agent"
SCRIPTED = "scripted"
Known = Callable[[str], str | None]
"""The right answer to a task, or None if it is not known."""


def make_rollout(
    model: ChatART, started: McpServer, known: Known
) -> Callable[[Task], Awaitable[Run]]:
    """The user's part: run the graph on one task. Training runs have no reward of their own."""
    agent = build_agent(model, started.tools)

    async def rollout(task: Task) -> Run:
        async with capture(scenario=task.id) as run:
            state = await agent.ainvoke({"messages": [("user", task.text)]})
            right = known(task.text) if task.split == "test" else None
            if right is not None:
                run.reward = float(answer(state) == right)
        return run

    return rollout


def named(model: str, scripted: BaseChatModel) -> BaseChatModel:
    """The scripted stand-in, or a hosted model as litellm names it (``openai/o3``)."""
    if model == SCRIPTED:
        return scripted
    from langchain_litellm import ChatLiteLLM  # noqa: PLC0415 - the extra `ruler`

    return ChatLiteLLM(model=model)


def ruler(judge: str, cache: Path | None = None) -> RulerEvaluator:
    """The judge of training runs, which is told nothing but what the runs saw."""
    model = ScriptedJudge() if judge == SCRIPTED else judge
    return RulerEvaluator(model, context=None, cache=cache)


def tasks_of(setup: Setup, writer: str, offered: str) -> dict[Split, list[Task]]:
    """The tasks, written once: a fit that is resumed goes on with the same."""
    path = setup.out / "tasks.json"
    if not path.exists():
        written = write_tasks(
            named(writer, ScriptedWriter()),
            offered,
            setup.train_scenarios,
            setup.demo.held_out,
            setup.seed,
        )
        stored = {split: [asdict(task) for task in tasks] for split, tasks in written.items()}
        path.write_text(json.dumps(stored, indent=1) + "\n")
    loaded = json.loads(path.read_text())
    return {split: [Task(**task) for task in loaded[split]] for split in ("train", "test")}


def build_fit(setup: Setup, mcp_server: str | None = None, writer: str = SCRIPTED) -> Fit:
    """Tasks for a server, and the agent that has its tools.

    Args:
        setup: See there.
        mcp_server: The server's command. None: the example's, over a data set of the setup's seed.
        writer: Of the tasks: ``scripted``, or a hosted model.
    """
    known: Known = _unknown
    if mcp_server is None:
        database = dataset.build(setup.out / "climate.sqlite3", setup.seed)
        started = McpServer([sys.executable, server.__file__, str(database)])
        known = partial(dataset.answer_of, database)
    else:
        started = McpServer(shlex.split(mcp_server))
    tasks, model = tasks_of(setup, writer, started.offered), setup.chat()
    return Fit(
        trainer=setup.trainer([model], evaluator=setup.evaluator or ruler(SCRIPTED)),
        rollout=make_rollout(model, started, known),
        train=tasks["train"],
        held_out=tasks["test"],
        close=started.close,
    )


def _unknown(task: str) -> None:
    return None


DEMO = Demo(
    name="mcp-server",
    title="Agent of an MCP server",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
    steps=24,
    files=("climate.sqlite3", "tasks.json", "judge.sqlite3"),
)


def options(
    given: Given,
    mcp_server: Annotated[
        str | None, typer.Option("--server", help="Command of another MCP server")
    ] = None,
    task_writer: Annotated[
        str, typer.Option(help="scripted, or as litellm names a model")
    ] = SCRIPTED,
    judge: Annotated[str, typer.Option(help="scripted, or as litellm names a model")] = SCRIPTED,
) -> dict[str, Any]:
    """The MCP server, and the models that write its tasks and judge the runs."""
    if mcp_server is not None and SCRIPTED in (task_writer, judge):
        raise typer.BadParameter(
            f"the scripted task writer and judge know the example's own server; with --server "
            f"{mcp_server!r}, name models: --task-writer openai/o3 --judge openai/o3"
        )
    if mcp_server is not None and given.base_url is None:
        raise typer.BadParameter(
            "the small model knows the example's own server; with --server, name a server that has "
            "a real model: --base-url http://…/v1"
        )
    out = given.folder()

    def spent(result: FitResult, judging: Any) -> dict[str, Any]:
        return {"judge": {"model": judge, "cost": result.judge_cost}}

    return {
        "demo": replace(
            given.demo, build=partial(build_fit, mcp_server=mcp_server, writer=task_writer)
        ),
        "evaluator": lambda: ruler(judge, out / "judge.sqlite3"),
        "note": f" (RULER: {judge})",
        "more": spent,
    }


main = train_command(
    DEMO, "Train a small model to use the tools of an MCP server, by RULER alone.", options
)


if __name__ == "__main__":
    typer.run(main)
