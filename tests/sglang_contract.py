"""What releases of SGLang promise: names, parameters and defaults, read from their wheels without importing them.

``python tests/sglang_contract.py WHEEL...`` records them in tests/fixtures/sglang_contract.json.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
import zipfile
from pathlib import Path

RECORDED = Path(__file__).parent / "fixtures" / "sglang_contract.json"
LAYER = "sglang/srt/layers/dp_attention.py"
BATCHES = {
    "ForwardBatch": "sglang/srt/model_executor/forward_batch_info.py",
    "LogitsMetadata": "sglang/srt/layers/logits_processor.py",
}
Contract = dict[str, dict[str, list[str]]]


def contract_of(wheel: Path) -> Contract:
    """The layer's public functions with their parameters, and the fields of the batches that it is given."""
    with zipfile.ZipFile(wheel) as archive:
        functions = functions_of(archive.read(LAYER).decode())
        batches = {name: fields_of(archive.read(path).decode(), name) for name, path in BATCHES.items()}
    return {"functions": functions, "batches": batches}


def functions_of(source: str) -> dict[str, list[str]]:
    """Every public function of a module, and of its public classes, with its parameters as ``name=default``."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = parameters_of(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found.update({f"{node.name}.{item.name}": parameters_of(item)[1:] for item in methods})
    return found


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """Parameters in order, those by keyword only behind a ``*``."""
    positional = [*node.args.posonlyargs, *node.args.args]
    blank = [None] * (len(positional) - len(node.args.defaults))
    pairs = list(zip(positional, [*blank, *node.args.defaults], strict=True))
    named = [_parameter(argument, default) for argument, default in pairs]
    by_keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    only = [_parameter(argument, default) for argument, default in by_keyword]
    return [*named, *(["*", *only] if only else [])]


def fields_of(source: str, name: str) -> list[str]:
    """The annotated fields of class ``name``."""
    [node] = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def difference(before: Contract, after: Contract, names: tuple[str, str]) -> str:
    """A unified diff of two contracts, a function or a field a line; empty when they are equal."""
    return "\n".join(difflib.unified_diff(_lines(before), _lines(after), *names, lineterm="", n=0))


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def recorded() -> dict[str, Contract]:
    """The recorded contracts by release, oldest first."""
    contracts: dict[str, Contract] = json.loads(RECORDED.read_text("utf-8"))
    return contracts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _lines(contract: Contract) -> list[str]:
    functions = [f"{name}({', '.join(given)})" for name, given in sorted(contract["functions"].items())]
    fields = [f"{name}.{field}" for name, own in sorted(contract["batches"].items()) for field in sorted(own)]
    return [*functions, *fields]


def main(wheels: list[str]) -> None:
    contracts = {version_of(Path(wheel)): contract_of(Path(wheel)) for wheel in wheels}
    RECORDED.write_text(json.dumps(contracts, indent=1, sort_keys=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
