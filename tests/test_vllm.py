"""vLLM's variable-length collectives and all2all manager on ranks, with its signatures.

With ROCM_DP_VLLM_SOURCE (a checkout or an unpacked wheel of vLLM) the recorded signatures are compared with it.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import vllm_cases
from sglang_contract import functions_of

from rocm_dp.integrations.vllm import All2AllManager, VariableRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "fixtures" / "vllm_contract.json").read_text("utf-8")
)
FILES = {path: given for path, given in RECORDED.items() if path.endswith(".py")}
OURS = {"AgRsAll2AllManager": All2AllManager, "CudaCommunicator": VariableRows}
SOURCE = os.environ.get("ROCM_DP_VLLM_SOURCE", "")


@pytest.mark.parametrize("case", vllm_cases.CALLS, ids=lambda case: case.__name__)
def test_vllms_calls_give_what_its_description_says(
    ranks: Callable[[int], RankPool], case: Callable[[int, int], None]
) -> None:
    ranks(4).run(case, 4)


@pytest.mark.parametrize("path", FILES)
def test_every_call_takes_what_vllm_passes(path: str) -> None:
    for name, theirs in FILES[path].items():
        kind, method = name.split(".")
        signature = inspect.signature(getattr(OURS[kind], method))
        mine = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
        assert [parameter.name for parameter in mine] == [text.split("=")[0] for text in theirs], name
        for parameter, text in zip(mine, theirs, strict=True):
            if "=" in text:
                assert parameter.default == ast.literal_eval(text.split("=")[1]), f"{name}: {parameter}"


@pytest.mark.skipif(not SOURCE, reason="ROCM_DP_VLLM_SOURCE names no source")
@pytest.mark.parametrize("path", FILES)
def test_vllm_promises_what_is_recorded(path: str) -> None:
    found = functions_of((Path(SOURCE) / path).read_text("utf-8"))
    assert {name: found.get(name) for name in FILES[path]} == FILES[path]
