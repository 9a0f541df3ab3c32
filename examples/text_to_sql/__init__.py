"""Text-to-SQL with a checker: a writer, an execution, a checker and a rewrite, each node scored."""
