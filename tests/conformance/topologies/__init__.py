"""LangGraph programs of every shape, against the real server: what is captured, what trains.

A topology is a function in one of the ``cases_*.py`` files. To add one, write the program, say
which calls it makes, and run ``python -m tests.conformance.topologies`` for the table in the docs::

    @topology(
        "a tool-calling agent",
        Expect("model", "look", step=1),
        Expect("model", "a door", step=3),
    )
    def tool_agent(kit: Kit) -> Program:
        agent = create_agent(kit.model, [look])
        yield kit.run(agent, kit.ask({"call": "look", "args": {"what": "door"}}, "a door"))
"""
