"""Scripts that run as several processes of one `jax.distributed` job, on a CPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@contextlib.contextmanager
def alone_on_gpus() -> Iterator[None]:
    """One such script at a time, whichever process of the suite runs it.

    Each of its processes has a GPU, and waits for the others', which have to get theirs
    from all other tests.
    """
    path = Path(tempfile.gettempdir()) / f"kvblock-gpu-processes-{os.getuid()}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_processes(
    script: Path, count: int, *more: str, seconds: float = 120
) -> list[tuple[int, str]]:
    """Of each process how it ended, and what it said.

    The script is called with RANK COUNT PORT and more. Where together they take longer,
    all are killed, and the error has what each of them said, and where it was.
    """
    command = [sys.executable, "-X", "faulthandler", str(script)]
    wait = alone_on_gpus() if "gpu" in more else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, wait:
        port = free_port()
        # Files: a process that says more than a pipe holds would wait for its reader,
        # and all others for it.
        files = [Path(folder) / str(rank) for rank in range(count)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, file in enumerate(files):
                with file.open("w") as out:
                    given = [*command, str(rank), str(count), port, *more]
                    processes.append(
                        subprocess.Popen(given, stdout=out, stderr=subprocess.STDOUT)
                    )
            _await(processes, time.monotonic() + seconds)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGABRT)  # says where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                _await(processes, time.monotonic() + 20)
            said = [file.read_text(errors="replace") for file in files]
            raise AssertionError("\n\n".join([f"after {seconds} s", *said])) from None
        finally:
            for process in processes:
                process.kill()
        said = [file.read_text(errors="replace") for file in files]
    return [(p.returncode, text) for p, text in zip(processes, said, strict=True)]


def _await(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    for process in processes:
        process.wait(max(0, until - time.monotonic()))


def hold_processes(
    script: Path, count: int, right: str, *more: str, seconds: float = 120
) -> None:
    """Each process ends well, and says how many are right: `right`, an expression."""
    ran = run_processes(script, count, *more, seconds=seconds)
    for rank, (code, said) in enumerate(ran):
        assert code == 0, said
        assert re.search(rf"^{rank} of {count}: {right} are right$", said, re.M), said
