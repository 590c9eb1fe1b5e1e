"""The machines of a cluster, in the file that `mlx.launch --hostfile` reads.

    {"backend": "ring", "envs": ["MLX_METAL_FAST_SYNCH=1"],
     "hosts": [{"ssh": "127.0.0.1", "ips": ["10.0.0.1"]},
               {"ssh": "mac2.local", "ips": ["10.0.0.2"]}]}

The list of hosts alone is valid too. `mlx.distributed_config` writes such files.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..validation import brief, check_file, parse_json

RING = "ring"
JACCL = "jaccl"
JACCL_RING = "jaccl-ring"
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=4")
SSH = ("ssh", *(word for option in _OPTIONS for word in ("-o", option)))
_HERE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        ssh: its name for ssh; "127.0.0.1" for this one.
        ips: its addresses on the links to the others.
        rdma: its device for each of the machines, for a backend over RDMA.
    """

    ssh: str
    ips: tuple[str, ...]
    rdma: tuple[Any, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        host_name = socket.gethostname()
        return self.ssh in (*_HERE, host_name, host_name.partition(".")[0], f"{host_name}.local")

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that runs a command there, in this process's folder if it exists."""
        if self.is_here:
            return list(command)
        remote_command = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(command)}"
        return [*SSH, self.ssh, remote_command]


@dataclass(frozen=True)
class Hosts:
    """All machines, rank 0 first.

    Attributes:
        backend: of MLX.
        environment: variables of every process.
    """

    backend: str
    environment: dict[str, str]
    machines: tuple[Host, ...]

    def launches(self) -> list[dict[str, Any]]:
        """Each rank's settings, with which MLX finds the others; on ports that are free now."""
        ports = _free_ports(sum(max(1, len(host.ips)) for host in self.machines))
        base: dict[str, Any] = {"environment": self.environment}
        if self.backend == RING:
            free_ports = iter(ports)
            ring = []
            for host in self.machines:
                ring.append([f"{ip}:{next(free_ports)}" for ip in host.ips])
            base["files"] = {"MLX_HOSTFILE": ring}
        else:
            coordinator = {"MLX_JACCL_COORDINATOR": f"{self.machines[0].ips[0]}:{ports[0]}"}
            extra = {"MLX_JACCL_RING": "1"} if self.backend == JACCL_RING else {}
            base["environment"] = self.environment | coordinator | extra
            base["files"] = {"MLX_IBV_DEVICES": [host.rdma for host in self.machines]}
        return [base | {"rank": rank} for rank in range(len(self.machines))]


def read_hosts(path: Path) -> Hosts:
    """The machines in a file. Raises `SettingsError`."""
    try:
        check_file(path, SettingsError)
        content = parse_json(path.read_bytes(), path, SettingsError)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}).") from error
    if not isinstance(content, dict):
        content = {"hosts": content}
    backend = content.get("backend") or RING
    hosts = content.get("hosts")
    if backend not in (RING, JACCL, JACCL_RING):
        raise SettingsError(
            f"{path}: backend {brief(backend)} is none of {RING}, {JACCL}, {JACCL_RING}; "
            "for others, start dflash-mlx with mlx.launch."
        )
    if not isinstance(hosts, list) or len(hosts) < 2:
        raise SettingsError(f"{path}: two hosts or more are expected, each with ssh and ips.")
    machines = tuple(_host(path, host) for host in hosts)
    if not machines[0].is_here:
        raise SettingsError(
            f"{path}: the first host is {machines[0].ssh}: start dflash-mlx there, or put this "
            'machine first, as {"ssh": "127.0.0.1", ...}.'
        )
    envs = content.get("envs") or []
    if not isinstance(envs, list) or not all(isinstance(env, str) and "=" in env for env in envs):
        raise SettingsError(f"{path}: envs is a list of NAME=VALUE, not {brief(envs)}.")
    return Hosts(backend, dict(env.split("=", 1) for env in envs), machines)


def _host(path: Path, host: Any) -> Host:
    try:
        ssh = host["ssh"]
        ips = host.get("ips") or []
        rdma = host.get("rdma") or []
        valid = isinstance(ips, list) and isinstance(rdma, list)
        valid = valid and all(isinstance(text, str) and text for text in (ssh, *ips))
    except (AttributeError, KeyError, TypeError):
        valid = False
    if not valid or ssh.startswith("-"):  # ssh would read it as an option
        raise SettingsError(f"{path}: a host needs ssh and ips, not {brief(host)}.")
    host = Host(ssh, tuple(ips) or ("127.0.0.1",), tuple(rdma))
    if not host.is_here and host.ips[0] in _HERE:
        raise SettingsError(f"{path}: {ssh} needs ips: its address on the link to this machine.")
    return host


def _free_ports(count: int) -> list[int]:
    """Ports that are free on this machine, and probably on the others."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in taken:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in taken]
