"""What the documents show is true: code runs, programs compile, commands exist.

The Python blocks of a document run in their order and share their names, as a reader
would type them. HTML comments before a block, which nobody sees, say more about it:

    <!-- needs: torch -->        left out where torch is not here; or flax, or a gpu, or
                                 a hopper gpu, or where jax runs on the cpu; "every
                                 block needs" for all
    <!-- given: x = 1 -->        what the text takes for granted; may have many lines
    <!-- prints: 42 -->          what a program of C or Rust prints
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from conftest import has_gpu

import jax_kvblock
from jax_kvblock.attention.cuda import unserved_by_gpu

ROOT = Path(__file__).parents[2]
PACKAGE = Path(jax_kvblock.__file__).parent
DOCUMENTS = [
    *("README.md", "CHANGELOG.md", "benchmarks/README.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
pytestmark = pytest.mark.early

COMMENT = re.compile(r"<!-- (needs|given|prints): *(.*?) *-->", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, where its code begins, and what was said of it."""

    document: str
    language: str
    line: int
    code: str
    needs: tuple[str, ...] = ()
    given: str = ""
    prints: str = ""

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def missing(self) -> list[str]:
        """What this block needs and this machine lacks."""
        return [need for need in self.needs if not is_here(need)]


def is_here(need: str) -> bool:
    if need == "hopper":
        return has_gpu() and not unserved_by_gpu("cuda_sm90", backward=False)
    if need in ("gpu", "cpu"):
        return has_gpu() == (need == "gpu")
    try:  # a package may be there, and what it needs may not
        importlib.import_module(need)
    except ImportError:
        return False
    return True


def blocks(document: str, *languages: str) -> Iterator[Block]:
    lines = (ROOT / document).read_text().splitlines()
    for_all = re.findall(r"<!-- every block needs: (.*?) -->", "\n".join(lines))
    said, start, language = "", None, ""
    for i, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start, language = i + 1, line[3:].strip()
        elif start is not None and line.startswith("```"):
            comments: dict[str, list[str]] = {"needs": [], "given": [], "prints": []}
            for kind, text in COMMENT.findall(said):
                comments[kind].append(text)
            if language in languages:
                yield Block(
                    document,
                    language,
                    start + 1,
                    "\n".join(lines[start:i]) + "\n",
                    tuple(" ".join(for_all + comments["needs"]).split()),
                    "\n".join(comments["given"]),
                    "\n".join(comments["prints"]),
                )
            start, said = None, ""
        elif start is None:
            said += line + "\n"


def every(*languages: str) -> list[Block]:
    return [block for name in DOCUMENTS for block in blocks(name, *languages)]


def test_every_block_has_a_language_that_is_checked() -> None:
    known = {"python", "sh", "c", "rust", "text"}
    for document in DOCUMENTS:
        fences = re.findall(r"^```(.*)$", (ROOT / document).read_text(), re.MULTILINE)
        assert set(fences[::2]) <= known, document
        assert set(fences[1::2]) <= {""}, document


# ---- Python --------------------------------------------------------------------------


def run_python(document: str) -> list[str]:
    """Runs a document's blocks in their order; says which were left out, and why."""
    names: dict[str, object] = {"__name__": "document"}
    left_out = []
    for block in blocks(document, "python"):
        if block.missing:
            left_out.append(f"{block.place} needs {', '.join(block.missing)}")
            continue
        exec(compile(block.given, f"{block.place}, given", "exec"), names)
        code = "\n" * (block.line - 1) + block.code  # a traceback names the line
        exec(compile(code, str(ROOT / document), "exec"), names)
    return left_out


