"""Chat completions: what is asked, checked; the call; the answer, whole or streamed."""
