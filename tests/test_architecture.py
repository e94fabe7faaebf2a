"""The rules that hold the package together, read from the source with ast; nothing is imported.

A module is named as Python does, except that a package's own file ends in ``.__init__``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib  # novermin
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"rocm_dp": ROOT / "rocm_dp", "rocm_dp.kernels": ROOT / "kernels"}

# Bottom to top: a module imports from lower lines or from its own package, never beside or above.
ROOMS = (
    ("errors", "version"),
    ("layout", "options", "files"),
    ("plan",),
    ("checks", "control"),
    ("groups", "platform"),
    ("kernels",),
    ("graphs", "rocm"),
    ("memory",),
    ("comm_stream",),
    ("pending",),
    ("transports",),
    ("measured",),
    ("routing", "agreement", "group_verbs", "messages", "tuned"),
    ("calls", "router"),
    ("quick",),
    ("over_memory",),
    ("making",),
    ("dispatch",),
    ("kept_calls",),
    ("exchange",),
    ("overlap",),
    ("workload", "testing_pickle", "reference"),
    ("testing_worker",),
    ("testing_crew",),
    ("testing",),
    ("aot", "soak", "bench", "doctor", "validate", "demo", "integrations"),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
NO_TORCH = {"errors", "version", "files", "layout", "plan"}
READS_ENVIRONMENT = {"cli", "doctor", "integrations", "platform", "testing", "testing_worker"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
LEAKS = {"record_stream", "wait_stream"}
# Shows what they cost, on purpose.
MAY_LEAK = {"rocm_dp.soak.hazards"}
# What runs when it arrives. Ranks of one parent exchange pickles over its pipes, and nobody else may.
RUNS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MAY_UNPICKLE = {"rocm_dp.testing_pickle"}
SENDS_PICKLES = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
WRITES = {"write_text", "write_bytes", "savetxt", "tofile"}
# Into a folder that nobody else can enter.
MAY_WRITE = {"rocm_dp.files", "rocm_dp.soak.signals"}
MAKES_MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("remove", "reverse", "setdefault", "sort", "update"),
}

Checker = Callable[[str, str], list[str]]


def room_of(module: str) -> str:
    """``rocm_dp.memory.slots`` -> ``memory``; the package itself is ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything imported anywhere in the tree, ``from a import b`` being ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the folder that the module lies in, each further dot the one above.
            above = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def called(node: ast.Call) -> str:
    """The last name of what is called: ``a.b.c()`` -> ``c``."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs, those under ``if TYPE_CHECKING`` left out."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            guarded = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from run_at_import(node.orelse if guarded else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from run_at_import([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from run_at_import(node.body)


def check_room(module: str, source: str) -> list[str]:
    """Every file belongs to a room, so that a new one is placed on purpose."""
    room = room_of(module)
    return [] if room in HEIGHT else [f"{module}: no room is named {room}"]


def check_imports_go_down(module: str, source: str) -> list[str]:
    found = []
    own = room_of(module)
    for line, name in imports(module, ast.parse(source)):
        if name.split(".")[0] not in {"rocm_dp", "kernels"}:
            continue
        if name.split(".")[0] == "kernels":
            found.append(f"{module}:{line} imports {name}: our kernels are rocm_dp.kernels")
            continue
        # `from rocm_dp import x` may name a module or something that the package exports.
        room = room_of(name) if room_of(name) in HEIGHT or name.count(".") > 1 else "__init__"
        below = HEIGHT.get(room, len(ROOMS)) < HEIGHT.get(own, 0) and own != "kernels"
        if room != own and not below:
            found.append(f"{module}:{line} imports {name}: {room} is not below {own}")
    return found


def check_no_torch_at_the_bottom(module: str, source: str) -> list[str]:
    if room_of(module) not in NO_TORCH:
        return []
    heavy = {"torch", "triton", "numpy"}
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(module, ast.parse(source))
        if name.split(".")[0] in heavy
    ]


def check_package_imports_without_torch(module: str, source: str) -> list[str]:
    if module != "rocm_dp.__init__":
        return []
    plain = [n for n in run_at_import(ast.parse(source).body) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return [
        f"{module}:{line} imports {name} when it is imported"
        for node in plain
        for line, name in imports(module, node)
        if name.split(".")[0] in {"torch", "triton"}
    ]


def check_environment(module: str, source: str) -> list[str]:
    if room_of(module) in READS_ENVIRONMENT:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [f"{module}:{node.lineno} imports os.{a.name}" for a in node.names if a.name in ENVIRONMENT]
    return found


def check_no_global(module: str, source: str) -> list[str]:
    return [
        f"{module}:{node.lineno} says global {', '.join(node.names)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Global)
    ]


def is_mutable(value: ast.expr | None) -> bool:
    """Whether an expression makes a new list, dict or set, as far as its form tells."""
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, displays) or (isinstance(value, ast.Call) and called(value) in MAKES_MUTABLE)


def mutable_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in run_at_import(tree.body):
        if isinstance(node, ast.Assign) and is_mutable(node.value):
            names = [t for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and is_mutable(node.value) and isinstance(node.target, ast.Name):
            names = [node.target]
        else:
            continue
        yield from ((node.lineno, name.id) for name in names)


def mutated_name(node: ast.AST) -> str:
    """The plain name whose value a node changes in place, or nothing."""
    target: ast.expr | None = None
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node.value
    elif isinstance(node, ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATES:
        target = node.func.value
    return target.id if isinstance(target, ast.Name) else ""


def check_no_mutable_state(module: str, source: str) -> list[str]:
    """A list, dict or set of a module is a CONSTANT, and no line of the module changes it."""
    tree = ast.parse(source)
    found = []
    constants = set()
    for line, name in mutable_names(tree):
        if re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name) or name == "__all__":
            constants.add(name)
        else:
            found.append(f"{module}:{line} keeps {name}, which can change")
    changes = [node for node in ast.walk(tree) if mutated_name(node) in constants]
    return found + [f"{module}:{getattr(node, 'lineno', 0)} changes {mutated_name(node)}" for node in changes]


def check_no_leaking_calls(module: str, source: str) -> list[str]:
    """These pin events and buffers: they may stand in the modules named in MAY_LEAK, and in no other."""
    if module in MAY_LEAK:
        return []
    return [
        f"{module}:{node.lineno} uses {node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in LEAKS
    ]


def check_nothing_that_arrives_is_run(module: str, source: str) -> list[str]:
    """Ranks on other hosts send fixed-size bytes and JSON."""
    tree = ast.parse(source)
    imported = [
        f"{module}:{line} imports {name}"
        for line, name in imports(module, tree)
        if name.split(".")[0] in RUNS and module not in MAY_UNPICKLE
    ]
    return imported + [
        f"{module}:{node.lineno} uses {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr in SENDS_PICKLES or ast.unparse(node) in {"torch.load", "numpy.load", "np.load"})
    ]


def opens_to_write(node: ast.Call) -> bool:
    """Whether a call is an open(...) or path.open(...) whose mode says so."""
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return called(node) == "open" and any(re.fullmatch("[rbtU]*[wax+][bt+]*", mode) for mode in modes)


def check_files_are_written_by_files(module: str, source: str) -> list[str]:
    """Whole or not at all, and for their owner's eyes."""
    if module in MAY_WRITE:
        return []
    return [
        f"{module}:{node.lineno} writes by {called(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and (called(node) in WRITES or opens_to_write(node))
    ]


