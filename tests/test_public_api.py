"""What users may rely on: names, signatures, errors, and what an import loads. A change here is a decision."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest

import rocm_dp
from rocm_dp import errors, testing

NEEDS_TORCH = {"Agreement", "GraphPlan", "Groups", "Pending", "StepRules", "TokenExchange", "agree", "confirm"}
NAMES = {
    "Agreement",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DtypeError",
    "EventPoolExhausted",
    "ExchangeStats",
    "GraphPlan",
    "Groups",
    "Half",
    "Layer",
    "Options",
    "OverlapVerdict",
    "PaddingMode",
    "PeerRefusedError",
    "PeerTimeoutError",
    "Pending",
    "Phase",
    "RankFailedError",
    "RankLayout",
    "RankMismatchError",
    "RocmDpError",
    "SlotBusyError",
    "StaleViewError",
    "StepRules",
    "TensorError",
    "TokenExchange",
    "TokenPlan",
    "TraceError",
    "TransportRefusedError",
    "TransportVerdict",
    "__version__",
    "agree",
    "choose_padding",
    "confirm",
    "interleave",
    "overlapped_forward",
    "serial_forward",
}

FUNCTIONS = {
    "agree": (
        "(count: 'int', *, phase: 'Phase', can_overlap: 'bool', can_graph: 'bool', groups: 'Groups', "
        "layout: 'RankLayout', want_overlap: 'bool | None' = None, collectives: 'Sequence[str]' = (), "
        "rules: 'StepRules' = StepRules(padding=None, align=None, max_count=2147483647, hybrid_ssm=False, "
        "sum_len_in_graphs=False)) -> 'Agreement'"
    ),
    "choose_padding": (
        "(counts: 'Iterable[int]', *, phase: 'Phase', capturing: 'bool' = False, hybrid_ssm: 'bool' = False, "
        "sum_len_in_graphs: 'bool' = False) -> 'PaddingMode'"
    ),
    "confirm": "(plan: 'TokenPlan', *, groups: 'Groups') -> 'None'",
    "interleave": ("(*batches: 'Generator[None, None, T]', exchange: 'TokenExchange | None' = None) -> 'list[T]'"),
    "overlapped_forward": (
        "(layers: 'Sequence[Layer[S]]', halves: 'Sequence[Half[S]]', exchange: 'TokenExchange') -> 'list[S]'"
    ),
    "serial_forward": "(layers: 'Sequence[Layer[S]]', step: 'Half[S]', exchange: 'TokenExchange') -> 'S'",
}
CONSTRUCTORS = {
    "Agreement": "(plan: 'TokenPlan', overlap: 'bool', graph: 'bool') -> None",
    "GraphPlan": (
        "(dp_size: 'int', *, capacity: 'int', per_rank_capacity: 'int', device: 'torch.device') -> 'None'"
    ),
    "Options": (
        "(transport: 'str | None' = None, table: 'str | None' = 'tuned', peer_memory: 'str' = 'ipc', "
        "max_events: 'int' = 256, "
        "max_in_flight: 'int' = 1024, "
        "timeout: 'float' = 300.0, "
        "confirm_calls: 'bool' = False, poison: 'bool' = False) -> None"
    ),
    "PeerTimeoutError": (
        "(message: 'str', *, verb: 'str' = '', batch: 'int' = 0, epoch: 'int' = 0, "
        "missing: 'tuple[int, ...]' = ()) -> 'None'"
    ),
    "RankLayout": (
        "(rank: 'int', world_size: 'int', dp_size: 'int' = 1, cp_size: 'int' = 1, moe_dp_size: 'int' = 1) -> None"
    ),
    "StepRules": (
        "(padding: 'PaddingMode | None' = None, align: 'int | None' = None, max_count: 'int' = 2147483647, "
        "hybrid_ssm: 'bool' = False, sum_len_in_graphs: 'bool' = False) -> None"
    ),
    "TokenExchange": (
        "(layout: 'RankLayout', groups: 'Groups', *, device: 'torch.device | str', hidden: 'int', "
        "dtype: 'torch.dtype', max_rows: 'int | None' = None, max_local_rows: 'int | None' = None, "
        "options: 'Options' = Options(transport=None, table='tuned', peer_memory='ipc', max_events=256, "
        "max_in_flight=1024, timeout=300.0, confirm_calls=False, poison=False)) -> 'None'"
    ),
    "TokenPlan": (
        "(counts: 'tuple[int, ...]', padding: 'PaddingMode', phase: 'Phase' = <Phase.PREFILL: 1>, "
        "align: 'int' = 1) -> None"
    ),
    "TransportVerdict": "(name: 'str', chosen: 'bool', reason: 'str') -> None",
}
PLAN = "plan: 'TokenPlan | GraphPlan'"
GATHER = f"local: 'torch.Tensor', {PLAN}, *, partial: 'bool' = False, batch: 'int' = 0"
MANY = f"tensors: 'Sequence[torch.Tensor]', {PLAN}, *, batch: 'int' = 0"
COMBINE = f"partial: 'torch.Tensor', {PLAN}, *, batch: 'int' = 0"
THIN = "(self, x: 'torch.Tensor', *, out: 'torch.Tensor | None' = None) -> 'torch.Tensor'"
METHODS = {
    "TokenExchange": {
        "gather": f"(self, {GATHER}) -> 'torch.Tensor'",
        "gather_async": f"(self, {GATHER}) -> 'Pending[torch.Tensor]'",
        "gather_many": f"(self, {MANY}) -> 'list[torch.Tensor]'",
        "gather_many_async": f"(self, {MANY}) -> 'Pending[list[torch.Tensor]]'",
        "combine": f"(self, {COMBINE}) -> 'torch.Tensor'",
        "combine_async": f"(self, {COMBINE}) -> 'Pending[torch.Tensor]'",
        "combine_input": "(self, plan: 'TokenPlan | GraphPlan', *, batch: 'int' = 0) -> 'torch.Tensor'",
        "scatter": "(self, full: 'torch.Tensor', plan: 'TokenPlan') -> 'torch.Tensor'",
        "graph_plan": "(self, *, capacity: 'int', per_rank_capacity: 'int') -> 'GraphPlan'",
        "reserve": (
            "(self, *, batches: 'int' = 1, many: 'Sequence[tuple[int, torch.dtype]]' = (), "
            "plans: 'Sequence[GraphPlan]' = ()) -> 'None'"
        ),
        "explain": (
            f"(self, {PLAN}, *, overlap: 'bool' = False, graph: 'bool' = False) -> 'list[TransportVerdict]'"
        ),
        "overlap_verdict": f"(self, {PLAN}, *, graph: 'bool' = False) -> 'OverlapVerdict'",
        "give_up": "(self, error: 'BaseException') -> 'None'",
        "stats": "(self) -> 'ExchangeStats'",
        "drain": "(self) -> 'None'",
        "close": "(self) -> 'None'",
        **{
            f"{group}_{verb}": THIN
            for group in ("tp", "cp", "moe_cp")
            for verb in ("all_reduce", "reduce_scatter", "all_gather")
        },
    },
    "GraphPlan": {"update": "(self, counts: 'Iterable[int]') -> 'None'"},
    "Groups": {
        "create": (
            "(layout: 'RankLayout', *, backend: 'str | None' = None, "
            "timeout: 'timedelta' = datetime.timedelta(seconds=300)) -> 'Groups'"
        ),
        "borrow": "(layout: 'RankLayout', **groups: 'dist.ProcessGroup') -> 'Groups'",
        "check_open": "(self) -> 'None'",
        "close": "(self) -> 'None'",
    },
    "Pending": {"wait": "(self) -> 'T'"},
    "RankLayout": {
        "tp_ranks": "(self, dp: 'int', cp: 'int') -> 'tuple[int, ...]'",
        "cp_ranks": "(self, dp: 'int', tp: 'int') -> 'tuple[int, ...]'",
        "moe_dp_ranks": "(self) -> 'tuple[int, ...]'",
    },
    "TokenPlan": {"halves": "(self) -> 'tuple[TokenPlan, TokenPlan]'"},
}
PROPERTIES = {
    "GraphPlan": {"rows", "digest"},
    "TokenExchange": {"comm_stream"},
    "RankLayout": {"tp_size", "replicas", "dp_rank", "replica_rank", "cp_rank", "tp_rank"},
    "TokenPlan": {"total", "skew", "digest"},
}
# What an object without fields keeps in slots; nothing else can be set on it.
ATTRIBUTES = {"GraphPlan": {"capacity", "counts", "per_rank_capacity"}}
FIELDS = {
    "Agreement": ("plan", "overlap", "graph"),
    "ExchangeStats": (
        "slots",
        "buffers_made",
        "buffer_bytes",
        "growths",
        "events_made",
        "events_held",
        "streams_made",
        "records_in_flight",
        "pendings",
        "calls",
    ),
    "RankLayout": ("rank", "world_size", "dp_size", "cp_size", "moe_dp_size"),
    "TokenPlan": ("counts", "padding", "phase", "align", "sizes", "starts", "rows", "_hash"),
    "TransportVerdict": ("name", "chosen", "reason"),
}

ERRORS: dict[str, tuple[type[Exception], ...]] = {
    "RocmDpError": (Exception,),
    "ConfigError": (errors.RocmDpError, ValueError),
    "TensorError": (errors.RocmDpError, ValueError),
    "DtypeError": (errors.TensorError, TypeError),
    "TraceError": (errors.RocmDpError, ValueError),
    "RankMismatchError": (errors.RocmDpError, RuntimeError),
    "RankFailedError": (errors.RocmDpError, RuntimeError),
    "TransportRefusedError": (errors.RocmDpError, RuntimeError),
    "PeerRefusedError": (errors.RocmDpError, RuntimeError),
    "PeerTimeoutError": (errors.RocmDpError, RuntimeError),
    "SlotBusyError": (errors.RocmDpError, RuntimeError),
    "StaleViewError": (errors.RocmDpError, RuntimeError),
    "EventPoolExhausted": (errors.RocmDpError, RuntimeError),
    "CapacityError": (errors.RocmDpError, RuntimeError),
    "ClosedError": (errors.RocmDpError, RuntimeError),
}


def public(name: str) -> Any:
    return getattr(rocm_dp, name)


def defined_in(cls: type) -> dict[str, Any]:
    """Public members of ``cls`` and of its bases here, by name."""
    return {
        name: inspect.getattr_static(cls, name)
        for base in cls.__mro__
        if base.__module__.startswith("rocm_dp")
        for name in vars(base)
        if not name.startswith("_")
    }


def methods_of(cls: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(getattr(cls, name)))
        for name, member in defined_in(cls).items()
        if inspect.isfunction(member) or isinstance(member, classmethod)
    }


def python(code: str, *args: str, **environment: str) -> list[Any]:
    """Run ``code`` in a fresh interpreter; return the JSON value that each line of its output holds."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_public_names_are_these() -> None:
    assert set(rocm_dp.__all__) == NAMES
    assert len(rocm_dp.__all__) == len(NAMES)
    assert dir(rocm_dp) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_every_public_name_is_there_and_documented_as_its_own(name: str) -> None:
    found = public(name)
    assert found.__name__ == name
    documented = inspect.getdoc(found)
    assert documented
    # A dataclass without a docstring gets its signature as one; a class inherits that of its base.
    assert not documented.startswith(f"{name}(")
    assert found.__doc__ is not None


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'rocm_dp' has no attribute 'gather'$"):
        public("gather")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_functions_are_called_like_this(name: str) -> None:
    assert str(inspect.signature(public(name))) == FUNCTIONS[name]


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_classes_are_made_like_this(name: str) -> None:
    assert str(inspect.signature(public(name))) == CONSTRUCTORS[name]


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_are_these_and_called_like_this(name: str) -> None:
    assert methods_of(public(name)) == METHODS[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_and_property_is_documented(name: str) -> None:
    cls = public(name)
    members = {
        member: value
        for member, value in defined_in(cls).items()
        if isinstance(value, property | classmethod) or inspect.isfunction(value)
    }
    assert members
    assert [member for member in members if not inspect.getdoc(getattr(cls, member))] == []


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_properties_are_these(name: str) -> None:
    members = defined_in(public(name))
    assert {member for member, value in members.items() if isinstance(value, property)} == PROPERTIES[name]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_attributes_are_these_and_no_other_can_be_set(name: str) -> None:
    cls = public(name)
    members = defined_in(cls)
    assert {member for member, value in members.items() if inspect.ismemberdescriptor(value)} == ATTRIBUTES[name]
    assert "__slots__" in vars(cls)
    assert cls.__dictoffset__ == 0


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_of_the_values_are_these(name: str) -> None:
    assert tuple(field.name for field in dataclasses.fields(public(name))) == FIELDS[name]


@pytest.mark.parametrize("name", ["Agreement", "ExchangeStats", "Options", "RankLayout", "StepRules", "TokenPlan"])
def test_the_values_are_frozen_and_have_slots(name: str) -> None:
    cls = public(name)
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)


