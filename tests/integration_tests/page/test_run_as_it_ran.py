"""A run of a real graph, captured, in a real browser: time line, price, trace, edited replies."""

from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from playwright.sync_api import expect

from langchain_art import ChatART, capture
from langchain_art.client.sync_client import ArtClient
from langchain_art.export.ids import trace_url
from langchain_art.wire import TrajectoryGroup
from tests.conftest import LANGFUSE_PROJECT
from tests.support.browser import Watched
from tests.support.drawn_runs import drawn_run
from tests.support.live_server import LiveServer

#: A list of the time line as nested lists: what each part is called.
READ = """() => {
  const read = (list) => [...list.children].map((item) => {
    const said = item.querySelector(":scope > .part > .part-name") ?? item;
    const inner = item.querySelector(":scope > ol");
    const name = (said === item ? item.firstElementChild : said).textContent;
    const named = name.replace(/\\s+/g, " ").trim();
    return inner ? [named, read(inner)] : named;
  });
  return read(document.querySelector(".timeline"));
}"""


def test_the_time_line_has_the_graph_as_it_ran(
    watched: Watched, art_server: LiveServer, client: ArtClient
) -> None:
    run = drawn_run(art_server)
    assert run.status == "interrupted" and len(run.turns) == 7, run
    client.post_groups([TrajectoryGroup(id=f"g-{run.id}", trajectories=(run,))])
    page = watched.go(f"runs/{run.id}")
    page.set_viewport_size({"width": 390, "height": 900})
    expect(page.get_by_role("list", name="Time line of the run")).to_be_visible()
    shown = page.evaluate(READ)
    shown[1][1].sort()  # they meet at a barrier: either may begin first
    assert shown == [
        ["team", ["writer retried", "writer attempt 2 retried", "writer attempt 3"]],
        ["2 side by side", ["left", "right"]],
        ["helper", ["model", "tools search", "model"]],
        "interrupted",
    ]
    edges = "all => all.map(one => [one.getBoundingClientRect().left, one.clientWidth])"
    tracks: list[list[float]] = page.locator(".part-track").evaluate_all(edges)
    for left, width in tracks:  # one scale, however deep
        assert abs(left - tracks[0][0]) < 1 and abs(width - tracks[0][1]) <= 1
    usd = sum(turn.latency or 0.0 for turn in run.turns if turn.ours) * 3.6 / 3600
    shown = page.locator(".fact", has_text="Cost").locator(".fact-value").inner_text()
    assert float(shown[1:].split()[0]) == pytest.approx(usd, rel=0.01)
    link = page.get_by_role("link", name="Langfuse")
    base, _, project = LANGFUSE_PROJECT.partition("/project/")
    expect(link).to_have_attribute("href", trace_url(base, project, run.id))


def test_an_edited_reply_is_shown_as_sampled_with_the_edit_folded_below(
    watched: Watched, art_server: LiveServer, client: ArtClient, http: httpx.Client
) -> None:
    model = ChatART(model=art_server.policy, base_url=art_server.base_url, max_tokens=8)
    edit = "<img src=x onerror=\"window.pwned = 'edit'\"> <b>short</b>"

    def edits(state: Any) -> Any:
        reply = model.invoke(state["messages"])
        reply.content = edit
        return {"messages": [reply]}

    def leaves(state: Any) -> Any:
        return {"messages": [model.invoke([HumanMessage("And?")])]}

    graph = StateGraph(MessagesState).add_sequence([("edits", edits), ("leaves", leaves)])
    with capture() as run:
        graph.add_edge(START, "edits").compile().invoke({"messages": [HumanMessage("Which?")]})
    told = run.trajectory()
    changed, kept = told.turns
    assert changed.reply and changed.call_id and changed.edited and not kept.edited
    client.post_groups([TrajectoryGroup(id=f"g-{run.id}", trajectories=(told,))])
    tokens = http.get(f"/page/calls/{changed.call_id}/tokens").json()
    page = watched.go(f"runs/{run.id}?call=0")
    call = page.locator("#call-0")
    expect(call.locator("summary").first).to_contain_text("changed by the graph")
    said = call.locator(".call-body > .message pre")
    expect(said.last).to_have_text(changed.reply["content"])
    folded = call.locator(".edited")
    expect(folded.locator("pre")).not_to_be_visible()
    folded.get_by_text("changed by the graph to …").click()
    expect(folded.locator("pre")).to_be_visible()
    assert folded.locator("pre").text_content() == edit
    assert page.locator("main img, main b").count() == 0
    assert page.evaluate("window.pwned") is None
    expect(call.locator(".token")).to_have_count(len(tokens["token_ids"]))
    page.locator("#call-1 > summary").click()
    expect(page.locator("#call-1 .call-body")).to_be_visible()
    expect(page.locator("#call-1 .edited")).to_have_count(0)
