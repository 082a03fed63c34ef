"""A soak in miniature: a server under clients that ask, leave, lie and are killed.

    python tests/support/soak.py --minutes 10 --engine random disk --out DIR

Afterwards nothing may be lost or leaked: every request that was taken has ended once,
every answer was right, all blocks are free or idle, connections are closed, and the
server's memory is where it was. Prints a report; the exit status says whether it held.
With --out it is kept as a benchmark's results are, in DIR/<device>/soak-<date>.json.
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
from typing import IO, Any, NamedTuple

import httpx

SUPPORT = Path(__file__).resolve().parent


class Kind(NamedTuple):
    """An engine of a soak.

    Attributes:
        given: the arguments of http_process.py.
        answers: what can be known of them, as soak_client.py takes it.
        has_disk: a disk has to be written, to be read, and to fail meanwhile.
        crowded: requests have to make way for others.
    """

    given: list[str]
    answers: str = "model"
    has_disk: bool = False
    crowded: bool = False


ENGINES = {
    "books": Kind(["books", "0.001"], "echo"),  # without a model
    # What has to be noticed. No block of it comes to a disk.
    "broken": Kind(["broken", "0.001"], "echo", has_disk=True),
    "random": Kind(["random"], crowded=True),  # the engine, with a tiny model
    # The same over one that is full, slow, and fails.
    "disk": Kind(["disk"], has_disk=True, crowded=True),
    "model": Kind(["model"], crowded=True),  # SmolLM2
}
# Of a store: what /metrics has of it, and what `TieredCache.stats` counts.
STORE = {
    "written_bytes": "blocks_in",
    "read_bytes": "blocks_out",
    "failed_blocks": "failed",
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
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.about = Path(f"/proc/{self.process.pid}")

    def wait_until_ready(self) -> None:
        """Until its programs are compiled."""
        end = time.monotonic() + 300
        while httpx.get(self.url + "/health", timeout=60).status_code != 200:
            assert time.monotonic() < end, "the server does not become ready"
            time.sleep(0.1)

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
        labels = r'\{path="/v1/[^"]*completions",status="(\w+)"\}'
        line = rf"^kvblock_http_requests_total{labels} ([\d.]+)$"
        found = re.findall(line, self.metrics(), re.MULTILINE)
        return sum(int(float(n)) for status, n in found if status in ("200", "none"))

    def happened(self, kind: Kind) -> bool:
        """Whether all has happened that has to."""
        wanted = {"serve_preemptions_total"} if kind.crowded else set[str]()
        if kind.has_disk:
            wanted |= {f'tier_{name}_total{{tier="store"}}' for name in STORE}
        found = re.findall(r"^kvblock_(\S+) (\S+)$", self.metrics(), re.MULTILINE)
        return wanted <= {name for name, number in found if float(number) > 0}

    def metrics(self) -> str:
        return httpx.get(self.url + "/metrics", timeout=60).text

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

    numbers: dict[str, float]  # behind a comma in a name stands its unit
    wrong: list[str]

    def __str__(self) -> str:
        width = max(map(len, self.numbers))
        lines = [f"{name:{width}}  {n:.10g}" for name, n in self.numbers.items()]
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
    patience: float = 60.0,
) -> Report:
    """Runs a server under load for so long, then looks at what is left.

    Args:
        seconds: how long clients come, once the server's memory has settled.
        engine: one of ENGINES.
        processes, threads: of clients; each thread is one.
        kill_every: seconds from one killed process to the next, about.
        patience: seconds for which the server may take to be quiet again; and for
            which clients go on where not all has happened that has to.
    """
    kind = ENGINES[engine]
    chance = random.Random(0)
    with tempfile.TemporaryFile("w+") as log:
        server = Server(kind.given, log)
        try:
            server.wait_until_ready()
            server.taken()  # once it has answered, it has all files that it needs
            time.sleep(0.2)
            files = server.files()
            clients = Clients(server.url, kind.answers, processes, threads)
            if kind.answers == "model":
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
            while now < begin + seconds + patience and not server.happened(kind):
                time.sleep(0.1)
                now = time.monotonic()
            clients.stop()
            report = look(server, clients, memory, files, patience, kind)
        finally:
            server.process.kill()
            server.process.communicate()
        log.seek(0)
        return with_log(report, log.read(), now - begin)


def settle(server: Server) -> None:
    """Waits until memory has settled, under load; for a minute at most."""
    memory: list[int] = []
    while len(memory) < MOST_SAMPLES:
        memory.append(server.memory())
        if len(memory) > SETTLED and memory[-1] < memory[-SETTLED] * 1.01:
            return
        time.sleep(0.1)


def look(
    server: Server,
    clients: Clients,
    memory: list[int],
    files: int,
    patience: float,
    kind: Kind,
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
    tenths = [memory[len(memory) * i // 10] / 2**20 for i in range(10)]
    before = statistics.median(memory[third : 2 * third])
    after = statistics.median(memory[2 * third :])
    status, out = server.stop()
    *said, last = [*out.splitlines(), ""][:-1] or [""]
    told = json.loads(said[0]) if said else {}
    store = {name: told.get(name, 0) for name in STORE.values()}
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
        f"blocks that the disk took, gave, and failed with: {store}": (
            not kind.has_disk or min(store.values()) > 0
        ),
        f"{stats['preemptions']} requests made way": (
            not kind.crowded or stats["preemptions"] > 0
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
        "prompt tokens": stats["prompt_tokens"],
        "prompt tokens cached": stats["cached_tokens"],
        "requests that made way": stats["preemptions"],
        "requests that came back from below": stats["offloaded_preemptions"],
        "blocks free at the end": stats["free_blocks"],
        "blocks idle at the end": stats["idle_blocks"],
        "blocks to the store": store["blocks_in"],
        "blocks from the store": store["blocks_out"],
        "blocks that the store failed with": store["failed"],
        "files open before": files,
        "files open at the end": left,
        "memory in the second third, MiB": before / 2**20,
        "memory in the last third, MiB": after / 2**20,
        **{f"memory after {i} tenths, MiB": size for i, size in enumerate(tenths)},
    }
    wrong = [text for text, held in checks.items() if not held]
    return Report(numbers, [*wrong, *clients.wrong])


def with_log(report: Report, log: str, seconds: float) -> Report:
    """With what the server complained of: garbage, and nothing else."""
    lines = [line for line in log.splitlines() if "Invalid HTTP request" not in line]
    numbers = {"time, s": seconds, **report.numbers}
    return Report(numbers, report.wrong + [f"the log: {line}" for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=["books"])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep what it found")
    parser.add_argument("--commit", help="the commit, where git is not at hand")
    options = parser.parse_args()
    if options.out is not None:  # what is missing is told before, not after
        sys.path.insert(0, str(SUPPORT.parents[1] / "benchmarks"))
        from support import common  # noqa: F401
    reports: dict[str, Report] = {}
    for engine in options.engine:
        reports[engine] = report = soak(
            options.minutes * 60,
            engine=engine,
            processes=options.processes,
            threads=options.threads,
        )
        print(f"{engine}\n{report}", flush=True)
        if options.out is not None:  # after each: one that is cut off keeps the others
            print(f"wrote {keep(reports, options)}", flush=True)
    sys.exit(any(report.wrong for report in reports.values()))


def keep(reports: dict[str, Report], options: argparse.Namespace) -> Path:
    """Writes what soaks have seen as a results file; returns its path."""
    from support import common

    results = common.Results()
    case = f"{options.minutes:g} minutes / soak, {{}}".format
    for engine, report in reports.items():
        wrong = {"things that are wrong": len(report.wrong)}
        for name, value in {**report.numbers, **wrong}.items():
            metric, _, unit = name.partition(", ")
            row = (case(engine), common.OURS, metric, value, unit or "count")
            results.add(*row, show=False)
    return common.write(results.document(options), "soak", options.out)


if __name__ == "__main__":
    main()
