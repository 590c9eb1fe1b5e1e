"""`dflash-mlx doctor --hosts`: what it says of machines that cannot take part, and of a link."""

import json
import sys

import pytest
from program import run, start

from dflash_mlx.cli import doctor_hosts
from dflash_mlx.cluster.hosts import Host, Hosts
from dflash_mlx.cluster.probe import HostReport, probe

HERE, THERE = Host("127.0.0.1", ("127.0.0.1",)), Host("mac2", ("10.0.0.2",))
VERSIONS = {"Python": "3.11.7", "dflash-mlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Replaces ssh by a shell script that gets what ssh would."""

    def replaced(script):
        path = tmp_path / "ssh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return replaced


def test_a_machine_is_asked_through_ssh(ssh):
    answer = json.dumps(VERSIONS | {"backends": ["ring"]})
    ssh(f"echo '{answer}'")
    [found] = probe([THERE])
    assert found == HostReport(THERE, VERSIONS, ("ring",))


def test_the_command_runs_in_this_folder_with_this_python(ssh):
    """As a rank is started: without a question; ssh hands the last word to a shell over there."""
    shell = 'for last; do :; done; sh -c "$last"'
    ssh(f'case "$*" in *BatchMode=yes*mac2*) ;; *) exit 9;; esac; {shell}')
    [found] = probe([THERE])
    assert not found.problem and "ring" in found.backends
    assert found.versions["Python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("script", "problem", "advice"),
    [
        ("echo Permission denied >&2; exit 255", "Permission denied", "ssh-copy-id mac2"),
        ("exit 127", "not installed there", "same folder"),
        ("echo No module named dflash_mlx >&2; exit 1", "not installed", "same folder"),
        ("echo boom >&2; exit 3", "fails: boom", "doctor' there"),
        ("echo Welcome!", "answers 'Welcome!'", "print something"),
        ("exec sleep 100", "not answered", "asleep"),
    ],
)
def test_a_machine_that_cannot_take_part(script, problem, advice, ssh):
    ssh(script)
    [found] = probe([THERE], seconds=0.5 if "sleep" in script else 60)
    assert problem in found.problem and advice in found.advice and not found.backends


def hosts_file(path, backend="ring", machines=("127.0.0.1", "mac2")):
    hosts = [{"ssh": name, "ips": [f"10.0.0.{at}"]} for at, name in enumerate(machines, 1)]
    path.write_text(json.dumps({"backend": backend, "hosts": hosts}))
    return path


def checks_of(path, monkeypatch, *answers):
    """The exit code, and the checks, where the machines answer so."""
    monkeypatch.setattr(doctor_hosts, "probe", lambda hosts: list(answers))
    done = run("doctor", "--hosts", path, "--offline", "--json")
    content = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in content["checks"]}


def test_other_versions_are_named(tmp_path, monkeypatch):
    others = VERSIONS | {"mlx": "0.30.0", "Python": "3.11.8"}
    path = hosts_file(tmp_path / "hosts.json")
    answers = (HostReport(HERE, VERSIONS, ("ring",)), HostReport(THERE, others, ("ring",)))
    code, found = checks_of(path, monkeypatch, *answers)
    assert code == 1 and found["mlx"]["status"] == "fail" and found["Python"]["status"] == "warn"
    assert found["mlx"]["detail"] == "0.32.4 on 127.0.0.1; 0.30.0 on mac2"
    assert "mlx-lm" not in found and found["link"]["detail"] == "not measured"


def test_a_package_that_is_not_there(tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json")
    without = HostReport(THERE, VERSIONS | {"mlx": None}, ())
    code, found = checks_of(path, monkeypatch, HostReport(HERE, VERSIONS, ("ring",)), without)
    assert code == 1 and found["rank 1, mac2"]["detail"] == "mlx not installed"


def test_a_backend_that_a_machine_does_not_have(tmp_path, monkeypatch):
    path = hosts_file(tmp_path / "hosts.json", "jaccl")
    here = HostReport(HERE, VERSIONS, ("ring", "jaccl"))
    answers = (here, HostReport(THERE, VERSIONS, ("ring",)))
    code, found = checks_of(path, monkeypatch, *answers)
    assert code == 1 and found["jaccl"]["detail"] == "not available on mac2"
    assert "rdma_ctl" in found["jaccl"]["advice"] and found["link"]["detail"] == "not measured"


def test_a_model_without_a_width_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    path = hosts_file(tmp_path / "hosts.json")
    done = run("doctor", "--hosts", path, "--model", tmp_path, "--offline")
    assert done.returncode == 1 and not done.stdout
    assert "config.json: hidden_size must be 1 or more, not None." in done.stderr


class ScriptedRanks:
    """Ranks of which one sends messages, or has ended."""

    def __init__(self, words=(), code=None):
        self.words, self.ended = list(words), False
        self.all = [self]
        self.name, self.process = "rank 1 (mac2)", self
        self.poll = lambda: code

    def __call__(self, hosts, arguments):
        return self

    def receive(self, seconds):
        return [(self, *self.words.pop(0))] if self.words else []

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (ScriptedRanks([("lost", "the link is down.")]), "the link is down"),
        (ScriptedRanks(code=1), "rank 1 (mac2) ended (1)"),
        (ScriptedRanks(), "did not meet"),
    ],
)
def test_ranks_that_measure_nothing(ranks, problem, monkeypatch):
    monkeypatch.setattr(doctor_hosts, "ClusterProcesses", ranks)
    monkeypatch.setattr(doctor_hosts, "MEASURE_SECONDS", 0.01)
    found, said = doctor_hosts._run_ranks(Hosts("ring", {}, (HERE, THERE)), "tiny")
    assert found is None and problem in said and ranks.ended


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
