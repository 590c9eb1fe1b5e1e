"""`dflash-mlx doctor --hosts`: what it says of machines that cannot take part, and of a link."""

import json

import pytest
from program import run, start

from dflash_mlx.cluster import hosts_check

VERSIONS = {"Python": "3.11.7", "dflash-mlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}


def hosts_file(path, backend="ring", machines=("127.0.0.1", "mac2")):
    hosts = [{"ssh": name, "ips": [f"10.0.0.{index}"]} for index, name in enumerate(machines, 1)]
    path.write_text(json.dumps({"backend": backend, "hosts": hosts}))
    return path


class ScriptedRanks:
    """Ranks that send these messages, as (rank, word, content), or have ended with these codes."""

    def __init__(self, words=(), codes=(None, None)):
        self.words = list(words)
        self.ended = False
        self.all = [ScriptedRank(number, code) for number, code in enumerate(codes)]

    def __call__(self, hosts, arguments):
        return self

    def receive(self, seconds):
        lines = self.words
        self.words = []
        return [(self.all[number], word, content) for number, word, content in lines]

    def end(self):
        self.ended = True


class ScriptedRank:
    def __init__(self, number, code):
        self.number = number
        self.process = self
        self.poll = lambda: code
        self.end = f"rank {number} ended ({code})"


def finding(rank, backends=("ring",), **versions):
    return (rank, "found", json.dumps(VERSIONS | versions | {"backends": backends}))


def checks_of(path, monkeypatch, ranks):
    """The exit code, and the checks, where the ranks answer so."""
    monkeypatch.setattr(hosts_check, "ClusterProcesses", ranks)
    monkeypatch.setattr(hosts_check, "MEASURE_SECONDS", 0.05)
    done = run("doctor", "--hosts", path, "--offline", "--json")
    content = json.loads(done.stdout)
    assert ranks.ended
    return done.returncode, {check["name"]: check for check in content["checks"]}


def test_other_versions_are_named(tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json")
    ranks = ScriptedRanks([finding(0), finding(1, mlx="0.30.0", Python="3.11.8")])
    code, checks = checks_of(path, monkeypatch, ranks)
    assert code == 1 and checks["mlx"]["status"] == "fail"
    assert checks["mlx"]["detail"] == "0.30.0 and 0.32.4" and "mlx-lm" not in checks


def test_a_backend_that_a_machine_does_not_have(tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json", "jaccl")
    lost = (1, "lost", "no jaccl.")
    ranks = ScriptedRanks([lost, finding(0, ("ring", "jaccl")), finding(1)])
    code, checks = checks_of(path, monkeypatch, ranks)
    assert code == 1 and checks["link"]["detail"] == "no jaccl"
    assert "backends: ring, jaccl" in checks["rank 0, 127.0.0.1"]["detail"]
    assert "RDMA" in checks["link"]["advice"]


@pytest.mark.parametrize(
    ("words", "code", "name", "detail", "advice"),
    [
        ([finding(0)], 255, "rank 1, mac2", "does not run (255)", "ssh mac2"),
        ([finding(0)], None, "rank 1, mac2", "not answered", "ssh mac2"),
        (
            [finding(0), finding(1), (1, "lost", "it is down.")],
            None,
            "link",
            "it is down",
            "firewall",
        ),
        ([finding(0), finding(1)], None, "link", "did not meet", "firewall"),
    ],
)
def test_what_keeps_machines_apart(words, code, name, detail, advice, tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json")
    exit_code, checks = checks_of(path, monkeypatch, ScriptedRanks(words, (None, code)))
    failed = checks[name]
    assert exit_code == 1 and failed["status"] == "fail"
    assert detail in failed["detail"] and advice in failed["advice"]


def test_a_model_without_a_width_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    path = hosts_file(tmp_path / "hosts.json")
    done = run("doctor", "--hosts", path, "--model", tmp_path, "--offline")
    assert done.returncode == 1 and not done.stdout
    assert ": hidden_size must be 1 or more, not None." in done.stderr


def test_two_ranks_on_this_machine(tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": "127.0.0.1"}] * 2))
    done = start("doctor", "--hosts", path, "--json", timeout=300)
    content = json.loads(done.stdout)
    assert done.returncode == 0 and content["ok"], done.stdout
    link = content["link"]
    assert link["machines"] == 2 and link["width"] == 192
    assert link["row"] > 0 and link["bandwidth"] > 0
    names = [check["name"] for check in content["checks"]]
    assert names == ["rank 0, 127.0.0.1", "rank 1, 127.0.0.1", "link"]


def test_a_rank_that_finds_nobody(monkeypatch):
    """MLX makes a group of one where a backend is not there: no rank but the first is alone."""
    monkeypatch.setenv("MLX_RANK", "1")
    for command in (("generate", "hi"), ("doctor",)):
        done = run(*command)
        assert done.returncode == 1 and "joined no other machine" in done.stderr
