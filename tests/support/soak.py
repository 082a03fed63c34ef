"""A soak in miniature: a server under clients that ask, leave, lie and are killed.

    python tests/support/soak.py --minutes 10

Afterwards nothing may be lost or leaked: every request that was taken has ended once,
every answer was right, all blocks are free or idle, connections are closed, and the
server's memory is where it was. Prints a report; the exit status says whether it held.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import httpx

SUPPORT = Path(__file__).resolve().parent
# Engines by name: the arguments of http_process.py, and what its answers are.
ENGINES = {
    "books": (["books", "0.001"], "echo"),  # without a model
    "broken": (["broken", "0.001"], "echo"),  # what has to be noticed
    "random": (["random"], "model"),  # the engine, with a tiny model
    "disk": (["disk"], "model"),  # the same over a disk that is full, slow, and fails
    "model": (["model"], "model"),  # SmolLM2
}
GROWTH = 0.05  # of the server's memory, at most
# An engine with a model touches memory for the first time for some 12 s: 275 MiB grew
# to 485, and stayed. It has settled where so many samples see less than 1 % of growth.
SETTLED, MOST_SAMPLES = 30, 600
SLACK = 8 << 20  # bytes beside it: threads' arenas, codes that are first used late


def start(script: str, *given: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(SUPPORT / script), *given]
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    env = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes, **more)


class Server:
    """The process under test.

    Args:
        given: which engine, as http_process.py takes it.
        log: where its errors go.
    """

    def __init__(self, given: Sequence[str], log: IO[str]) -> None:
        self.process = start("http_process.py", *given, stderr=log)
        self.has_disk = "disk" in given
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.about = Path(f"/proc/{self.process.pid}")

    def memory(self) -> int:
        """Bytes that are resident."""
        status = (self.about / "status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def files(self) -> int:
        """Open files and sockets."""
        return len(list((self.about / "fd").iterdir()))

    def pool(self) -> dict[str, Any]:
        return httpx.get(self.url + "/pool", timeout=60).json()

    def taken(self) -> int:
        """Requests that reached the engine, by the endpoint's own count.

        "none": whose client left before the answer. Refusals did not reach it.
        """
        text = httpx.get(self.url + "/metrics", timeout=60).text
        labels = r'\{path="/v1/[^"]*completions",status="(\w+)"\}'
        line = rf"^kvblock_http_requests_total{labels} ([\d.]+)$"
        found = re.findall(line, text, re.MULTILINE)
        return sum(int(float(n)) for status, n in found if status in ("200", "none"))

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


class Clients:
    """Processes of clients. One is killed now and then, and another one comes."""

    def __init__(self, url: str, kind: str, processes: int, threads: int) -> None:
        self._given = (url, kind, threads)
        self._seed = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.killed = 0
        self._running = [self._start() for _ in range(processes)]

    def _start(self) -> subprocess.Popen[str]:
        url, kind, threads = self._given
        self._seed += 1
        given = (url, str(self._seed), str(threads), kind)
        process = start("soak_client.py", *given)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        return process

    def kill_one(self) -> None:
        victim = self._running.pop(0)
        victim.kill()
        self._add(victim)
        self.killed += 1
        self._running.append(self._start())

    def stop(self) -> None:
        for process in self._running:
            self._add(process)

    def _add(self, process: subprocess.Popen[str]) -> None:
        """What a client said last, when it has ended, of itself or killed."""
        out, _ = process.communicate(timeout=180)  # the end of its input
        lines = out.split("\n")[:-1]  # whole ones
        told = json.loads(lines[-1]) if lines else {"counts": {}, "wrong": []}
        self.counts.update(told["counts"])
        self.wrong += told["wrong"]


@dataclasses.dataclass
class Report:
    """What a soak saw; `wrong` is empty where all held."""

    numbers: dict[str, Any]
    wrong: list[str]

    def __str__(self) -> str:
        width = max(map(len, self.numbers))
        lines = [f"{name:{width}}  {value}" for name, value in self.numbers.items()]
        lines += [f"WRONG: {text}" for text in self.wrong[:20]]
        lines.append(f"{len(self.wrong)} things are wrong" if self.wrong else "held")
        return "\n".join(lines)


def soak(
    seconds: float,
    *,
    engine: str = "books",
    processes: int = 3,
    threads: int = 4,
    kill_every: float = 5.0,
    patience: float = 30.0,
) -> Report:
    """Runs a server under load for so long, then looks at what is left.

    Args:
        seconds: how long clients come, once the server's memory has settled.
        engine: one of ENGINES.
        processes, threads: of clients; each thread is one.
        kill_every: seconds from one killed process to the next, about.
        patience: seconds for which the server may take to be quiet again.
    """
    given, kind = ENGINES[engine]
    chance = random.Random(0)
    with tempfile.TemporaryFile("w+") as log:
        server = Server(given, log)
        try:
            server.taken()  # once it has answered, it has all files that it needs
            time.sleep(0.2)
            files = server.files()
            clients = Clients(server.url, kind, processes, threads)
            if kind == "model":
                settle(server)
            memory: list[int] = []
            begin = now = time.monotonic()
            kill_at = begin + kill_every
            while now < begin + seconds:
                # What disturbs the server has its place here: clients are killed.
                # A disk that is full, slow and fails is the server's own (`bad_disk`).
                if now > kill_at:
                    clients.kill_one()
                    kill_at = now + kill_every * (0.5 + chance.random())
                memory.append(server.memory())
                time.sleep(0.1)
                now = time.monotonic()
            clients.stop()
            report = look(server, clients, memory, files, patience)
        finally:
            server.process.kill()
            server.process.communicate()
        log.seek(0)
        return with_log(report, log.read(), seconds)


def settle(server: Server) -> None:
    """Waits until memory has settled, under load; for a minute at most."""
    memory: list[int] = []
    while len(memory) < MOST_SAMPLES:
        memory.append(server.memory())
        if len(memory) > SETTLED and memory[-1] < memory[-SETTLED] * 1.01:
            return
        time.sleep(0.1)


def look(
    server: Server, clients: Clients, memory: list[int], files: int, patience: float
) -> Report:
    """What is left when all clients have gone."""
    end = time.monotonic() + patience
    quiet = False
    while not quiet and time.monotonic() < end:
        pool, taken = server.pool(), server.taken()
        time.sleep(0.2)  # these two connections are closed meanwhile
        stats, left = pool["stats"], server.files()
        busy = stats["running"] + stats["waiting"] + stats["held_blocks"]
        quiet = busy == 0 and taken == stats["finished"] and left <= files
    third = len(memory) // 3
    tenths = [memory[len(memory) * i // 10] // 2**20 for i in range(10)]
    before = statistics.median(memory[third : 2 * third])
    after = statistics.median(memory[2 * third :])
    status, out = server.stop()
    *said, last = [*out.splitlines(), ""][:-1] or [""]
    store = json.loads(said[0]) if said else {}
    actions = sum(clients.counts.values())
    checks = {
        f"{stats['running']} run, {stats['waiting']} wait, nobody asks": (
            stats["running"] == stats["waiting"] == 0
        ),
        f"{taken} requests were taken, {stats['finished']} ended": (
            taken == stats["finished"]
        ),
        f"{stats['failed']} requests failed": stats["failed"] == 0,
        f"blocks are held by nobody: {collections.Counter(pool['states'])}": (
            set(pool["states"]) <= {"0", "3"}
        ),
        f"{left} files are open, {files} were": left <= files,
        f"memory grew from {before} to {after} bytes": (
            after <= before * (1 + GROWTH) + SLACK
        ),
        f"the server ended with {status}, and said {out!r}": (
            status == 0 and last == "stopped"
        ),
        f"the disk was written, read, and failed: {store}": (
            not server.has_disk
            or actions < 1000  # too few to count on it
            or min(store[key] for key in ("blocks_in", "blocks_out", "failed")) > 0
        ),
        f"clients did {actions} things": actions > 0,
    }
    numbers = {
        "actions": actions,
        **dict(sorted(clients.counts.items())),
        "client processes killed": clients.killed,
        "requests taken": taken,
        "requests cancelled": stats["cancelled"],
        "new tokens": stats["new_tokens"],
        "prompt tokens cached": f"{stats['cached_tokens']} of {stats['prompt_tokens']}",
        "blocks free, idle": f"{stats['free_blocks']}, {stats['idle_blocks']}",
        "blocks to the store, from it, failed": ", ".join(
            str(store.get(key, 0)) for key in ("blocks_in", "blocks_out", "failed")
        ),
        "files open, before": f"{left}, {files}",
        "server's memory, MiB": f"{before / 2**20:.1f}, then {after / 2**20:.1f}",
        "after each tenth": ", ".join(map(str, tenths)),
    }
    wrong = [text for text, held in checks.items() if not held]
    return Report(numbers, [*wrong, *clients.wrong])


def with_log(report: Report, log: str, seconds: float) -> Report:
    """With what the server complained of: garbage, and nothing else."""
    lines = [line for line in log.splitlines() if "Invalid HTTP request" not in line]
    numbers = {"seconds": seconds, **report.numbers}
    return Report(numbers, report.wrong + [f"the log: {line}" for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engine", choices=ENGINES, default="books")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    report = soak(
        options.minutes * 60,
        engine=options.engine,
        processes=options.processes,
        threads=options.threads,
    )
    print(report)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
