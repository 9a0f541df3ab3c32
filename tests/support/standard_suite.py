"""LangChain's own integration tests of a chat model, for `ChatART` against a server.

What they skip is inherent to a model that reads and writes text only: images, audio, video, PDF.
"""

from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_art import ChatART


@pytest.fixture(scope="module")
def vcr_config() -> dict[str, Any]:
    """The server is real and near: nothing is played back."""
    return {"record_mode": "all"}


@pytest.fixture(scope="module")
def vcr_cassette_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cassettes"))


class StandardSuite(ChatModelIntegrationTests):
    url: ClassVar[str] = ""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatART

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny", "base_url": self.url}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def enable_vcr_tests(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "base_model"


class FunctionCallingSuite(StandardSuite):
    """Of the suite, what the way of structured output changes."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


for _name in dir(FunctionCallingSuite):
    if _name.startswith("test_") and "structured_output" not in _name:
        setattr(FunctionCallingSuite, _name, None)
