"""An agent for any MCP server: tasks written by a model, RULER as the only reward."""
