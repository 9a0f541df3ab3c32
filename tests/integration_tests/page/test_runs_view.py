"""Runs in a real browser: found, read token by token, reviewed; and what they say is text alone."""

import uuid
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from langchain_art.client.sync_client import ArtClient
from langchain_art.export.ids import trace_url
from langchain_art.wire import Review, TrajectoryGroup
from tests.conftest import LANGFUSE_PROJECT
from tests.support.browser import Watched
from tests.support.drawn_runs import drawn_run
from tests.support.live_server import LiveServer
from tests.support.markup_strings import some_markup_strings
from tests.support.reviewed_runs import MakeRuns
from tests.support.steps_of_a_fit import run_of


def test_an_advantage_in_three_clicks_and_a_review_as_the_client_reads_it(
    watched: Watched, own_policy: str, make_runs: MakeRuns, client: ArtClient, http: httpx.Client
) -> None:
    policy = own_policy
    runs = make_runs(2)
    for run, reward in zip(runs, (1.0, 0.0), strict=True):
        client.reward(run, reward)
    job = client.train([[run.id for run in runs]], policy)
    client.wait(job)
    credit = http.get(f"/page/runs/{runs[0].id}/credit/{job.id}").json()["turns"][0]

    page = watched.go("runs")
    page.get_by_label("Policy").fill(policy)
    page.get_by_label("Order").select_option("reward")
    page.get_by_role("button", name="Filter").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    page.get_by_label("Words").fill("kept while the list is read anew")
    [late] = make_runs(1)  # listed without a click
    expect(rows).to_have_count(3)
    expect(page.get_by_label("Words")).to_have_value("kept while the list is read anew")
    expect(rows.nth(2)).to_contain_text(late.id)
    expect(rows.nth(0)).to_contain_text(runs[0].id)

    rows.nth(0).get_by_role("link", name=runs[0].id).click()  # one
    page.locator("details.call > summary").first.click()  # two
    page.locator(".token").nth(1).click()  # three
    shown = page.locator(".fact", has_text="Advantage").locator(".fact-value")
    expect(shown).to_have_text(f"+{credit['advantage']:.3g}")
    logprob = client.call(runs[0].turns[0].call_id or "")["logprobs"]
    facts = page.locator(".tokens-of .fact", has_text="Log-probability")
    expect(facts).to_contain_text(f"{logprob[1]:.4f}")
    page.keyboard.press("ArrowRight")
    expect(facts).to_contain_text(f"{logprob[2]:.4f}")

    form = page.get_by_role("form", name="Give a review")
    form.get_by_label("Value").fill("0.25")
    form.get_by_label("Your name").fill("Ann <b>")
    form.get_by_label("Comment").fill("Too long.")
    form.get_by_role("button", name="Say what it will do").click()
    expect(form.get_by_role("status")).to_contain_text("once another run of this scenario")
    assert client.reviews(run=runs[0]) == []  # nothing is kept before it is said
    form.get_by_role("button", name="Save").click()
    expect(page.locator(".reviews li")).to_contain_text("Ann <b>")
    [kept] = client.reviews(run=runs[0])
    assert (kept.value, kept.name, kept.kind) == (0.25, "human_reward", "reward")
    assert (kept.reviewer, kept.comment, kept.source) == ("Ann <b>", "Too long.", "page")
    form.get_by_label("What you give").select_option("correction")
    form.get_by_label("To", exact=True).select_option(index=1)
    form.get_by_label("What it should have said").fill("On 14 March.")
    form.get_by_role("button", name="Say what it will do").click()
    expect(form.get_by_role("status")).to_contain_text("prefer this reply")
    form.get_by_role("button", name="Save").click()
    expect(page.locator(".reviews li")).to_have_count(2)
    corrected = client.reviews(run=runs[0])[1]
    assert corrected.correction == {"role": "assistant", "content": "On 14 March."}
    assert corrected.call_id == runs[0].turns[0].call_id


def test_a_run_that_is_deleted_while_it_is_watched(
    watched: Watched, art_server: LiveServer, client: ArtClient, http: httpx.Client
) -> None:
    run = run_of(http, art_server.policy, 1.0, 0)
    page = watched.go(f"runs/{run}")
    expect(page.get_by_role("heading", name=run)).to_be_visible()
    form = page.get_by_role("form", name="Give a review")
    form.get_by_label("Comment").fill("kept while the run is read anew")
    form.get_by_label("Value").fill("0.5")
    about: Any = {"trajectory": run, "kind": "reward", "name": "human_reward", "value": 1.0}
    client.put_reviews([Review(id=run, source="test", at=1.0, **about)])
    expect(page.locator(".reviews li")).to_have_count(1)
    expect(form.get_by_label("Comment")).to_have_value("kept while the run is read anew")
    expect(form.get_by_label("Value")).to_have_value("0.5")
    http.delete(f"/v1/trajectories/{run}").raise_for_status()
    expect(page.get_by_role("heading", name="No such run is stored here")).to_be_visible()


