"""LangChain's own tests of a chat model class."""

from __future__ import annotations

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_art import ChatART


class TestChatART(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatART

    @property
    def chat_model_params(self) -> dict[str, str]:
        return {"model": "email-agent"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        return (
            {"ART_API_KEY": "key", "ART_BASE_URL": "http://box/v1"},
            {"model": "email-agent"},
            {"openai_api_key": "key", "openai_api_base": "http://box/v1"},
        )
