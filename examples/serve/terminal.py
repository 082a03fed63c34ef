"""A server's loop in a terminal: prompts stream at once, and the pool is shown live.

python examples/serve                            # eight questions to SmolLM2
python examples/serve --prompt "Why?" --prompt "How?"
python examples/serve --chat                     # a conversation
python examples/serve --http 8000                # OpenAI's API, and a page
python examples/serve --random                   # a tiny model, no download
python examples/serve --model TinyLlama.gguf     # or a folder with safetensors
"""

import argparse
import gc
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from smollm2.cache import cache_dir

from serve import dense
from serve.engine import Engine
from serve.interface import Message, QueueFullError, Request
from serve.models import DTYPES, LoadedModel, load_model, random_model
from serve.view import Screen, Shown, frame, printable, summary

INTERVAL = 0.1  # seconds between frames


def say(message: str) -> None:
    """A line about what goes on, beside the answers."""
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run; the exit code is 1 if something is wrong, which is said in one line.

    It is 130 after Ctrl-C, but where that ends answers, a conversation, or a server.
    """
    options = parse(arguments)
    try:
        obey(options)
    except KeyboardInterrupt:
        say("serve: interrupted")
        raise SystemExit(130) from None


def obey(options: argparse.Namespace) -> None:
    """Do what the options ask for."""
    prepare(options)
    try:
        model = (
            random_model()
            if options.random
            else load_model(options.model, options.dtype)
        )
        engine = make_engine(model, options)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise SystemExit(f"serve: {error}") from None
    device = jax.devices()[0].device_kind
    say(
        f"{model.name} on {device}, jax {jax.__version__}: {engine.max_tokens} tokens "
        "a text at most"
    )
    if options.http is not None:
        serve_http(engine, options)
        return
    try:
        began = time.perf_counter()
        engine.compile()
        say(
            f"{engine.stats()['programs']} programs compiled in "
            f"{time.perf_counter() - began:.1f} s"
        )
        engine.start()
        if options.chat:
            chat(engine, options)
        else:
            answer(engine, options)
    except (ValueError, QueueFullError) as error:
        raise SystemExit(f"serve: {error}") from None
    finally:
        engine.stop()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="a GGUF file, or a folder with safetensors")
    add("--random", action="store_true", help="a tiny model with random weights")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    add("--prompt", action="append", help="a message; may be given several times")
    add("--chat", action="store_true", help="talk to the model")
    add("--http", type=int, metavar="PORT", nargs="?", const=8000, help="serve HTTP")
    add("--host", default="127.0.0.1", help="where HTTP listens: this machine alone")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which HTTP may be asked, beside this machine's; several times",
    )
    add("--body-mib", type=int, default=4, help="of a request by HTTP, at most")
    add("--check", action="store_true", help="hold tokens to the dense model")
    add("--plain", action="store_true", help="no live view")
    of_text = parser.add_argument_group("texts")
    add = of_text.add_argument
    add("--max-new-tokens", type=int, default=48)
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    of_engine = parser.add_argument_group("engine")
    add = of_engine.add_argument
    add("--blocks", type=int, default=256, help="of the pool")
    add("--block-size", type=int, default=16)
    add("--batch", type=int, default=8, help="sequences that run at the same time")
    add("--max-waiting", type=int, default=64, help="requests that may wait for that")
    add("--rows", type=int, default=128, help="tokens of a step, at most")
    add("--drafts", type=int, default=0, help="guesses behind a newest token")
    add("--decode-steps", type=int, help="of one program, where all decode")
    add(
        "--fuse-layers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one kernel between attentions, where it serves",
    )
    add("--host-mib", type=int, default=0, help="memory of a tier below the device")
    add("--disk", type=Path, metavar="FOLDER", help="a tier below that, kept for later")
    add("--disk-mib", type=int, default=1024, help="how much of its disk it may take")
    return parser.parse_args(arguments)


def make_engine(model: LoadedModel, options: argparse.Namespace) -> Engine:
    """The engine that the options ask for."""
    return Engine(
        model,
        num_blocks=options.blocks,
        block_size=options.block_size,
        max_batch=options.batch,
        max_waiting=options.max_waiting,
        max_tokens_per_step=options.rows,
        draft_tokens=options.drafts,
        decode_steps=options.decode_steps,
        fuse_layers=options.fuse_layers,
        host_bytes=options.host_mib << 20,
        disk=options.disk,
        disk_bytes=options.disk_mib << 20,
    )


def serve_http(engine: Engine, options: argparse.Namespace) -> None:
    """Serve HTTP until a signal comes."""
    try:
        from serve.http_answers import Limits
        from serve.http_hosts import host_name
        from serve.http_server import run

        limits = Limits(body_bytes=options.body_mib << 20)
        hosts = [*map(host_name, options.allow_host)]
    except (ImportError, ValueError) as error:
        raise SystemExit(f"serve: {error}") from None
    threading.Thread(target=settle, args=(engine,), daemon=True).start()
    try:
        at = {"host": options.host, "port": options.http, "hosts": hosts}
        run(engine, limits=limits, **at)
    except OSError as error:  # the port is taken, for example
        raise SystemExit(f"serve: {error.strerror or error}") from None


def settle(engine: Engine) -> None:
    """Once an engine has its programs, Python's collector leaves alone what is there.

    JAX and its programs are hundreds of thousands of objects, which stay. To look
    through them takes a tenth of a second and more, in which no stream gets a token.
    """
    while not engine.ready:
        if engine.stopped:
            return
        time.sleep(0.1)
    gc.collect()
    gc.freeze()


def prepare(options: argparse.Namespace) -> None:
    """Set up JAX for this process."""
    # A GPU would round to TF32, coarse enough for two programs' ties to break apart.
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "float32")
    # Programs stay on disk, beside the model: the next start is quick.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "programs"))


# ---- several prompts at once ---------------------------------------------------------


def answer(engine: Engine, options: argparse.Namespace) -> None:
    """Stream the answers to all prompts, and say what it took."""
    texts = named_prompts(options)
    began = time.perf_counter()
    shown = [
        Shown(name, engine.submit(request(engine, [turn(text)], options)))
        for name, text in texts.items()
    ]
    follow(engine, shown, live=sys.stdout.isatty() and not options.plain)
    seconds = time.perf_counter() - began
    for each in shown:
        print(f"{each.name}: {' '.join(printable(each.text).split())}")
    stats = engine.stats()
    say(
        f"{stats['new_tokens']} tokens in {seconds:.1f} s, "
        f"{stats['new_tokens'] / seconds:.1f} tokens/s, "
        f"{stats['mean_time_to_first_token']:.2f} s to the first; "
        f"{stats['steps']} steps, {stats['programs']} programs; {summary(stats)}"
    )
    if options.check:
        check(engine.model, shown)


def named_prompts(options: argparse.Namespace) -> dict[str, str]:
    """What is asked: the prompts that were given, or eight questions."""
    if options.prompt:
        return {f"prompt {i}": text for i, text in enumerate(options.prompt, start=1)}
    from paged_decode import QUESTIONS

    most = 200 if options.random else None  # characters: a token is a byte there
    return {name: text[:most] for name, text in QUESTIONS.items()}


def turn(text: str) -> Message:
    """A user's message."""
    return Message(role="user", content=text)


