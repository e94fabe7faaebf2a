"""Ranks on two hosts, which are namespaces with a cable between them: what they share, how they lose each other."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import two_hosts
from two_hosts import PORT, RANKS, Host, answers
from two_hosts_rank import NOBODY, TIMEOUT

from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    Hosts = tuple[Host, Host]
    Ranks = list[subprocess.Popen[str]]

pytestmark = pytest.mark.timeout(150)

LONG = 90.0  # seconds for ranks to start and be done, on a machine that does other things too
SLACK = 5.0  # over a timeout: the grace for the lines of others, and turns on few cores
LATE = 3.0


@pytest.fixture(scope="module")
def possible() -> None:
    if why := two_hosts.missing():
        pytest.skip(why)


@pytest.fixture
def hosts(possible: None) -> Iterator[Hosts]:
    with two_hosts.two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def across(possible: None) -> list[dict[str, Any]]:
    """What each rank found that had nothing in its way."""
    with two_hosts.two_hosts() as both:
        return answers(start_north(both, "across") + start_south(both, "across"), within=LONG)


def start_north(hosts: Hosts, *what: str) -> Ranks:
    return hosts[0].start(range(RANKS), 2 * RANKS, *what, master=hosts[0].address)


def start_south(hosts: Hosts, *what: str, master: str = "") -> Ranks:
    return hosts[1].start(range(RANKS, 2 * RANKS), 2 * RANKS, *what, master=master or hosts[0].address)


def wait_for(line: str, ranks: Ranks) -> None:
    for one in ranks:
        assert one.stdout is not None
        assert one.stdout.readline() == f"{line}\n"


def all_are_gone(hosts: Hosts) -> bool:
    return not any(host.processes() for host in hosts)


def test_every_verb_is_right_and_every_plan_agreed_across_hosts(across: list[dict[str, Any]]) -> None:
    assert [each["checked"] for each in across] == [30] * 4


def test_what_needs_one_host_is_refused_and_names_the_other(across: list[dict[str, Any]]) -> None:
    verdicts = across[0]["verdicts"]
    assert all(each["verdicts"] == verdicts for each in across)
    for name in ("peer", "copy_engine", "aiter"):
        chosen, reason = verdicts[name]
        assert not chosen
        assert "rank 0: rank 2 is on another host (south)" in reason
        assert "rank 3: rank 0 is on another host (north)" in reason
    assert verdicts["all_gather"][0]


def test_ranks_of_one_of_the_hosts_are_not_refused(hosts: Hosts) -> None:
    north, _ = hosts
    said = answers(north.start(range(2), 2, "alone", master=north.address), within=LONG)
    assert [each["verdicts"]["peer"][0] for each in said] == [True, True]
    assert "another host" not in str(said)


def test_every_survivor_of_a_cut_is_told_within_the_timeout_and_ends(hosts: Hosts) -> None:
    ranks = start_north(hosts, "until_cut_off") + start_south(hosts, "until_cut_off")
    wait_for("ready", ranks)
    time.sleep(0.5)
    hosts[1].cut_off()
    said = answers(ranks, within=TIMEOUT + 2 * SLACK)
    for rank, each in enumerate(said):
        assert each["error"] == "RankMismatchError"
        assert each["seconds"] < TIMEOUT + SLACK
        assert each["rounds"] > 1, "the error must be that of the cut"
        assert each["after"]["error"] == "ClosedError"
        assert each["after"]["seconds"] < 1
        far = [str(other) for other in range(2 * RANKS) if (other < RANKS) != (rank < RANKS)]
        assert all("no answer" in each["values"][other] for other in far)
    assert all_are_gone(hosts)


@pytest.mark.soak
def test_a_host_that_comes_late_is_waited_for(hosts: Hosts) -> None:
    early = start_north(hosts, "meet")
    wait_for("joining", early)
    time.sleep(LATE)
    said = answers(early + start_south(hosts, "meet"), within=LONG)
    assert min(each["seconds"] for each in said[:RANKS]) > LATE


def test_a_wrong_address_is_told_with_the_address_in_bounded_time(hosts: Hosts) -> None:
    north, south = hosts
    nobody_listens_at = south.address
    ranks = start_north(hosts, "meet_nowhere") + start_south(hosts, "meet_nowhere", master=nobody_listens_at)
    for rank, each in enumerate(answers(ranks, within=LONG)):
        address = north.address if rank < RANKS else nobody_listens_at
        assert each["error"] == "RankMismatchError"
        assert f"the ranks did not all meet at {address}:{PORT} (timeout {NOBODY:g} s)" in each["text"]
        # When its time is over torch pauses, at random for up to as long again and more, and tries once more.
        assert each["seconds"] < 4 * NOBODY + SLACK
    assert all_are_gone(hosts)


@pytest.mark.soak
def test_validate_passes_under_torchrun_on_both(hosts: Hosts) -> None:
    agents = [
        host.python(
            *("-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={RANKS}"),
            *(f"--node-rank={number}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"),
            *("-m", "rocm_dp", "validate", "--transport", "all_gather_v", "--hidden", "24"),
        )
        for number, host in enumerate(hosts)
    ]
    reports = [agent.communicate(timeout=LONG)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    assert "on north" in reports[0]
    assert "on south" in reports[0]
    assert "PASSED" in reports[0]
    assert "PASSED" not in reports[1], "rank 0 alone reports"


def test_another_version_on_one_host_is_refused_at_the_start(hosts: Hosts) -> None:
    ranks = start_north(hosts, "meet", __version__) + start_south(hosts, "meet", "7.8.9")
    for each in answers(ranks, within=LONG):
        assert each["error"] == "RankMismatchError"
        assert "ranks disagree on the version of rocm_dp" in each["text"]
        assert each["values"] == {"0": __version__, "1": __version__, "2": "7.8.9", "3": "7.8.9"}


def test_what_still_runs_on_a_host_is_seen_and_ends_with_it(possible: None) -> None:
    with two_hosts.two_hosts() as both:
        left = [subprocess.Popen(host.enter("sleep", "600")) for host in both]
        deadline = time.monotonic() + 10
        while not all(host.processes() for host in both):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not all_are_gone(both)
    assert 0 not in [one.wait(timeout=10) for one in left]
    assert not any(psutil.pid_exists(host.init) for host in both)
