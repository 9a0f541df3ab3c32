"""An agent that answers questions about an inbox: LangGraph's quickstart.

``OPENAI_API_KEY=… python -m examples.wrap_existing.before`` has a hosted model and needs
``langchain``; ``python -m examples.wrap_existing.after`` trains its own, at ``ART_BASE_URL``.
"""

from typing import Annotated, Any

from langchain.chat_models import init_chat_model
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition

from examples.email_search.inbox import MailStore, Scenario, build

mails = MailStore(build("out/wrap_existing/mails.sqlite3"))


class State(MessagesState):
    """The conversation, and whose inbox it is about."""

    inbox: int


@tool
def search(query: str, inbox: Annotated[int, InjectedState("inbox")]) -> str:
    """Search the inbox."""
    return mails.inbox(inbox).search(query)


@tool
def read(mail_id: int, inbox: Annotated[int, InjectedState("inbox")]) -> str:
    """Read a mail."""
    return mails.inbox(inbox).read(mail_id)


@tool
def answer(text: str) -> str:
    """Answer the question."""
    return text


tools = [search, read, answer]
llm = init_chat_model("openai:gpt-4.1-mini")
prompt = SystemMessage("Find the mail and answer with its date.")


def chatbot(state: State) -> dict[str, Any]:
    """Call the model."""
    return {"messages": [llm.bind_tools(tools).invoke([prompt, *state["messages"]])]}


def after_tools(state: State) -> str:
    """End with the answer, else let the model go on."""
    return END if state["messages"][-1].name == "answer" else "chatbot"


builder = StateGraph(State)
builder.add_node("chatbot", chatbot)
builder.add_node("tools", ToolNode(tools))
builder.add_edge(START, "chatbot")
builder.add_conditional_edges("chatbot", tools_condition)
builder.add_conditional_edges("tools", after_tools)
graph = builder.compile()


def ask(scenario: Scenario) -> str:
    """The agent's answer to a question."""
    state = graph.invoke({"messages": [("user", scenario.question)], "inbox": scenario.inbox})
    return state["messages"][-1].text


if __name__ == "__main__":
    for scenario in mails.scenarios("test", 5):
        print(scenario.question, ask(scenario), f"(it is {scenario.answer})")
