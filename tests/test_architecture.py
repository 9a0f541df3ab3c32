"""The rules of the house, as tests: who imports whom, what an import costs, what is forbidden."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
CLIENT = REPO / "langchain_art"
SERVER = REPO / "server" / "langchain_art_server"
HEAVY = ("torch", "transformers", "peft", "litellm", "langfuse", "wandb", "langchain_art_server")

#: Ours, or used only where the user's own library is wrapped; httpx2 is what version 3 of the
#: OpenAI SDK is built on.
BROUGHT_ALONG = {
    "langchain_art",
    "langchain_art_server",
    "pytest",
    "langsmith",
    "langfuse",
    "httpx2",
}


def sources(*roots: Path) -> list[Path]:
    found = [path for root in roots for path in root.rglob("*.py")]
    assert found
    return found


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that a module's source is made of."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def loaded_by(*statements: str) -> list[set[str]]:
    """The packages that are loaded after each of these statements of one program."""
    show = "print(json.dumps(sorted(sys.modules)))"
    code = "\n".join(["import json, sys", *(f"{one}\n{show}" for one in statements)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = map(json.loads, done.stdout.splitlines())
    return [{name.partition(".")[0] for name in line} for line in lines]


def test_importing_the_package_loads_no_framework_and_the_client_nothing_heavy() -> None:
    package, client = loaded_by(
        "import langchain_art, langchain_art.wire",
        "from langchain_art import wire, errors, ChatART, capture, Trainer, ArtClient",
    )
    assert package.isdisjoint({"langchain_core", "langgraph", "openai", "httpx", "rich"})
    assert client.isdisjoint(HEAVY)


def test_every_public_name_is_there() -> None:
    import langchain_art
    from langchain_art import errors

    for name in langchain_art.__all__:
        assert getattr(langchain_art, name) is not None
    assert callable(langchain_art.capture)
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert {kind.__name__ for kind in kinds} <= set(langchain_art.__all__)


def test_neither_the_server_app_nor_the_learners_loop_loads_an_engine() -> None:
    """Unsloth patches torch's libraries, so it is imported before them."""
    server = "langchain_art_server"
    [loaded] = loaded_by(f"import {server}.gateway.app, {server}.backends.peft.child")
    assert loaded.isdisjoint({"torch", "transformers", "peft", "langchain_core", "langgraph"})


@pytest.mark.parametrize(
    ("name", "most"),
    # Langfuse: what is read of its API, and the evaluators for its experiments.
    [("vllm", 1), ("unsloth", 1), ("langfuse", 2), ("wandb", 1)],
)
def test_a_heavy_library_is_named_in_few_files(name: str, most: int) -> None:
    users = [
        p for p in sources(CLIENT, SERVER) if any(n.partition(".")[0] == name for n in imported(p))
    ]
    assert len(users) <= most, users


def test_every_direct_import_is_declared() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = [wanted for extra in project["optional-dependencies"].values() for wanted in extra]
    declared = {normal(re.split(r"[^\w.-]", one)[0]) for one in project["dependencies"] + extras}
    distributions = packages_distributions()
    for path in sources(CLIENT, SERVER):
        for name in {one.partition(".")[0] for one in imported(path)}:
            if name in BROUGHT_ALONG or name in sys.stdlib_module_names:
                continue
            found = {normal(one) for one in distributions.get(name, [name])}
            assert found & declared, f"{path} imports {name}, which pyproject.toml does not declare"


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


#: What runs code that is data. `torch.load` and its like unpickle.
RUNS_DATA = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "pickle.loads", "yaml.load"),
    *("torch.load", "torch.hub.load", "joblib.load", "runpy.run_path"),
    *("jinja2.Template", "jinja2.Environment", "subprocess.getoutput"),
}
UNPICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle", "joblib"}
#: Modules that import by a name that is no constant: their own package's, what the server tells its
#: own child processes, and the loss that its operator registers.
IMPORTS_BY_NAME = {
    "examples/evaluate.py",
    "langchain_art/_lazy_names.py",
    "langchain_art/_notebook.py",
    "langchain_art/credit/schemes/__init__.py",
    "server/langchain_art_server/algorithms/loss/own_loss.py",
    "server/langchain_art_server/backends/ipc/channel.py",
    "server/langchain_art_server/backends/ipc/fork_server.py",
}


@cache
def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """The calls of a module, each with its function as it is written."""
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    return [(dotted(one.func), one) for one in calls]


