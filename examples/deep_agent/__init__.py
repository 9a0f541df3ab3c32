"""A deep agent on tasks of reasoning-gym: it asks a sub-agent, which searches a file."""