#: Names that JavaScript's objects have already.
NAMES = ("constructor", "__proto__", "toString", "valueOf")
#: Calls of one run, each with one of the strings.
CALLS = 25


def hostile_run(name: str, texts: list[str]) -> dict[str, Any]:
    """A run that has each string wherever a model, a tool, a graph or a judge can put one."""

    def turn(at: int, text: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": text, "arguments": text}}
        return {
            "node": text,
            "path": [text],
            "model": text,
            "ours": False,
            "messages": [
                {"role": "user", "content": text},
                {"role": "tool", "name": text, "content": [{"type": "text", "text": text}]},
            ],
            "tools": [{"type": "function", "function": {"name": text}}],
            "reply": {"role": "assistant", "content": text, "tool_calls": [call]},
            "edited": {"role": "assistant", "content": text},
            "started_at": float(at),
            "latency": 1.0,
            "error": text,
        }

    return {
        "id": name,
        "scenario": texts[0][:256],
        "turns": [turn(at, text) for at, text in enumerate(texts)],
        # No reason is given for the last score, and no score for the last reason.
        "scores": dict.fromkeys([*texts, "hasOwnProperty"], 0.5),
        "metadata": {"judged": {text: text for text in texts} | {"isPrototypeOf": "why"}},
        "error": texts[0],
        "status": "failed",
    }


@pytest.mark.soak
def test_what_models_tools_and_judges_say_is_text(watched: Watched, http: httpx.Client) -> None:
    strings = [*some_markup_strings(), *NAMES]
    group = f"h-{uuid.uuid4().hex}"
    parts = [strings[at : at + CALLS] for at in range(0, len(strings), CALLS)]
    runs = [hostile_run(f"{group}-{index}", texts) for index, texts in enumerate(parts)]
    http.post("/v1/groups", json={"id": group, "trajectories": runs}).raise_for_status()
    page = watched.go(f"runs?group={group}")
    expect(page.locator("tbody tr")).to_have_count(len(runs))
    page.locator("tbody tr").last.get_by_role("link").nth(1).click()
    expect(page.locator(".sibling")).to_have_count(len(runs))
    for line in ("hasOwnProperty 0.5", "isPrototypeOf: why"):
        expect(page.get_by_text(line, exact=True)).to_have_count(len(runs))
    for run, texts in zip(runs, parts, strict=True):
        watched.go(f"runs/{run['id']}")
        expect(page.get_by_role("heading", name=run["id"])).to_be_visible()
        page.evaluate("document.querySelectorAll('details.call').forEach(d => d.open = true)")
        expect(page.locator(".call-body")).to_have_count(len(texts))
        said = page.locator(".call-body").all()
        shown = [one.locator(".message pre").first.text_content() for one in said]
        assert shown == texts
        made = "main :is(img, iframe, script, object, embed, style, link, base, meta)"
        edits = page.locator(".edited pre").all()
        assert [one.text_content() for one in edits] == texts
        assert page.locator(made).count() == 0
        assert page.evaluate("window.pwned") is None
    for run in runs:
        http.delete(f"/v1/trajectories/{run['id']}").raise_for_status()


def test_a_run_is_listed_and_read_while_it_runs(
    watched: Watched, art_server: LiveServer, http: httpx.Client
) -> None:
    run = f"open-{uuid.uuid4().hex}"
    page = watched.go("runs")

    def call(words: str) -> None:
        asked = {
            "model": art_server.policy,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 3,
            "art": {"trajectory_id": run, "node": "writer"},
        }
        http.post("/v1/chat/completions", json=asked).raise_for_status()

    call("one")
    running = page.get_by_role("region", name="Running").get_by_role("row", name=run)
    expect(running).to_contain_text("writer")
    running.get_by_role("link").click()
    expect(page.locator(".call")).to_have_count(1)
    call("two")
    expect(page.locator(".call")).to_have_count(2)
    expect(page.get_by_text("These are its calls so far.")).to_be_visible()
    http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}).raise_for_status()
    expect(page.get_by_role("form", name="Give a review")).to_be_visible()
    watched.go("runs")
    expect(page.get_by_role("region", name="Runs").get_by_text(run)).to_be_visible()
    expect(page.get_by_role("region", name="Running").get_by_text(run)).to_have_count(0)


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