def test_a_plan_keeps_its_hash_to_itself() -> None:
    [kept] = [field for field in dataclasses.fields(rocm_dp.TokenPlan) if field.name.startswith("_")]
    assert (kept.init, kept.repr, kept.compare) == (False, False, False)
    plan, same = (rocm_dp.TokenPlan((3, 0), rocm_dp.PaddingMode.SUM_LEN) for _ in range(2))
    assert hash(plan) == hash(same) == plan._hash
    assert "hash" not in repr(plan)


@pytest.mark.parametrize("padding", rocm_dp.PaddingMode)
def test_a_plan_from_another_process_hashes_and_compares_as_one_made_there(padding: rocm_dp.PaddingMode) -> None:
    code = """
import json, pickle, sys, rocm_dp
came = pickle.loads(bytes.fromhex(sys.argv[1]))
made = rocm_dp.TokenPlan((3, 0), rocm_dp.PaddingMode[sys.argv[2]], rocm_dp.Phase.DECODE, align=2)
print(json.dumps([came == made, hash(came) == hash(made), {made: "found"}.get(came)]))
print(json.dumps(hash(made.padding)))
"""
    plan = rocm_dp.TokenPlan((3, 0), padding, rocm_dp.Phase.DECODE, align=2)
    sent = pickle.dumps(plan).hex()
    told = [python(code, sent, padding.name, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert [same for same, _ in told] == [[True, True, "found"]] * 2
    # The seeds do tell: a hash of the enum would differ.
    assert len({of_padding for _, of_padding in told}) == 2


def test_the_enums_have_these_members() -> None:
    assert {mode.name: mode.value for mode in rocm_dp.PaddingMode} == {"MAX_LEN": 1, "SUM_LEN": 2}
    assert {phase.name: phase.value for phase in rocm_dp.Phase} == {"PREFILL": 1, "DECODE": 2, "IDLE": 3}


@pytest.mark.parametrize("name", ["TokenExchange", "Groups"])
def test_what_must_be_closed_is_a_context_manager(name: str) -> None:
    assert {"__enter__", "__exit__", "close"} <= vars(public(name)).keys()


def test_run_ranks_is_called_like_this() -> None:
    parameters = inspect.signature(testing.run_ranks).parameters.values()
    bare = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    assert bare == ["fn", "world_size", "*args", "backend=None", "timeout=60.0"]


def test_the_errors_are_these_with_these_bases() -> None:
    found = {
        name: value.__bases__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == ERRORS


def test_the_tree_in_the_docstring_of_errors_is_the_tree_of_classes() -> None:
    """Each line is ``<branches>Name (BuiltinBase)  why``, four columns deeper than its parent."""
    assert errors.__doc__
    drawn: dict[str, tuple[str, str | None]] = {}
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+)(?: \((\w+)\)  +\S.*)?$", line):
            branches, name, builtin = match.groups()
            depth = len(branches) // 4
            del parents[depth:]
            drawn[name] = (parents[-1] if parents else "Exception", builtin)
            parents.append(name)
    actual = {
        name: (bases[0].__name__, bases[1].__name__ if len(bases) > 1 else None) for name, bases in ERRORS.items()
    }
    assert drawn == actual


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_documented(name: str) -> None:
    assert vars(errors)[name].__doc__


def test_a_peer_timeout_says_which_call_and_who_is_missing_after_pickling_too() -> None:
    error = errors.PeerTimeoutError("nobody came", verb="gather", batch=1, epoch=2**40, missing=(2, 5))
    for known in (error, pickle.loads(pickle.dumps(error))):
        assert type(known) is errors.PeerTimeoutError
        assert known.args == ("nobody came",)
        assert str(known) == "nobody came"
        assert (known.verb, known.batch, known.epoch, known.missing) == ("gather", 1, 2**40, (2, 5))


def test_a_peer_timeout_of_no_known_call_names_none() -> None:
    error = errors.PeerTimeoutError("nobody came")
    assert (error.verb, error.batch, error.epoch, error.missing) == ("", 0, 0, ())


def test_importing_the_package_loads_no_heavy_dependency() -> None:
    code = """
import json, sys, rocm_dp
print(json.dumps([name in sys.modules for name in ("torch", "triton", "numpy")]))
rocm_dp.TokenExchange
print(json.dumps("torch" in sys.modules))
"""
    assert python(code) == [[False, False, False], True]


WITHOUT_TORCH = """
import json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "triton"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
import rocm_dp

told = {}
for name in rocm_dp.__all__:
    try:
        getattr(rocm_dp, name)
    except ModuleNotFoundError as error:
        told[name] = [str(error), error.name]
print(json.dumps(told))
plan = rocm_dp.TokenPlan((3, 0), rocm_dp.choose_padding((3, 0), phase=rocm_dp.Phase.PREFILL))
print(json.dumps([plan.rows, rocm_dp.RankLayout(1, 2, 2).dp_rank]))
"""


def test_without_torch_plans_and_layouts_work_and_the_rest_says_how_to_get_it() -> None:
    told, worked = python(WITHOUT_TORCH)
    how = "which rocm_dp never installs by itself: use the image's own on ROCm, or pip install 'rocm-dp[cpu]'"
    assert told == {name: [f"rocm_dp.{name} needs torch, {how}", "torch"] for name in NEEDS_TORCH}
    assert worked == [3, 1]


def test_another_missing_module_is_not_blamed_on_torch() -> None:
    code = """
import json, sys

class NoHashlib:
    def find_spec(self, name, path=None, target=None):
        if name == "hashlib":
            raise ModuleNotFoundError("No module named 'hashlib'", name=name)

sys.modules.pop("hashlib", None)
sys.meta_path.insert(0, NoHashlib())
import rocm_dp
try:
    rocm_dp.TokenPlan
except ModuleNotFoundError as error:
    print(json.dumps([str(error), error.name]))
"""
    assert python(code) == [["No module named 'hashlib'", "hashlib"]]


def test_no_module_has_a_public_name_that_it_would_hide_once_imported() -> None:
    modules = {module.name for module in pkgutil.iter_modules(rocm_dp.__path__)}
    assert "plan" in modules
    assert modules & NAMES == set()
