"""A Slurm cluster of two nodes on one machine, for as long as a test needs it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = (
    "munged",
    "sbatch",
    "scancel",
    "scontrol",
    "sinfo",
    "slurmctld",
    "slurmd",
    "squeue",
    "srun",
)
NODES = ("n1", "n2")
# What slurm/cpu.sbatch sets too: UCX addresses do not always fit into pmi2's messages.
SRUN_ENVIRONMENT = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
CPUS_PER_NODE = 2

SLURM_CONF = """
ClusterName=onehost
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmi2
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def find(program: str) -> str | None:
    """Return the path of `program`; Debian keeps daemons outside a user's PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def what_is_missing() -> str | None:
    """Say why no cluster can be started here; None where one can."""
    absent = [program for program in PROGRAMS if find(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "slurmd starts jobs only as root"
    return None


def wait_until(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Poll `done` until it is true; TimeoutError naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Return `count` TCP ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class Cluster:
    """munged, slurmctld and two slurmd with a configuration of their own.

    Everything lives in one temporary folder and runs as children of this process,
    apart from any Slurm or munge that the machine may have.
    """

    def __init__(self) -> None:
        # Not pytest's folder: a socket's path has 107 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        # munged insists that others may reach its socket and that none reads its key.
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=socket.gethostname().split(".")[0],
                folder=self.folder,
                ports=free_ports(3),
                cpus=CPUS_PER_NODE,
            )
        )
        munge = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munged.pid",
            "seed-file": self.folder / "munged.seed",
            "log-file": self.folder / "munged.log",
        }
        self._launch(
            "munged", "-F", "--force", *(f"--{k}={v}" for k, v in munge.items())
        )
        wait_until("munged", munge["socket"].exists, 20)
        self._launch("slurmctld", "-D", "-i")
        for node in NODES:
            self._launch("slurmd", "-D", "-N", node)
        wait_until("two idle nodes", self._all_idle, 40)

    def stop(self) -> None:
        """End what `start` started and every job, and remove the folder."""
        # Jobs' processes are no children of slurmd and would outlive it.
        if self._run(("scancel", "--state=RUNNING", "--user=root")).returncode == 0:
            wait_until("no job left", lambda: not self._jobs(), 60)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(
        self,
        *words: str | os.PathLike[str],
        folder: Path | None = None,
        path: str | None = None,
    ) -> str:
        """Run one of Slurm's commands and return what it prints.

        Parameters
        ----------
        folder
            Where to run it.
        path
            A folder of programs that come before all others for what it starts.
        """
        result = self._run(words, folder, path)
        if result.returncode:
            raise RuntimeError(f"{words}: exit {result.returncode}: {result.stderr}")
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` knows about one job."""
        words = self.command("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for a failure's report."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            parts.append("\n".join([f"== {path.name}", *lines]))
        return "\n".join(parts)

    def _jobs(self) -> str:
        return self._run(("squeue", "-h", "--states=RUNNING,COMPLETING")).stdout

    def _all_idle(self) -> bool:
        for daemon in self._daemons:
            if daemon.poll() is not None:
                raise RuntimeError(f"{daemon.args} ended early\n{self.logs()}")
        # It fails while slurmctld does not listen yet.
        listing = self._run(("sinfo", "-h", "-N", "-o", "%N %t")).stdout
        return listing.split() == ["n1", "idle", "n2", "idle"]

    def _run(
        self,
        words: tuple[str | os.PathLike[str], ...],
        folder: Path | None = None,
        path: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environment = dict(self.environment)
        if path:
            environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
        return subprocess.run(
            words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def _launch(self, program: str, *arguments: str) -> None:
        path = find(program)
        assert path is not None
        name = "-".join([program, *(a for a in arguments if a in NODES)])
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    (path, *arguments),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