def request(
    engine: Engine, messages: Sequence[Message], options: argparse.Namespace
) -> Request:
    """A request for the next turn of a chat."""
    return Request(
        prompt=engine.model.tokenizer.encode_chat(messages),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def follow(engine: Engine, shown: Sequence[Shown], live: bool) -> None:
    """Read the streams to their ends; Ctrl-C cancels them."""
    screen = Screen()
    try:
        while any(each.stream.finish_reason is None for each in shown):
            time.sleep(INTERVAL)
            _draw(engine, shown, screen, live)
    except KeyboardInterrupt:
        for each in shown:
            each.stream.cancel()
        while any(each.stream.finish_reason is None for each in shown):
            time.sleep(INTERVAL)
    _draw(engine, shown, screen, live)


def _draw(engine: Engine, shown: Sequence[Shown], screen: Screen, live: bool) -> None:
    for each in shown:
        each.read()
    if live:
        width = shutil.get_terminal_size().columns
        screen.draw(frame(shown, engine.pool_map(), engine.stats(), width))


def check(model: LoadedModel, shown: Sequence[Shown]) -> None:
    """Every greedy token is the one that the dense model chooses, or exit code 1."""
    count = 0
    for each in shown:
        prompt, tokens = each.stream.request.prompt, each.tokens
        wanted = dense.choices(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        if wanted.tolist() != tokens:
            raise SystemExit(
                f"serve: {each.name}: the dense model chooses\n{wanted.tolist()} "
                f"instead of\n{tokens}"
            )
        count += len(tokens)
    say(f"the dense model chooses the same {count} tokens")


# ---- a conversation ------------------------------------------------------------------


def chat(engine: Engine, options: argparse.Namespace) -> None:
    """Talk until the input ends. Ctrl-C ends an answer, and twice the conversation."""
    messages: list[Message] = []
    say("an empty line begins anew; Ctrl-C stops an answer; Ctrl-D ends")
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            messages.clear()
            say("a new conversation")
            continue
        messages.append(turn(text))
        try:
            stream = engine.submit(request(engine, messages, options))
        except ValueError as error:
            say(f"{error}; an empty line begins anew")
            messages.pop()
            continue
        said = ""
        try:
            for event in stream:
                said += event.text
                print(printable(event.text), end="", flush=True)
        except KeyboardInterrupt:
            stream.cancel()
            said += stream.text()
        print()
        say(
            f"({stream.num_new_tokens} tokens; {stream.num_cached_tokens} of "
            f"{stream.num_prompt_tokens} tokens of the prompt were cached)"
        )
        messages.append(Message(role="assistant", content=said))
