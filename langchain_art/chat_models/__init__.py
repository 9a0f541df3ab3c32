"""`ChatART`, the chat model whose server keeps the sampled tokens."""

from langchain_art.chat_models.chat_art import ChatART

__all__ = ["ChatART"]
