"""Every public function of the recorded releases has its place here, with its signature, and its row in the docs.

With ROCM_DP_SGLANG_WHEELS (paths of wheels, separated like PATH) the records are compared with the real thing.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from pathlib import Path

import pytest
from sglang_contract import LAYER, Contract, contract_of, difference, functions_of, recorded, version_of

from rocm_dp.integrations import sglang
from rocm_dp.integrations.sglang import DpAttention, DpPaddingMode
from rocm_dp.integrations.sglang.patch import MADE_BY, MOVED, TOLD

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "sglang.md"
RECORDED = recorded()
RELEASES = list(RECORDED)
ELSEWHERE = {
    "memcpy": "`rocm_dp.kernels.rows`",
    "memcpy_cpu": "`rocm_dp.kernels.rows`",
    "memcpy_triton": "`rocm_dp.kernels.rows`",
    "memcpy_triton_kernel": "`rocm_dp.kernels.rows`",
    "prod": "`math.prod`",
    "initialize_dp_attention": "`install`",
    "initialize_dp_attention_flags": "SGLang's own",
    "enable_joiner_all_gather": "SGLang's own",
    "update_dp_attention_post_scale": "SGLang's own",
    "world_dp_gather_enabled": "SGLang's own",
    "multimodal_encoder_runs_here": "SGLang's own",
    "note_rank_barrier_in_prefill_graph": "SGLang's own",
    "reject_attn_tp_shard_with_tp_reduce": "SGLang's own",
}
# 0.5.23 gives the dp size that dp attention results in, where earlier ones give both of which it results.
CHANGED = {("0.5.23", "compute_dp_attention_world_info")}
ROW = re.compile(r"^\| (?P<names>`\w[^|]+`) \| (?P<home>[^|]+) \| (?P<tests>[^|]+) \| (?P<better>[^|]+) \|$", re.M)


def ours(name: str) -> inspect.Signature:
    """Our function of a recorded name, as it is called: without ``self``."""
    last = name.split(".")[-1]
    module, mode = getattr(sglang, last, None), getattr(DpPaddingMode, last, None)
    bound = inspect.signature(module or getattr(DpAttention, last, None) or mode)  # type: ignore[arg-type]
    kept = [parameter for parameter in bound.parameters.values() if parameter.name != "self"]
    return bound.replace(parameters=kept)


def misfits(contract: Contract, release: str) -> list[str]:
    """The functions that we have not, or that can't be called as the release's can."""
    found = []
    for name, theirs in contract["functions"].items():
        if name in ELSEWHERE or (release, name) in CHANGED:
            continue
        try:
            signature = ours(name)
        except TypeError:
            found.append(f"{name} is missing")
            continue
        given = list(signature.parameters.values())
        for index, text in enumerate(theirs):
            wanted, _, default = text.partition("=")
            mine = given[index] if index < len(given) else None
            if mine is None or mine.name != wanted:
                found.append(f"{name}: parameter {index} is {mine}, SGLang's is {text}")
            elif default and mine.default != ast.literal_eval(default):
                found.append(f"{name}: {mine}, SGLang's default is {default}")
        if any(extra.default is inspect.Parameter.empty for extra in given[len(theirs) :]):
            found.append(f"{name}{signature} needs more than SGLang's ({', '.join(theirs)})")
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_every_function_can_be_called_as_sglangs(release: str) -> None:
    assert not misfits(RECORDED[release], release)


def test_a_changed_signature_is_told() -> None:
    functions = {
        "dp_scatter": ["local_tokens", "forward_batch"],
        "get_tbo_persistent_buffer": ["key", "rows", "hidden", "dtype"],
        "dp_gather_partial_async": ["global_tokens", "local_tokens", "forward_batch", "event_key=('gather', 1)"],
        "something_new": [],
    }
    told = misfits({"functions": functions, "batches": {}}, RELEASES[-1])
    assert told[0] == "dp_scatter: parameter 1 is global_tokens: 'torch.Tensor', SGLang's is forward_batch"
    assert {line.split(":")[0].split("(")[0] for line in told} == {
        "dp_scatter",
        "get_tbo_persistent_buffer",
        "dp_gather_partial_async",
        "something_new is missing",
    }


def test_the_functions_that_install_replaces_exist_in_every_release() -> None:
    since = {"mask_dp_pad_moe_topk_ids": 2, "init_dp_gathered_buffer": 2, "set_local_dp_buffer_len": 1}
    for index, release in enumerate(RELEASES):
        names = {name for name in (*MOVED, *TOLD, *MADE_BY) if since.get(name, 0) <= index}
        assert names <= set(RECORDED[release]["functions"]), release


def test_what_is_sglangs_own_is_never_replaced() -> None:
    own = {name for name, home in ELSEWHERE.items() if home == "SGLang's own"}
    assert len(own) == 7
    assert not own & {*MOVED, *TOLD, *MADE_BY}


def test_the_batches_have_the_fields_that_are_read() -> None:
    read = {"global_num_tokens_gpu", "dp_local_start_pos", "dp_local_num_tokens", "dp_padding_mode"}
    for contract in RECORDED.values():
        forward, logits = (set(contract["batches"][name]) for name in ("ForwardBatch", "LogitsMetadata"))
        assert {*read, "global_num_tokens_cpu"} <= forward
        assert {*read, "global_num_tokens_for_logprob_cpu"} <= logits
        assert "global_num_tokens_cpu" not in logits, "this tells the two apart"


def table() -> dict[str, re.Match[str]]:
    rows = {}
    for row in ROW.finditer(DOCS.read_text("utf-8")):
        rows.update(dict.fromkeys(re.findall(r"[\w.]+", row["names"]), row))
    return rows


def test_the_table_in_the_docs_has_a_full_row_for_every_function() -> None:
    every = {name for contract in RECORDED.values() for name in contract["functions"]}
    rows = table()
    assert not every - set(rows), "functions without a row"
    assert not set(rows) - every, "rows without a function"
    assert not [name for name, row in rows.items() if not all(cell.strip(" -") for cell in row.groups())]
    for name, home in ELSEWHERE.items():
        assert home in rows[name]["home"], name


def test_the_tests_that_the_table_names_exist() -> None:
    sources = {path.name: path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py")}
    every = "\n".join(sources.values())
    for row in table().values():
        named = re.findall(r"`(test_\w+)`|`(test_\w+\.py)`", row["tests"])
        assert named, row["names"]
        for test, file in named:
            assert file in sources if file else f"def {test}(" in every, f"{row['names']}: {test or file}"


def test_a_difference_reads_as_a_diff() -> None:
    before: Contract = {"functions": functions_of("def f(a, b=1): ...\ndef _g(): ..."), "batches": {"B": ["x"]}}
    after: Contract = {
        "functions": functions_of("def f(a, *, c=2): ...\nclass C:\n def m(self, d): ..."),
        "batches": {},
    }
    assert difference(before, after, ("old", "new")).splitlines() == [
        "--- old",
        "+++ new",
        "@@ -1,2 +1,2 @@",
        "-f(a, b=1)",
        "-B.x",
        "+C.m(d)",
        "+f(a, *, c=2)",
    ]
    assert not difference(before, before, ("old", "old"))


WHEELS = [Path(path) for path in os.environ.get("ROCM_DP_SGLANG_WHEELS", "").split(os.pathsep) if path]


@pytest.mark.skipif(not WHEELS, reason="ROCM_DP_SGLANG_WHEELS names no wheel")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_a_wheel_promises_what_is_recorded(wheel: Path) -> None:
    """A release that is not recorded is compared with the newest that is."""
    found, version = contract_of(wheel), version_of(wheel)
    release = version if version in RECORDED else RELEASES[-1]
    told = difference(RECORDED[release], found, (f"recorded {release}", f"{LAYER} of {version}"))
    assert not told, f"\n{told}"
    assert not misfits(found, release)
