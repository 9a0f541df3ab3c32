"""The server of langchain-art: keeps the tokens, samples from a policy, makes it better."""
