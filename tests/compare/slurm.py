"""A SLURM of this machine's own: munge, a controller and two nodes, as Debian's package slurm-wlm
has them."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

_CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PropagatePrioProcess=1
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000
PartitionName=main Nodes=node[1-2] Default=YES State=UP
"""


def missing():
    """What this machine lacks for it, or None."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    lacking = [
        name
        for name in programs
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if lacking:
        return f"no {', '.join(lacking)}; apt-get install slurm-wlm"
    return None if os.geteuid() == 0 else "its daemons are started as root"


@contextlib.contextmanager
def cluster(folder):
    """Starts it, and yields the environment in which its commands find it."""
    ports = [_free_port() for _ in range(3)]
    names = dict(
        zip(("port", "first", "second"), ports, strict=True),
        host=socket.gethostname(),
        folder=folder,
    )
    (folder / "slurm.conf").write_text(_CONFIG.format(**names))
    environ = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    run = lambda *command: (
        subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    )
    with contextlib.ExitStack() as stack:
        if subprocess.run(["munge", "-n"], capture_output=True).returncode:
            os.makedirs("/run/munge", exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            munged = subprocess.Popen(
                ["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground"]
            )
            stack.callback(munged.wait)
            stack.callback(munged.terminate)
            _wait(lambda: not subprocess.run(["munge", "-n"], capture_output=True).returncode)
        daemons = [
            ("slurmctld", "-D"),
            ("slurmd", "-D", "-N", "node1"),
            ("slurmd", "-D", "-N", "node2"),
        ]
        for command in daemons:
            daemon = subprocess.Popen(
                command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        _wait(lambda: run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"])
        stack.callback(lambda: run("scancel", "--user=root"))
        yield environ


def _free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def _wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except subprocess.CalledProcessError:  # not up yet
            pass
        assert time.monotonic() < end
        time.sleep(0.5)
