"""LangGraph programs of every shape, run against any server that captures calls.

``python -m tests.conformance.suite --server URL`` runs them; `docs/conformance.md` says what a
server must offer. A topology is a function in one of the modules of `cases`. To add one, write the
program and say which calls it makes::

    @topology(
        "a tool-calling agent",
        Expect("model", "look", step=1),
        Expect("model", "a door", step=3),
    )
    def tool_agent(kit: Kit) -> Program:
        agent = create_agent(kit.model, [look])
        yield kit.run(agent, kit.ask({"call": "look", "args": {"what": "door"}}, "a door"))
"""
