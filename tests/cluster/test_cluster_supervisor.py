"""What starts, watches and ends the processes of a cluster; the processes here compute nothing."""

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
# A rank without MLX: it says what it is told to, lives until its line is cut, and ends as asked.
RANK = """
import json, os, sys, threading
told, plan = json.loads(sys.argv[1]), json.loads(sys.argv[2])
from dflash_mlx.cluster.member import RankProcess
end = told.get("line")
line = RankProcess(0, 1) if end is None else RankProcess(end, end)
mine = plan[str(told["rank"])]
if os.path.exists(mine.get("unless", "/nowhere")):
    mine = mine["then"]
for word in mine.get("says", []):
    line.send(*word.split(" ", 1))
if "writes" in mine:
    open(mine["writes"], "w").close()
heard = threading.Event()
line.lost = lambda problem: (print(problem, file=sys.stderr), heard.set())
if "code" in mine:
    os._exit(mine["code"])
heard.wait()
os._exit(0)
"""


def started(plan):
    """What starts such ranks."""

    class SteppedEngine(ClusterProcesses):
        all_pids: list[int] = []

        def __init__(self, hosts, arguments, listening=None):
            super().__init__(hosts, arguments, listening)
            self.all_pids += [rank.process.pid for rank in self.all]

        def _command(self, told):
            return [sys.executable, "-c", RANK, json.dumps(told), json.dumps(plan)]

    return SteppedEngine


@pytest.fixture
def supervised(monkeypatch):
    """Runs a plan: the exit code, what was said, and which processes there were."""

    def run(plan, listening=None):
        said = []
        played = started(plan)
        monkeypatch.setattr(supervisor, "ClusterProcesses", played)
        code = Supervisor(
            Hosts("ring", {}, (HERE, HERE)), arguments=[], report=said.append, listening=listening
        ).run()
        return code, said, played.all_pids

    return run


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


WRONG = {"says": ["failed It is missing there."], "code": 1}


@pytest.mark.parametrize(
    ("first", "second", "code", "said"),
    [
        ({"code": 0}, {}, 0, []),
        ({"code": 2}, {}, 2, []),  # rank 0 has said what is wrong
        ({"code": 1}, WRONG, 1, []),
        ({}, WRONG, 1, ["rank 1 (127.0.0.1): It is missing there."]),
    ],
)
def test_all_end_together_and_one_says_what_is_wrong(first, second, code, said, supervised):
    *ended, pids = supervised({"0": first, "1": second})
    assert ended == [code, said] and all(map(is_gone, pids))


def test_a_server_is_started_again(tmp_path, supervised):
    """Rank 1 is lost the first time."""
    mark = tmp_path / "begun"
    ends = {"unless": str(mark), "then": {"says": ["ready"], "code": 0}}
    says = ["ready", "lost rank 1 is gone."]
    plan = {"0": ends | {"says": says, "writes": str(mark)}, "1": {}}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, said, pids = supervised(plan, listening)
    assert code == 0 and said == ["rank 1 is gone: all are started again."]
    assert len(pids) == 4 and all(map(is_gone, pids))


def test_a_server_that_never_comes_is_given_up(supervised):
    lost = {"says": ["lost the link is down."]}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, said, pids = supervised({"0": lost, "1": {}}, listening)
    assert code == 1 and len(pids) == 6 and said[-1].endswith("the cluster has ended.")
    assert all(map(is_gone, pids))


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(supervisor, "KILL_SECONDS", 0.2)
    ignores = "import signal; signal.signal(15, 1); print(1, flush=True); signal.pause()"
    deaf = [sys.executable, "-c", ignores]

    class Deaf(ClusterProcesses):
        def _command(self, told):
            return deaf

    ranks = Deaf(Hosts("ring", {}, (HERE, HERE)), [])
    assert ranks.receive(30)  # rank 1 does not hear any more
    ranks.end()
    assert all(is_gone(rank.process.pid) for rank in ranks.all)


def test_what_does_not_end_is_noticed():
    stalled = threading.Event()
    watch = Watchdog(0.05, lambda seconds: stalled.set())
    with watch.watching():
        assert stalled.wait(30)


@pytest.mark.parametrize(
    ("content", "wrong"),
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
def test_an_invalid_file_of_hosts(content, wrong, tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=wrong):
        read_hosts(path)


def test_a_file_of_hosts(tmp_path):
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
    told = read_hosts(path).launches()[1]
    assert told["files"]["MLX_IBV_DEVICES"] == rdma
    assert told["environment"]["MLX_JACCL_COORDINATOR"].startswith("10.0.0.0:")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_hosts(tmp_path / "none.json")