def dotted(node: ast.expr) -> str:
    """``torch.load``, ``cast(Any, AutoConfig).from_pretrained``; ``…`` for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}({', '.join(map(dotted, node.args))})"
    return "…"


def shipped() -> list[Path]:
    return sources(CLIENT, SERVER, REPO / "examples", REPO / "requirements")


def test_no_pickle_no_eval_and_no_shell() -> None:
    for path in shipped():
        assert {one.partition(".")[0] for one in imported(path)}.isdisjoint(UNPICKLES), path
        for name, call in calls_of(path):
            assert name not in RUNS_DATA, (path, name)
            given = {one.arg: one.value for one in call.keywords}
            for option in ("shell", "allow_pickle"):
                value = given.get(option, ast.Constant(False))
                assert isinstance(value, ast.Constant) and value.value is False, (path, name)


def test_only_a_constant_is_imported_by_name_but_in_few_modules() -> None:
    found = {
        str(path.relative_to(REPO))
        for path in shipped()
        for name, call in calls_of(path)
        if name.rpartition(".")[2] == "import_module" and not isinstance(call.args[0], ast.Constant)
    }
    assert found == IMPORTS_BY_NAME


def test_no_model_brings_code_and_its_weights_are_safetensors() -> None:
    """Left out, `trust_remote_code` asks whoever sits at the terminal."""
    loaded = 0
    for path in shipped():
        for name, call in calls_of(path):
            whose, _, method = name.rpartition(".")
            if method != "from_pretrained" or whose.endswith(("GenerationConfig", "PeftModel")):
                continue
            loaded += 1
            given = {one.arg: ast.unparse(one.value) for one in call.keywords}
            assert given.get("trust_remote_code") == "False", (path, ast.unparse(call))
            if not any(one in whose for one in ("AutoConfig", "AutoTokenizer", "AutoProcessor")):
                assert given.get("use_safetensors") == "True", (path, ast.unparse(call))
    assert loaded >= 7


def test_no_rooms_for_leftovers() -> None:
    banned = {"utils", "common", "helpers", "misc", "core"}
    for path in sources(CLIENT, SERVER):
        assert banned.isdisjoint({path.stem, path.parent.name}), path


#: Fewest lines of a module that only one other module imports.
LEAST_LINES = 60
#: Modules that are shorter, since something is added beside them or they run apart.
SHORT_MODULES = {
    "langchain_art.harbor.graph_agent": "Harbor imports it by its name, with Harbor's own class",
    "langchain_art.evaluators.integrations.by_name": "a line for each library",
    "langchain_art_server.algorithms.loss.lr_schedule": "arithmetic without torch, by a contract",
    "langchain_art_server.backends.embedded.sampler": "an engine, no torch",
    "langchain_art_server.backends.unsloth.learner": "an engine, no torch",
}


#: A file for each of what a registry finds by its name, or for each library.
EXTENSIONS = ("langchain_art.credit.schemes.", "langchain_art.environments.from_")


def test_no_module_is_a_splinter_of_its_only_importer() -> None:
    folders = {CLIENT: REPO, SERVER: SERVER.parent}
    modules = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for root, base in folders.items()
        for path in sources(root)
    }
    importers = Counter[str]()
    for path in modules.values():
        froms = [
            node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module
        ]
        names = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        importers.update((imported(path) | names) & modules.keys())
    short = {
        name
        for name, path in modules.items()
        if path.stem not in ("__init__", "__main__")
        and not name.startswith(EXTENSIONS)
        and importers[name] <= 1
        and len(path.read_text().splitlines()) < LEAST_LINES
    }
    assert not short - SHORT_MODULES.keys(), "merge it into its importer, or say why not"


CLOCKS = {f"time.{name}" for name in ("monotonic", "perf_counter", "process_time", "time")}


def spans_that_must_be_short(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Assertions by which a difference of a clock's times is below something.

    Not those by which it is above: no machine is done with a pause sooner.
    """
    known: set[str] = set()

    def is_span(node: ast.expr) -> bool:
        parts = list(ast.walk(node))
        clock = any(isinstance(part, ast.Call) and dotted(part.func) in CLOCKS for part in parts)
        minus = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) for part in parts)
        return (clock and minus) or any(ast.unparse(part) in known for part in parts if known)

    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_span(node.value):
            known |= {ast.unparse(target) for target in node.targets}
    found: list[str] = []
    for node in (one for one in ast.walk(function) if isinstance(one, ast.Assert)):
        for test in (one for one in ast.walk(node.test) if isinstance(one, ast.Compare)):
            sides = [test.left, *test.comparators]
            for left, kind, right in zip(sides, test.ops, sides[1:], strict=False):
                small = left if isinstance(kind, ast.Lt | ast.LtE) else right
                large = right if small is left else left
                if is_span(small) and not is_span(large):
                    found.append(ast.unparse(test))
    return found


def test_no_test_is_about_how_fast_a_machine_is_unless_its_mark_says_so() -> None:
    too_fast = """
def test() -> None:
    begun = time.monotonic()
    took = time.monotonic() - begun
    assert 0.1 < took < 5
    assert 5 > time.process_time() - begun
    assert took < 2 * (time.monotonic() - begun) and took > 3
"""
    [example] = (node for node in ast.parse(too_fast).body if isinstance(node, ast.FunctionDef))
    assert spans_that_must_be_short(example) == [
        "0.1 < took < 5",
        "5 > time.process_time() - begun",
    ]
    for path in sources(REPO / "tests"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(one in text for one in CLOCKS) else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if "pytest.mark.wall_clock" in map(ast.unparse, node.decorator_list):
                continue
            assert not spans_that_must_be_short(node), (path, node.name)


def test_make_finds_every_test_that_needs_skypilot() -> None:
    mark, makefile = "mark." + "skypilot", (REPO / "Makefile").read_text()
    marked = [path for path in sources(REPO / "tests") if mark in path.read_text()]
    assert marked
    for path in marked:
        assert f"-m skypilot {path.parent.relative_to(REPO)}\n" in makefile, path


def test_a_type_hint_file_ships_with_each_package() -> None:
    assert (CLIENT / "py.typed").exists()
    assert (SERVER / "py.typed").exists()
