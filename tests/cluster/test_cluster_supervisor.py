"""The supervisor of a cluster's processes, with processes that compute nothing; files of hosts."""

import json
import os
import socket
import sys
import threading

import pytest

from dflash_mlx.cluster import supervisor
from dflash_mlx.cluster.hosts import Host, Hosts, read_hosts
from dflash_mlx.cluster.supervisor import ClusterProcesses, Supervisor
from dflash_mlx.cluster.watchdog import Watchdog
from dflash_mlx.errors import SettingsError

HERE = Host("127.0.0.1", ("127.0.0.1",))
# A rank without MLX. Its plan says which messages it sends ("says"), which file it creates
# ("writes"), and its exit code ("code"); without a code it ends when its connection is lost. If the
# file "unless" exists, the plan "then" replaces it.
RANK = """
import json, os, sys, threading
options, plans = json.loads(sys.argv[1]), json.loads(sys.argv[2])
from dflash_mlx.cluster.member import RankProcess
end = options.get("line")
line = RankProcess(0, 1) if end is None else RankProcess(end, end)
plan = plans[str(options["rank"])]
if os.path.exists(plan.get("unless", "/nowhere")):
    plan = plan["then"]
for message in plan.get("says", []):
    line.send(*message.split(" ", 1))
if "writes" in plan:
    open(plan["writes"], "w").close()
lost = threading.Event()
line.lost = lambda problem: (print(problem, file=sys.stderr), lost.set())
if "code" in plan:
    os._exit(plan["code"])
lost.wait()
os._exit(0)
"""


def processes_with(plans):
    """A class of cluster processes whose ranks follow these plans; it records their pids."""

    class PlannedProcesses(ClusterProcesses):
        all_pids: list[int] = []

        def __init__(self, hosts, arguments, listening=None):
            super().__init__(hosts, arguments, listening)
            self.all_pids += [rank.process.pid for rank in self.all]

        def _command(self, options):
            return [sys.executable, "-c", RANK, json.dumps(options), json.dumps(plans)]

    return PlannedProcesses


@pytest.fixture
def supervise(monkeypatch):
    """A function that runs plans: it returns the exit code, the reports, and all pids."""

    def run(plans, listening=None):
        reports = []
        processes = processes_with(plans)
        monkeypatch.setattr(supervisor, "ClusterProcesses", processes)
        code = Supervisor(
            Hosts("ring", {}, (HERE, HERE)),
            arguments=[],
            report=reports.append,
            listening=listening,
        ).run()
        return code, reports, processes.all_pids

    return run


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


FAILING = {"says": ["failed It is missing there."], "code": 1}


@pytest.mark.parametrize(
    ("first", "second", "expected_code", "expected_reports"),
    [
        ({"code": 0}, {}, 0, []),
        ({"code": 2}, {}, 2, []),  # rank 0 reports its errors itself
        ({"code": 1}, FAILING, 1, []),
        ({}, FAILING, 1, ["rank 1 (127.0.0.1): It is missing there."]),
    ],
)
def test_all_ranks_end_when_one_does_and_an_error_is_reported_once(
    first, second, expected_code, expected_reports, supervise
):
    code, reports, pids = supervise({"0": first, "1": second})
    assert (code, reports) == (expected_code, expected_reports)
    assert all(is_gone(pid) for pid in pids)


def test_a_server_that_lost_a_rank_is_started_again(tmp_path, supervise):
    """Rank 0 reports that it lost rank 1 the first time, and ends well the second time."""
    started_once = tmp_path / "started"
    rank_0 = {
        "says": ["ready", "lost rank 1 is gone."],
        "writes": str(started_once),
        "unless": str(started_once),
        "then": {"says": ["ready"], "code": 0},
    }
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, reports, pids = supervise({"0": rank_0, "1": {}}, listening)
    assert code == 0 and reports == ["rank 1 is gone: all are started again."]
    assert len(pids) == 4 and all(is_gone(pid) for pid in pids)


def test_a_server_that_never_gets_ready_is_started_three_times(supervise):
    lost = {"says": ["lost the link is down."]}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, reports, pids = supervise({"0": lost, "1": {}}, listening)
    assert code == 1 and len(pids) == 6 and reports[-1].endswith("the cluster has ended.")
    assert all(is_gone(pid) for pid in pids)


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(supervisor, "KILL_SECONDS", 0.2)
    program = "import signal; signal.signal(15, 1); print(1, flush=True); signal.pause()"

    class ProcessesIgnoringSigterm(ClusterProcesses):
        def _command(self, options):
            return [sys.executable, "-c", program]

    ranks = ProcessesIgnoringSigterm(Hosts("ring", {}, (HERE, HERE)), [])
    assert ranks.receive(30)  # from now on rank 1 ignores the signal
    ranks.end()
    assert all(is_gone(rank.process.pid) for rank in ranks.all)


def test_the_watchdog_notices_a_call_that_does_not_end():
    stalled = threading.Event()
    watch = Watchdog(0.05, lambda seconds: stalled.set())
    with watch.watching():
        assert stalled.wait(30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "two hosts"),
        ('[{"ssh": "127.0.0.1"}, {"ips": ["1.2.3.4"]}]', "ssh and ips"),
        ('[{"ssh": "127.0.0.1"}, {"ssh": "-oProxyCommand=x", "ips": ["1.2.3.4"]}]', "ssh and ips"),
        ('[{"ssh": "127.0.0.1"}, {"ssh": "mac2", "ips": []}]', "needs ips"),
        ('[{"ssh": "mac2", "ips": ["1.2.3.4"]}, {"ssh": "127.0.0.1"}]', "the first host"),
        ('[{"ssh": "127.0.0.1"}, {"ssh": "mac2", "ips": ["127.0.0.1"]}]', "needs ips"),
        ('{"backend": "mpi", "hosts": []}', "mlx.launch"),
        ('{"envs": 3, "hosts": [{"ssh": "localhost"}, {"ssh": "localhost"}]}', "envs"),
    ],
)
def test_the_error_for_an_invalid_file_of_hosts_says_what_is_wrong(content, message, tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=message):
        read_hosts(path)


def test_a_file_of_hosts_gives_each_rank_its_files_and_environment(tmp_path):
    """For the backends ring and jaccl."""
    path = tmp_path / "hosts.json"
    rdma = [(None, "rdma_en2"), ("rdma_en2", None)]
    hosts = [
        {"ssh": name, "ips": [f"10.0.0.{index}"], "rdma": rdma[index]}
        for index, name in enumerate(("127.0.0.1", "mac2"))
    ]
    path.write_text(json.dumps({"envs": ["A=1=2"], "hosts": hosts}))
    parsed = read_hosts(path)
    assert parsed.backend == "ring" and parsed.environment == {"A": "1=2"}
    first, second = parsed.launches()
    ring = first["files"]["MLX_HOSTFILE"]
    assert [address[0].rpartition(":")[0] for address in ring] == ["10.0.0.0", "10.0.0.1"]
    assert (first["rank"], second["rank"]) == (0, 1) and second["files"] == first["files"]
    path.write_text(json.dumps({"backend": "jaccl", "hosts": hosts}))
    launch = read_hosts(path).launches()[1]
    assert launch["files"]["MLX_IBV_DEVICES"] == rdma
    assert launch["environment"]["MLX_JACCL_COORDINATOR"].startswith("10.0.0.0:")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_hosts(tmp_path / "none.json")
