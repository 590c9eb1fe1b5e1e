"""`dflash-mlx doctor --hosts`: its checks of the machines of a cluster, and of their link."""

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
    """Ranks that send messages (rank, word, content), and have ended with the given exit codes."""

    def __init__(self, messages=(), codes=(None, None)):
        self.messages = list(messages)
        self.ended = False
        self.all = [ScriptedRank(number, code) for number, code in enumerate(codes)]

    def __call__(self, hosts, arguments):
        return self

    def receive(self, seconds):
        messages = self.messages
        self.messages = []
        return [(self.all[number], word, content) for number, word, content in messages]

    def end(self):
        self.ended = True


class ScriptedRank:
    def __init__(self, number, code):
        self.number = number
        self.process = self
        self.poll = lambda: code
        self.end = f"rank {number} ended ({code})"


def found_message(rank, backends=("ring",), **versions):
    """The message with which a rank reports its versions and backends."""
    return (rank, "found", json.dumps(VERSIONS | versions | {"backends": backends}))


def checks_of(path, monkeypatch, ranks):
    """The exit code and the checks by name, for ranks with scripted messages."""
    monkeypatch.setattr(hosts_check, "ClusterProcesses", ranks)
    monkeypatch.setattr(hosts_check, "MEASURE_SECONDS", 0.05)
    result = run("doctor", "--hosts", path, "--offline", "--json")
    content = json.loads(result.stdout)
    assert ranks.ended
    return result.returncode, {check["name"]: check for check in content["checks"]}


def test_different_versions_of_mlx_fail_the_check(tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json")
    ranks = ScriptedRanks([found_message(0), found_message(1, mlx="0.30.0", Python="3.11.8")])
    code, checks = checks_of(path, monkeypatch, ranks)
    assert code == 1 and checks["mlx"]["status"] == "fail"
    assert checks["mlx"]["detail"] == "0.30.0 and 0.32.4" and "mlx-lm" not in checks


def test_a_backend_that_one_machine_does_not_have_fails_the_check_of_the_link(
    tmp_path, monkeypatch
):
    path = hosts_file(tmp_path / "hosts.json", "jaccl")
    lost = (1, "lost", "no jaccl.")
    ranks = ScriptedRanks([lost, found_message(0, ("ring", "jaccl")), found_message(1)])
    code, checks = checks_of(path, monkeypatch, ranks)
    assert code == 1 and checks["link"]["detail"] == "no jaccl"
    assert "backends: ring, jaccl" in checks["rank 0, 127.0.0.1"]["detail"]
    assert "RDMA" in checks["link"]["advice"]


@pytest.mark.parametrize(
    ("messages", "code", "name", "detail", "advice"),
    [
        ([found_message(0)], 255, "rank 1, mac2", "does not run (255)", "ssh mac2"),
        ([found_message(0)], None, "rank 1, mac2", "not answered", "ssh mac2"),
        (
            [found_message(0), found_message(1), (1, "lost", "it is down.")],
            None,
            "link",
            "it is down",
            "firewall",
        ),
        ([found_message(0), found_message(1)], None, "link", "did not meet", "firewall"),
    ],
)
def test_a_machine_that_does_not_join_fails_its_check_with_advice(
    messages, code, name, detail, advice, tmp_path, monkeypatch
):
    path = hosts_file(tmp_path / "hosts.json")
    exit_code, checks = checks_of(path, monkeypatch, ScriptedRanks(messages, (None, code)))
    failed = checks[name]
    assert exit_code == 1 and failed["status"] == "fail"
    assert detail in failed["detail"] and advice in failed["advice"]


def test_a_model_whose_config_has_no_hidden_size_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    path = hosts_file(tmp_path / "hosts.json")
    result = run("doctor", "--hosts", path, "--model", tmp_path, "--offline")
    assert result.returncode == 1 and not result.stdout
    assert ": hidden_size must be 1 or more, not None." in result.stderr


def test_two_ranks_on_this_machine_pass_all_checks_and_their_link_is_measured(tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": "127.0.0.1"}] * 2))
    result = start("doctor", "--hosts", path, "--json", timeout=300)
    content = json.loads(result.stdout)
    assert result.returncode == 0 and content["ok"], result.stdout
    link = content["link"]
    assert link["machines"] == 2 and link["width"] == 192
    assert link["row"] > 0 and link["bandwidth"] > 0
    names = [check["name"] for check in content["checks"]]
    assert names == ["rank 0, 127.0.0.1", "rank 1, 127.0.0.1", "link"]


def test_a_rank_that_joins_no_other_machine_ends_with_an_error(monkeypatch):
    """Without its backend MLX makes a group of one rank, so only rank 0 could be alone."""
    monkeypatch.setenv("MLX_RANK", "1")
    for command in (("generate", "hi"), ("doctor",)):
        result = run(*command)
        assert result.returncode == 1 and "not connected to any other machine" in result.stderr