@pytest.mark.cases(99)
@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if any(blocks(name, "python"))]
)
def test_python_runs(
    document: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    if document == "docs/threads.md":  # which shows what a callback that fails does
        request.getfixturevalue("forgotten")
    if left_out := run_python(document):
        pytest.skip("; ".join(left_out))


def test_the_tour_runs_in_64_bit_mode() -> None:
    with jax.enable_x64(True):
        run_python("README.md")


# ---- C and Rust ----------------------------------------------------------------------


def compiler(language: str) -> list[str]:
    names = {"c": ("cc", "gcc", "clang"), "rust": ("rustc",)}[language]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no compiler for {language} here")
    lib = PACKAGE / "lib"
    if language == "rust":
        return [found, "-L", str(lib), "-C", f"link-arg=-Wl,-rpath,{lib}"]
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-I", str(PACKAGE / "include")]
    return [found, *flags, "-L", str(lib), f"-Wl,-rpath,{lib}"]


@pytest.mark.cases(99)
@pytest.mark.parametrize("block", every("c", "rust"), ids=lambda block: block.place)
def test_programs_compile_and_print_what_is_said(block: Block, tmp_path: Path) -> None:
    source = tmp_path / {"c": "program.c", "rust": "program.rs"}[block.language]
    source.write_text(block.code)
    program = tmp_path / "program"
    command = [*compiler(block.language), str(source), "-o", str(program)]
    if block.language == "c":
        command += ["-lkvblock", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.place}: {done.stderr}"
    assert block.prints, f"{block.place}: say what it prints"
    ran = subprocess.run([program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == block.prints


# ---- commands ------------------------------------------------------------------------

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Programs that are not of this project.
OTHERS = {"cc", "rustc", "apt", "docker", "./move", "./check"}


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.splitlines():
        line = re.sub(r"=\$\(.*\)", "=", line)
        for command in re.sub(r"#.*", "", line).split("&&"):
            words = command.split()
            while words and re.match(r"[A-Z_]+=", words[0]):  # for this command alone
                yield ["set", words.pop(0).partition("=")[0]]
            if words:
                yield words


def check_command(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        for word in rest:
            assert "=" in word or word in TARGETS, f"make has no target {word}"
    elif program == "set":
        known = (ROOT / "CMakeLists.txt").read_text() + " ROOT JAX_PLATFORMS"
        assert rest[0] in known, f"nothing reads {rest[0]}"
    elif program == "python" and "-m" in rest:
        module = rest[rest.index("-m") + 1]
        assert importlib.util.find_spec(module), f"no module {module}"
    elif program == "python":
        script = next(word for word in rest if not word.startswith("-"))
        text = "".join(p.read_text() for p in (ROOT / script).parent.rglob("*.py"))
        for option in rest[rest.index(script) + 1 :]:
            if option.startswith("--"):
                assert f'"{option}"' in text, f"{script} has no option {option}"
    elif program == "pip":
        assert rest[0] == "install", rest
        paths = [word for word in rest if word.startswith(".")]
        assert all((ROOT / path / "pyproject.toml").exists() for path in paths)
    else:
        known = OTHERS | set(PYPROJECT["project"]["scripts"])
        assert program in known, f"nobody checks {program}"


@pytest.mark.cases(99)
@pytest.mark.parametrize("block", every("sh"), ids=lambda block: block.place)
def test_commands_exist(block: Block) -> None:
    found = list(commands(block))
    assert found, block.place
    for words in found:
        check_command(words)


# ---- what the text names -------------------------------------------------------------


def prose(document: str) -> str:
    """A document without its blocks."""
    text = (ROOT / document).read_text()
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.cases(99)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in anchors(target), f"{document}: {link}"


@pytest.mark.cases(99)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_the_text_names_exist(document: str) -> None:
    pattern = r"`((?:cpp|tests|docs|benchmarks|examples|jax_kvblock)/[\w./-]*\w\.\w+)`"
    for path in re.findall(pattern, prose(document)):
        assert (ROOT / path).exists(), f"{document}: {path}"


HEADERS = (
    *("append", "attention", "block_copy", "cast", "copy_stream", "norm_cast"),
    *("paged_attention", "quantize"),
)


@pytest.mark.cases(99)
@pytest.mark.parametrize("header", HEADERS)
def test_native_md_names_every_function_and_field(header: str) -> None:
    text = (ROOT / f"cpp/include/kvblock/{header}.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    names = re.findall(r"\b(kvblock_\w+)\(", code)
    structs = re.findall(r"typedef struct \w+ \{(.*?)\n\}", code, re.DOTALL)
    for field in re.split(r"[;,]", ";".join(structs)):
        names += re.findall(r"(\w+)(?:\[\w+\])?\s*$", field)
    document = (ROOT / "docs/native.md").read_text()
    # In code: "base addresses" of the text are not the field `base`.
    blocks = re.compile(r"```.*?```", re.DOTALL)
    spans = re.findall(r"`[^`\n]+`", blocks.sub("", document))
    said = set(re.findall(r"\w+", " ".join([*blocks.findall(document), *spans])))
    missing = [n for n in names if n not in said]
    assert len(names) > 10 and not missing, missing


def test_the_readme_names_everything_private_of_jax() -> None:
    """What comes from jax._src, and modules that jax makes no promises about."""
    imports = re.compile(
        r"from (jax\._src\S*|jax\.(?:extend|interpreters|experimental)\S*) import "
        r"(\([^)]*\)|.*)"
    )
    used = set()
    for file in PACKAGE.rglob("*.py"):
        for module, names in imports.findall(file.read_text()):
            listed = re.findall(r"\w+", names)
            private = module.startswith("jax._src")
            used |= set(listed) if private else {module}
            if module == "jax.interpreters":
                used |= set(listed)
            if module == "jax.extend":
                used |= {f"jax.extend.{name}" for name in listed}
                used.discard("jax.extend")
    limits = prose("README.md").partition("## Status and limits")[2]
    said = set(re.findall(r"`([\w.]+)`", limits))
    assert used and used <= said, used - said
    said_of_jax = {n for n in said if n.startswith("jax.")} - {"jax._src"}
    assert said_of_jax <= used, said_of_jax - used