CHECKERS: tuple[Checker, ...] = (
    check_room,
    check_imports_go_down,
    check_no_torch_at_the_bottom,
    check_package_imports_without_torch,
    check_environment,
    check_no_global,
    check_no_mutable_state,
    check_no_leaking_calls,
    check_nothing_that_arrives_is_run,
    check_files_are_written_by_files,
)


def modules() -> dict[str, Path]:
    """Every module on disk and its file."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            found[".".join([package, *path.relative_to(folder).with_suffix("").parts])] = path
    return found


def packages(names: Iterator[str] | list[str] | dict[str, Path]) -> set[str]:
    return {name.removesuffix(".__init__") for name in names if name.endswith(".__init__")}


def listed_packages(pyproject: str) -> set[str]:
    listed = tomllib.loads(pyproject)["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed)), f"twice in pyproject.toml's packages: {sorted(listed)}"
    return set(listed)


def misplaced_packages(on_disk: set[str], listed: set[str]) -> list[str]:
    return [f"{name} is on disk but not in pyproject.toml's packages" for name in sorted(on_disk - listed)] + [
        f"{name} is in pyproject.toml's packages but not on disk" for name in sorted(listed - on_disk)
    ]


@pytest.mark.parametrize("check", CHECKERS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_every_module_keeps_the_rule(check: Checker) -> None:
    found = [line for name, path in modules().items() for line in check(name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_there_are_modules_to_check() -> None:
    assert {"rocm_dp.errors", "rocm_dp.plan", "rocm_dp.kernels.__init__"} <= set(modules())


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    listed = listed_packages((ROOT / "pyproject.toml").read_text("utf-8"))
    assert not misplaced_packages(packages(modules()), listed)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in modules().values()}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


BAD = (
    (check_room, "rocm_dp.helpers", ""),
    (check_room, "rocm_dp.helpers.__init__", ""),
    (check_imports_go_down, "rocm_dp.plan", "from rocm_dp.exchange import TokenExchange"),
    (check_imports_go_down, "rocm_dp.plan", "def f():\n    import rocm_dp.groups"),
    (check_imports_go_down, "rocm_dp.routing", "from rocm_dp import agreement"),
    (check_imports_go_down, "rocm_dp.exchange", "from rocm_dp import TokenPlan"),
    (check_imports_go_down, "rocm_dp.exchange", "from rocm_dp.helpers import something"),
    (check_imports_go_down, "rocm_dp.memory.slots", "from ..transports.peer import Peer"),
    (check_imports_go_down, "rocm_dp.memory.__init__", "from .. import transports"),
    (check_imports_go_down, "rocm_dp.plan", "if TYPE_CHECKING:\n    from rocm_dp.groups import Groups"),
    (check_imports_go_down, "rocm_dp.kernels.rows", "from rocm_dp.errors import ConfigError"),
    (check_imports_go_down, "rocm_dp.transports.peer", "from kernels import rows"),
    (check_imports_go_down, "rocm_dp.graphs", "from rocm_dp.memory.slots import Slot"),
    (check_imports_go_down, "rocm_dp.transports.peer", "if TYPE_CHECKING:\n    from rocm_dp.calls import Call"),
    (check_imports_go_down, "rocm_dp.calls", "from rocm_dp.making import CallMaker"),
    (check_imports_go_down, "rocm_dp.making", "from rocm_dp.dispatch import Dispatcher"),
    (check_imports_go_down, "rocm_dp.testing", "import_module('rocm_dp.soak.probe')"),
    (check_imports_go_down, "rocm_dp.soak.probe", "from rocm_dp.bench import timer"),
    (check_imports_go_down, "rocm_dp.exchange", "from rocm_dp.soak import probe"),
    (check_no_torch_at_the_bottom, "rocm_dp.plan", "def f():\n    import torch.distributed as dist"),
    (check_no_torch_at_the_bottom, "rocm_dp.layout", "from numpy import int64"),
    (check_package_imports_without_torch, "rocm_dp.__init__", "try:\n    import torch\nexcept OSError: ..."),
    (check_package_imports_without_torch, "rocm_dp.__init__", "from triton.language import constexpr"),
    (check_environment, "rocm_dp.exchange", "import os\nFLAG = os.environ.get('X')"),
    (check_environment, "rocm_dp.exchange", "import os as o\ndef f(): return o.getenv('X')"),
    (check_environment, "rocm_dp.exchange", "from os import environ"),
    (check_no_global, "rocm_dp.plan", "def f():\n    global n\n    n = 1"),
    (check_no_mutable_state, "rocm_dp.plan", "cache = {}"),
    (check_no_mutable_state, "rocm_dp.plan", "try:\n    seen: set[int] = set()\nfinally: ..."),
    (check_no_mutable_state, "rocm_dp.plan", "from collections import deque\nlast = deque()"),
    (check_no_mutable_state, "rocm_dp.plan", "TABLE = {}\ndef f(x): TABLE[x] = 1"),
    (check_no_mutable_state, "rocm_dp.plan", "TABLE = {}\ndef f(x): del TABLE[x]"),
    (check_no_mutable_state, "rocm_dp.plan", "_NAMES = []\ndef f(x): _NAMES.append(x)"),
    (check_no_mutable_state, "rocm_dp.plan", "NAMES = []\nNAMES += [1]"),
    (check_no_leaking_calls, "rocm_dp.exchange", "x.record_stream(stream)"),
    (check_no_leaking_calls, "rocm_dp.bench.timer", "wait = stream.wait_stream"),
    (check_no_leaking_calls, "rocm_dp.soak.rank", "x.record_stream(stream)"),
    (check_nothing_that_arrives_is_run, "rocm_dp.control", "import pickle"),
    (check_nothing_that_arrives_is_run, "rocm_dp.testing_crew", "from pickle import loads"),
    (check_nothing_that_arrives_is_run, "rocm_dp.control", "dist.all_gather_object(every, mine)"),
    (check_nothing_that_arrives_is_run, "rocm_dp.tuned", "table = torch.load(path)"),
    (check_files_are_written_by_files, "rocm_dp.demo.command", "path.write_text(text)"),
    (check_files_are_written_by_files, "rocm_dp.bench.table", "with path.open('w', newline='') as file: ..."),
    (check_files_are_written_by_files, "rocm_dp.tuned", "open(path, mode='a+')"),
)
GOOD = (
    "rocm_dp.agreement|from rocm_dp.plan import TokenPlan\nfrom rocm_dp.errors import ConfigError",
    "rocm_dp.memory.slots|from . import events\nfrom rocm_dp.memory.events import Event\nfrom ..errors import X",
    "rocm_dp.kernels.rows|from .sync import arrive\nfrom rocm_dp.kernels.sync import wait\nimport torch",
    "rocm_dp.__init__|from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n__all__ = ['a']",
    "rocm_dp.cli|import os\nfrom rocm_dp.soak import probe\nFLAG = os.environ",
    "rocm_dp.plan|TABLE = {1: 2}\ndef f(n): rows = [TABLE[n]]; rows.append(1); rows[0] = 2; return rows",
    "rocm_dp.soak.hazards|def f(t, s): t.record_stream(s)",
    "rocm_dp.testing_pickle|import pickle",
    "rocm_dp.tuned|with path.open('rb') as file: json.loads(file.read(8))",
    "rocm_dp.files|path.write_text(text)",
)


@pytest.mark.parametrize(("check", "module", "source"), BAD)
def test_a_checker_reports_a_breach(check: Checker, module: str, source: str) -> None:
    assert check(module, source)


@pytest.mark.parametrize("case", GOOD)
def test_no_checker_reports_what_is_allowed(case: str) -> None:
    module, source = case.split("|")
    assert not [line for check in CHECKERS for line in check(module, source)]


def test_what_may_leak_exists_and_does() -> None:
    """A module that no longer needs its leave must give it back."""
    for module in MAY_LEAK:
        source = modules()[module].read_text("utf-8")
        assert {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)} >= LEAKS


def test_what_may_unpickle_or_write_does() -> None:
    for module in MAY_UNPICKLE:
        assert "pickle" in {name for _, name in imports(module, ast.parse(modules()[module].read_text("utf-8")))}
    assert "write_bytes" in modules()["rocm_dp.soak.signals"].read_text("utf-8")


def test_every_rule_has_a_breach_that_it_reports() -> None:
    assert {check for check, _, _ in BAD} == set(CHECKERS)


def test_a_forgotten_package_is_reported_both_ways() -> None:
    assert misplaced_packages({"rocm_dp", "rocm_dp.soak"}, {"rocm_dp", "rocm_dp.gone"}) == [
        "rocm_dp.soak is on disk but not in pyproject.toml's packages",
        "rocm_dp.gone is in pyproject.toml's packages but not on disk",
    ]
