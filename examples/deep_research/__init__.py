"""Research in the shape of deep-research agents: a planner, searchers side by side, a writer."""
