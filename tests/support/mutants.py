"""Small mistakes, each put into a copy of the sources, and what has to notice it.

    python tests/support/mutants.py            # on the CPU
    python tests/support/mutants.py --gpu BUILD_FOLDER # of the kernels, on a GPU

A mutant is one line of the sources with another text. On the CPU each has its own copy,
for C++ compiled anew, and a named part of the suite runs on it. Of a kernel the object
files that matter are compiled anew, as cmake compiled them in BUILD_FOLDER, and linked
with the others of that build; then a part of attention_sweep.py runs on the library.
Prints a table, and fails where nothing notices a mutant. `make mutants` runs it, and on
a GPU `make gpu-mutants`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mutant_list
from cache_mutants import CACHE
from emulated_cast_mutants import CAST_EMULATED
from emulated_forward_mutants import FORWARD_EMULATED
from emulated_mutants import EMULATED
from emulated_select_mutants import SELECT_EMULATED
from emulated_sm90_mutants import SM90_EMULATED
from example_mutants import EXAMPLES
from gpu_mutants import GPU
from mutant_list import ROOT, Mutant
from parallel_mutants import PARALLEL

CPU = (
    *mutant_list.CPU,
    *CACHE,
    *PARALLEL,
    *EMULATED,
    *FORWARD_EMULATED,
    *SM90_EMULATED,
    *CAST_EMULATED,
    *SELECT_EMULATED,
    *EXAMPLES,
)

EMULATOR_DIED = 70  # the exit status; emulator/fibers.h

COPIED = (
    "jax_kvblock", "cpp", "tests", "examples", "pyproject.toml", "CMakeLists.txt",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    killed: bool
    by: str  # what noticed it, or what went wrong


def run(
    command: list[str], cwd: Path, timeout: float, **environment: str
) -> tuple[int, str]:
    """Exit status and what was said; 124 for a command that did not come to an end."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | environment,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return 124, "it did not come to an end"
    return done.returncode, done.stdout


def copy_sources(to: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "lib")
            shutil.copytree(source, to / name, ignore=ignored)
        else:
            shutil.copy(source, to / name)
    return to


def installed() -> Path:
    """The folder of the package, which has the built libraries."""
    spec = importlib.util.find_spec("jax_kvblock")
    assert spec is not None and spec.origin is not None, "install jax_kvblock first"
    return Path(spec.origin).parent


class Cpu:
    """Runs parts of the suite on copies of the sources."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.package = scratch, installed()
        self._module = threading.Lock()

    def tree(self, name: str) -> Path:
        root = copy_sources(self.scratch / name)
        for built in self.package.glob("_native*"):
            shutil.copy(built, root / "jax_kvblock")
        shutil.copytree(self.package / "lib", root / "jax_kvblock" / "lib")
        return root

    def compiled(self, root: Path, mutant: Mutant) -> str:
        """Puts what is compiled of a mutant into a copy; what went wrong, if so."""
        if not mutant.of_module:
            wrong = self.build(root, "kvblock")
            if not wrong:
                shutil.copy(root / "build" / "libkvblock.so", root / "jax_kvblock/lib")
            return wrong
        # The module has many files, so all mutants have one build of it.
        with self._module:
            shared = self.scratch / "module"
            if not shared.exists():
                copy_sources(shared)
            source = shared / mutant.file
            unchanged = source.read_text()
            mutant.apply(shared)
            wrong = self.build(shared, "_native")
            source.write_text(unchanged)
            for built in (shared / "build").glob("_native*.so") if not wrong else ():
                shutil.copy(built, root / "jax_kvblock")
            return wrong

    def build(self, root: Path, target: str) -> str:
        build = root / "build"
        definitions = [f"-DPython_EXECUTABLE={sys.executable}", "-DKVBLOCK_CUDA=OFF"]
        bin_folder = Path(sys.executable).parent
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        for command in (
            ["cmake", "-S", ".", "-B", str(build), "-G", "Ninja", *definitions],
            ["cmake", "--build", str(build), "--target", target],
        ):
            status, said = run(command, root, 300, PATH=path)
            if status:
                return said[-2000:]
        return ""

    def tests(self, root: Path, killer: tuple[str, ...]) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "--tb=line"]
        command += ["-p", "no:cacheprovider", killer[0], "-k", killer[1]]
        return run(command, root, 300, PYTHONPATH=str(root))

    def __call__(self, mutant: Mutant) -> Outcome:
        root = self.tree(str(CPU.index(mutant)))
        mutant.apply(root)
        if mutant.builds and (wrong := self.compiled(root, mutant)):
            return Outcome(mutant, False, f"it does not compile: {wrong}")
        status, said = self.tests(root, mutant.killer)
        shutil.rmtree(root)
        failed = [line for line in said.splitlines() if line.startswith("FAILED ")]
        if status == 1 and failed:
            return Outcome(mutant, True, failed[0].split(" - ")[0].split("/")[-1])
        if status == EMULATOR_DIED:
            return Outcome(mutant, True, "the emulator stops")
        if status < 0:
            name = mutant.killer[0].split("/")[-1]
            return Outcome(mutant, True, f"{name} dies of signal {-status}")
        return Outcome(mutant, False, f"exit status {status}: {said[-600:]}")

    def unchanged(self, mutants: list[Mutant]) -> Iterator[Callable[[], str]]:
        """What fails without a mutant, or nothing: then a failure is a mutant's."""
        by_file: dict[str, set[str]] = {}
        for mutant in mutants:
            by_file.setdefault(mutant.killer[0], set()).add(mutant.killer[1])

        def passes(file: str, names: set[str]) -> str:
            root = self.tree(f"unchanged-{Path(file).stem}")
            either = " or ".join(f"({name})" for name in sorted(names))
            status, said = self.tests(root, (file, either))
            return f"{file} -k '{either}': {said[-2000:]}" if status else ""

        for file, names in by_file.items():
            yield functools.partial(passes, file, names)


