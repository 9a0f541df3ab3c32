"""The e-mail agent's full task: search, filter, sort and select in an inbox, then answer."""
