"""The house keeps its floors and rooms: imports run downwards, and what is private of others sits apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"cluster": 0, "train_jobs": 1, "serve_apps": 1, "infra": 2}
ROOMS: dict[str, list[set[str]]] = {
    "cluster": [
        {"errors", "wording", "version", "environment", "loopback", "ray_private"},
        {"actors"},
        {"config.sections"},
        {"files", "planning", "node"},
        {"models"},
        {"config.models"},
        {"config.reading"},
        {"config.checks"},
        {"config"},
        {"state"},
        {"sharing"},
        {"hosts"},
    ],
    "train_jobs": [
        {"spec", "errors"},
        {"data", "records", "watch"},
        {"optimization", "tasks"},
        {"parallel"},
        {"metering", "checkpoint"},
        {"elastic"},
        {"rank"},
        {"group"},
        {"driver"},
        {"__main__"},
    ],
    "serve_apps": [
        {"spec", "models", "parsing"},
        {"engine", "tokens", "routing", "quotas", "front"},
        {"openai"},
        {"http"},
        {"replica", "anthropic"},
        {"controller"},
        {"gateway"},
        {"status", "commands"},
        {"batch"},
        {"__main__"},
    ],
    "infra": [
        {"job_view", "rank_output", "log_lines", "job_account"},
        {"job_logs", "script_log", "app_logs", "node_logs"},
        {"job_output"},
        {"tenant_book"},
        {"api"},
        {"lifecycle"},
        {"tenants", "slurm_job", "kubernetes_pod"},
        {"lab"},
        {"tour"},
        {"cli"},
    ],
}
"""By floor, from below: rooms, and files beside them. `config.checks` is a room in a room. Rooms of one set
do not import each other."""
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *(page for floor in FLOORS for page in sorted((ROOT / floor).rglob("README.md"))),
]
PRIVATE_SAYS_SO = "private"
"""A file that uses what is private of Ray or uvicorn says so in its docstring."""
OTHERS = ("ray", "uvicorn")
INNER_CLASSES = {"HttpToolsProtocol", "H11Protocol", "RequestResponseCycle"}
"""Classes of uvicorn whose attributes no document promises; whoever derives from one uses what is private."""
INNER_NAMES = re.compile(
    r"SERVE_REPLICA|SERVE_CONTROLLER|SERVE_PROXY|ServeReplica:|node:__internal|ray::|:job_id:|:actor_name:"
    r"|^(ray|uvicorn)(\.\w+)*\._"
)
"""How Ray names its own things: who looks for one in a text relies on what no document promises."""
SAME_IDEA = {
    "answers": "what an API answers",
    "deployment": "Serve deployments, of gateways and of replicas",
    "errors": "the errors of an API",
    "format": "makes the answers of an API",
    "schema": "the requests of an API",
    "tools": "the tools of an API's requests",
    "access": "what opens the gateway, and what opens the control API",
    "apps": "apps, as the control API does them and as its paths",
    "checkpoints": "checkpoints, on the command line, in the control API and as what faults are done to",
    "contexts": "contexts, and their commands",
    "jobs": "jobs, as the control API does them and as its paths",
    "logs": "logs, on the command line and as a path",
    "models": "published models, on the command line and as paths",
    "tokens": "tokens of the control API, and their commands",
    "clock": "faults of clocks, and the scenarios with them",
    "network": "networks of hosts, and the scenarios with their faults",
    "nodes": "faults of nodes, and the scenarios with them",
    "quickstart": "the quickstart, and its command",
}
"""Names that several modules of one floor have, and what all of them are about."""


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here, so that the floors can be seen"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a file calls what it imports, and what that is (`serve`, `ray.serve`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname is not None)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of a chain of plain names, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def attributes(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a file uses (`ray.experimental.x`)."""
    names = (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    yield from (name for name in names if name is not None)


def storey(floor: str, room: str) -> int:
    """How high a room of a floor lies, or a file beside the rooms."""
    for number, rooms in enumerate(ROOMS[floor]):
        if room in rooms:
            return number
    raise AssertionError(f"{floor}/{room} has no place in ROOMS yet")


def room_of(floor: str, inside: Sequence[str]) -> str:
    """The room that a module lies in, by its path below the floor: the innermost that ROOMS names."""
    rooms = set().union(*ROOMS[floor])
    paths = [".".join(inside[:depth]) for depth in range(len(inside), 0, -1)]
    return next((path for path in paths if path in rooms), inside[0])


def violations(place: str, source: str) -> list[str]:
    """What a file at `place` (`floor.room.file`) imports against the floors and rooms."""
    found = []
    floor, *rest = place.split(".")
    for module in imported_modules(ast.parse(source)):
        other, *inside = module.split(".")
        if other in FLOORS and other != floor and FLOORS[other] >= FLOORS[floor]:
            found.append(module)
        elif other == floor in ROOMS and inside and rest:
            mine, its = room_of(floor, rest), room_of(floor, inside)
            of_files = len(rest) == 1 and not (ROOT / floor / its.replace(".", "/")).is_dir()
            allowed = storey(floor, mine) - (0 if of_files or mine == its else 1)
            if storey(floor, its) > allowed:
                found.append(module)
    return found


def private_of_others(source: str) -> list[str]:
    """What a file uses of Ray or uvicorn that is private: by its name, or where no document promises it."""
    tree = ast.parse(source)
    meant = dict(imported_names(tree))
    used = [name.partition(".") for name in attributes(tree)]
    names = [*imported_modules(tree), *(meant.get(first, first) + dot + rest for first, dot, rest in used)]
    by_name = [
        name
        for name in names
        if name.split(".")[0] in OTHERS and any(part.startswith("_") for part in name.split("."))
    ]
    bases = [dotted(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    derived = [base for base in bases if base is not None and base.split(".")[-1] in INNER_CLASSES]
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said]
    spelled = [text for text in texts if isinstance(text, str) and INNER_NAMES.search(text)]
    return [*by_name, *derived, *spelled]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards_only(path: Path) -> None:
    place = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert violations(place.removesuffix(".__init__"), path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_private_of_others_sits_in_files_that_say_so(path: Path) -> None:
    source = path.read_text()
    if private_of_others(source):
        docstring = ast.get_docstring(ast.parse(source)) or ""
        assert PRIVATE_SAYS_SO in docstring, private_of_others(source)


def types_of(path: Path) -> Iterator[tuple[str, str]]:
    """Every class of a module, and every type that it gives a name to, with what tells two of them apart."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), str(path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, of = node.targets[0].id.lstrip("_"), ast.unparse(node.value)
            if re.fullmatch(r"([A-Z][a-z]+)+", name) and not of.startswith("TypeVar("):
                yield name, of


@pytest.mark.parametrize(
    "floors", [("serve_apps", "infra"), ("cluster", "train_jobs")], ids=lambda floors: " and ".join(floors)
)
def test_a_type_has_a_name_of_its_own(floors: tuple[str, ...]) -> None:
    places: dict[str, dict[str, str]] = {}
    for path in (path for path in SOURCES if path.relative_to(ROOT).parts[0] in floors):
        for name, of in types_of(path):
            places.setdefault(name, {})[of] = str(path.relative_to(ROOT))
    assert {name: [*of.values()] for name, of in places.items() if len(of) > 1} == {}


@pytest.mark.parametrize("floor", FLOORS)
def test_a_module_has_a_name_of_its_own(floor: str) -> None:
    places: dict[str, list[str]] = {}
    for path in (path for path in SOURCES if path.relative_to(ROOT).parts[0] == floor):
        places.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    of_packages = ("__init__", "__main__")
    twice = {name: files for name, files in places.items() if len(files) > 1 and name not in of_packages}
    assert {name: files for name, files in twice.items() if name not in SAME_IDEA} == {}


def test_who_others_have_started_is_found_by_those_who_look_again_when_it_is_dead() -> None:
    """A handle is of one actor for ever: one that nobody looks up again outlives what it leads to."""
    only = {
        "get_actor": "cluster/actors/named_actor.py",
        "DeploymentHandle(": "serve_apps/replica/handles.py",
        "get_app_handle": "",
        "get_deployment_handle(": "",
        "serve.context": "serve_apps/replica/serve_private.py",
    }
    for words, place in only.items():
        users = [str(path.relative_to(ROOT)) for path in SOURCES if words in path.read_text()]
        assert [user for user in users if user != place] == [], words


def test_the_rules_see_what_they_forbid() -> None:
    assert violations("cluster.nodes", "def f():\n    from train_jobs.rank.loop import StepLoop")
    assert violations("serve_apps.commands", "import train_jobs")
    assert violations("train_jobs.rank.loop", "from serve_apps import commands")
    assert violations("cluster.nodes", "import infra.cli.main")
    assert not violations(
        "infra.cli.main", "import cluster, train_jobs.rank.loop\nfrom serve_apps import commands"
    )
    assert violations("serve_apps.engine.config", "from serve_apps.replica.fit import fit")
    assert violations("serve_apps.http.server", "from serve_apps import gateway")
    assert violations("serve_apps.http.server", "import serve_apps.replica.fit")
    assert violations("serve_apps.spec", "from serve_apps.engine.protocol import Engine")
    assert not violations("serve_apps.models", "from serve_apps.spec import AppSpec")
    assert not violations("serve_apps.gateway.call", "from serve_apps.http.body import read_body")
    assert private_of_others("from ray._private.state import x")
    assert private_of_others("import ray\nray._private.worker.f()")
    assert private_of_others("from ray.serve._private import y")
    assert private_of_others("import uvicorn\nuvicorn.main._x()")
    assert private_of_others("from uvicorn.x import HttpToolsProtocol\nclass C(HttpToolsProtocol): ...")
    assert private_of_others("def f(name):\n    return name.partition('SERVE_REPLICA::')")
    assert private_of_others("from ray import serve\nserve._private.x()")
    assert private_of_others("import ray as r\nr._private.x()")
    assert private_of_others("import ray.serve as s\ns._private.x()")
    assert private_of_others("from ray.serve import Deployment as D\nD._x()")
    assert private_of_others("import_module('ray.serve._private.x')")
    assert private_of_others("def f(name):\n    return 'a SERVE_REPLICA::' in name")
    assert private_of_others("titles = [line for line in lines if line.startswith('ray::')]")
    assert not private_of_others("import ray\nray.get(x)\nself._ray.thing\nray.remote(_Mine).remote()")


def test_the_top_level_of_the_repository_holds_what_it_should() -> None:
    allowed = {*FLOORS, "tests", "pyproject.toml", "README.md", "LICENSE"}
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    extra = {
        name for name in tracked - allowed if not name.endswith(".egg-info") and name not in ("build", "dist")
    }
    assert extra == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(r"`([\w/]+\.py)`", text)
    there = [f"/{path.relative_to(ROOT)}" for path in (*SOURCES, *(ROOT / "tests").rglob("*.py"))]
    assert [file for file in files if not any(path.endswith(f"/{file}") for path in there)] == []