class Gpu:
    """Compiles objects of a build anew, and sweeps what comes out."""

    def __init__(self, scratch: Path, build: Path) -> None:
        self.scratch, self.build = scratch, build.resolve()
        commands = json.loads((build / "compile_commands.json").read_text())
        self.commands = {c["file"]: c for c in commands}
        self.objects = sorted((self.build / "CMakeFiles").glob("kvblock*.dir/**/*.o"))
        assert self.objects, f"{build} has no objects of libkvblock.so"

    def library(self, mutant: Mutant) -> Path:
        """The library with a mutant. Raises with what the compiler said."""
        root = copy_sources(self.scratch / str(GPU.index(mutant)))
        mutant.apply(root)
        objects = list(self.objects)
        instances = [
            entry
            for name in mutant.objects
            for file, entry in self.commands.items()
            if f"/attention/{name}" in file
        ]
        assert instances, f"{mutant.name}: nothing is compiled from {mutant.objects}"
        for entry in instances:
            folder = entry["directory"]
            words = shlex.split(entry["command"])
            made = Path(folder, words[words.index("-o") + 1])
            new = root / f"{made.stem}.o"
            words = [word.replace(f"{ROOT}/cpp", f"{root}/cpp") for word in words]
            words[words.index("-o") + 1] = str(new)
            status, said = run(words, Path(folder), 500)
            assert status == 0, said[-2000:]
            objects[objects.index(made)] = new
        library = root / "libkvblock.so"
        link = ["nvcc", "-shared", "-cudart", "static", "-o", str(library)]
        link += ["-Xlinker", "--exclude-libs,ALL", *map(str, objects)]
        status, said = run(link, root, 100)
        assert status == 0, said[-2000:]
        return library

    def sweep(self, library: Path, killer: tuple[str, ...]) -> tuple[int, str]:
        script = str(ROOT / "tests" / "support" / "attention_sweep.py")
        command = [sys.executable, script, str(library), *killer]
        return run(command, self.scratch, 120)

    def __call__(self, mutant: Mutant) -> Outcome:
        try:
            library = self.library(mutant)
        except AssertionError as e:
            return Outcome(mutant, False, f"it does not compile: {e}")
        status, said = self.sweep(library, mutant.killer)
        failed = [line for line in said.splitlines() if line.startswith("FAILED ")]
        if status == 1 and failed:
            return Outcome(mutant, True, failed[0].removeprefix("FAILED ")[:150])
        if status == 124:
            return Outcome(mutant, True, said)
        return Outcome(mutant, False, f"exit status {status}: {said[-600:]}")

    def unchanged(self, mutants: list[Mutant]) -> Iterator[Callable[[], str]]:
        """What a sweep finds without a mutant, or nothing."""
        library = self.scratch / "libkvblock.so"
        link = ["nvcc", "-shared", "-cudart", "static", "-o", str(library)]
        status, said = run([*link, *map(str, self.objects)], self.scratch, 100)
        assert status == 0, said

        def passes(killer: tuple[str, ...]) -> str:
            status, said = self.sweep(library, killer)
            return f"{' '.join(killer)}: {said[-2000:]}" if status else ""

        for killer in sorted({mutant.killer for mutant in mutants}):
            yield functools.partial(passes, killer)


def report(outcomes: list[Outcome]) -> int:
    wide = max(len(o.mutant.name) for o in outcomes)
    where = max(len(o.mutant.file) for o in outcomes)
    for o in outcomes:
        by = o.by if o.killed else "SURVIVES"
        print(f"{o.mutant.name:{wide}}  {o.mutant.file:{where}}  {by}")
    survivors = [o for o in outcomes if not o.killed]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants were noticed")
    for o in survivors:
        print(f"\nSURVIVES {o.mutant.name} ({o.mutant.file})\n{o.by}")
    return bool(survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", type=Path, metavar="BUILD_FOLDER")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    chosen = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Path(folder)
        runs: Cpu | Gpu = Gpu(scratch, chosen.gpu) if chosen.gpu else Cpu(scratch)
        mutants = [m for m in (GPU if chosen.gpu else CPU) if chosen.only in m.name]
        with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
            before = [pool.submit(check) for check in runs.unchanged(mutants)]
            outcomes = list(pool.map(runs, mutants))
            wrong = [said for check in before if (said := check.result())]
    failed = report(outcomes) or bool(wrong)
    for said in wrong:
        print(f"\nThis fails without any mutant: {said}")
    print(f"{time.perf_counter() - start:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
