"""Scripts that run as several processes of one `jax.distributed` job, on a CPU."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run_processes(
    script: Path, count: int, *more: str, seconds: float = 120
) -> list[tuple[int, str]]:
    """Of each process how it ended, and what it said.

    The script is called with RANK COUNT PORT and more. Where one takes longer, all are
    killed, and the error has what each of them said, and where it was.
    """
    port = free_port()
    command = [sys.executable, "-X", "faulthandler", str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), port, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # says where each thread is
        said = [process.communicate(timeout=seconds)[0] for process in processes]
        raise AssertionError("\n\n".join([f"after {seconds} seconds", *said])) from None
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, said, strict=True)]


def hold_processes(
    script: Path, count: int, right: str, *more: str, seconds: float = 120
) -> None:
    """Each process ends well, and says how many are right: `right`, an expression."""
    ran = run_processes(script, count, *more, seconds=seconds)
    for rank, (code, said) in enumerate(ran):
        assert code == 0, said
        assert re.search(rf"^{rank} of {count}: {right} are right$", said, re.M), said
