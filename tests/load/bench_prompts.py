"""What prompts cost: to render and encode them, and what long ones do to the streams that are running.

    python tests/load/bench_prompts.py [--model-path DIR] [--part cost streams] [--rounds N] [--seconds S]

``cost``: microseconds from a conversation to token ids in one process, for a short, a long and a huge conversation:
without caches, as the first prompt of a process ("new": the encoder itself remembers words) and as any later one
("cold"); when the same prompt comes again (L0); and when the conversation has grown by one turn (L1). The share of the
template is shown apart. The median round counts.

``streams``: time between the tokens of paced streams through a whole gateway, alone and while prompts of 200,000
characters arrive evenly over the window. The long prompts go to an engine and come from a client of their own, so that
what is seen is the gateway's doing. Each pair of runs is made with one and with two tokenizer processes.

A benchmark reports and does not judge: the exit status is 0 whatever the figures are. ``streams`` needs Linux.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench_gateway import MODEL_DIR, Tree, free_port, started, wait_served

from smg.models.prompt import RenderRequest
from smg.tokenizer_pool.model import TokenizerModel
from smg.vocab.load import load_model_dir

MODEL, LONG_MODEL = "bench", "bench-long"
HUGE = 200_000
COST_ROUNDS = 15
_SENTENCES = (
    "The harbour lay still in the early light, and the boats had not yet gone out. ",
    "A keeper walked along the quay, counted them (as he did every morning), and wrote: 17 boats, 3 gulls.\n",
    "Die Fähre kam gegen 7:45 Uhr; niemand stieg aus. ",
    "const tide = await fetch(`/api/tides?port=${port}`);  // cached for 60 s\n",
    "早上好，港口里有十七条船。 Привет, где капитан? 🚢 naïve café, Ångström",
)
_WORDS = [word for sentence in _SENTENCES for word in sentence.split(" ")]
_SYLLABLES = ("ka", "lo", "ri", "men", "tus", "sch", "ing", "pre", "42", "_x", "Qu", "or", "a", "ent", "é", "ban")

Message = dict[str, Any]


class Options(NamedTuple):
    """``smg.tokenizer_pool.model.ModelOptions`` with the gateway's default bounds."""

    tokenizer_cache_enable_l0: bool
    tokenizer_cache_enable_l1: bool
    trust_control_tokens: bool = False
    tokenizer_procs: int = 1
    tokenizer_cache_l0_max_entries: int = 10_000
    tokenizer_cache_l0_max_memory: int = 256 << 20
    tokenizer_cache_l1_max_memory: int = 50 << 20


def text(size: int, number: int) -> str:
    """``size`` characters, the same for equal arguments: known words in random order, every eighth an invented one.
    Encoders remember what they have seen, so a text that repeats itself would show a speed that no prompt gets."""
    draw = random.Random(number)
    words = [f"Letter {number}."]
    length = len(words[0])
    while length < size:
        word = draw.choice(_WORDS) if draw.random() < 0.875 else "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def conversation(messages: int, size: int, number: int) -> list[Message]:
    """A system message and turns of ``size`` characters each; the last one is the user's."""
    roles = ("assistant", "user")
    turns = [{"role": roles[turn % 2], "content": text(size, number * 100 + turn)} for turn in range(1, messages)]
    return [{"role": "system", "content": f"You are assistant {number}. Answer briefly."}, *turns]


def grown(messages: list[Message]) -> list[Message]:
    """The conversation at its next turn."""
    answer = {"role": "assistant", "content": "Seventeen boats were counted."}
    return [*messages, answer, {"role": "user", "content": "And how many gulls?"}]


# Messages and characters of each.
SHAPES = {"2 messages": (2, 120), "50 messages": (50, 400), "200,000 characters": (2, HUGE)}


def median_us(work: Callable[[RenderRequest], object], requests: list[RenderRequest]) -> float:
    """Microseconds of the median request."""
    spent = []
    for request in requests:
        begun = time.perf_counter()
        work(request)
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent) * 1e6


def costs(model_path: str) -> Iterator[tuple[str, int, list[float]]]:
    """For each shape its tokens and µs: template alone, first prompt of a process, cold, L0 hit, L1 hit."""
    files = load_model_dir(model_path)
    cold = TokenizerModel(files)
    exact = TokenizerModel(files, Options(tokenizer_cache_enable_l0=True, tokenizer_cache_enable_l1=False))
    prefix = TokenizerModel(files, Options(tokenizer_cache_enable_l0=False, tokenizer_cache_enable_l1=True))
    for name, (count, size) in SHAPES.items():
        first = [RenderRequest(MODEL, conversation(count, size, number)) for number in range(COST_ROUNDS + 1)]
        later = [RenderRequest(MODEL, grown(request.messages)) for request in first]
        for model in (cold, exact, prefix):  # the template engine is chosen, tables are built
            model.prepare(first[-1])
            model.prepare(later[-1])
        unseen = TokenizerModel(files)
        unseen.prepare(RenderRequest(MODEL, conversation(count, 1, 0)))
        figures = [median_us(cold.renderer.render, first[:-1]), median_us(unseen.prepare, [first.pop()])]
        figures.append(median_us(cold.prepare, first))
        later.pop()
        for request in first:
            exact.prepare(request)
            prefix.prepare(request)
        figures += [median_us(exact.prepare, first), median_us(prefix.prepare, later)]
        yield name, len(cold.prepare(first[0])[1]), figures


def show_costs(model_path: str) -> None:
    print(f"  {'µs to render and encode':24}{'tokens':>8}{'template':>10}{'new':>10}{'cold':>10}{'L0':>10}{'L1':>10}")
    for name, tokens, figures in costs(model_path):
        print(f"  {name:24}{tokens:8}" + "".join(f"{figure:10.0f}" for figure in figures))


class Load(NamedTuple):
    """Streams that run, milliseconds between their tokens, and long prompts over the window."""

    streams: int = 64
    step_ms: float = 50.0
    prompts: int = 20


LOAD = Load()


@contextmanager
def roomy(model_path: str) -> Iterator[str]:
    """The same model without a bound on its context, in a directory of its own: a prompt that is refused as too long
    would show little."""
    with TemporaryDirectory(prefix="smg-bench-") as name:
        for file in Path(model_path).iterdir():
            if file.name != "config.json":
                (Path(name) / file.name).symlink_to(file)
        config = json.loads((Path(model_path) / "config.json").read_text())
        (Path(name) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10 * HUGE}))
        yield name


def run_streams(model_path: str, procs: int, prompts: int, seconds: float) -> dict[str, float]:
    """One run: what the paced client saw, and ``cores`` that the gateway used. With long prompts also how many were
    ``answered`` and the median milliseconds until then (``answer_ms``)."""
    port, engine, long_engine = free_port(), free_port(), free_port()
    gateway_command = [
        sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host",
        "127.0.0.1", "--prometheus-port", str(free_port()), "--tokenizer-procs", str(procs), "--log-level", "error",
        "--worker-urls", f"grpc://127.0.0.1:{engine}", f"grpc://127.0.0.1:{long_engine}",
    ]  # fmt: skip
    warm_up = 2.0
    # Every stream outlasts the window, so that no short prompt has to be prepared in it.
    tokens = round((warm_up + seconds) * 1000 / LOAD.step_ms) * 2
    client_command = [
        sys.executable, str(Path(__file__).with_name("load_client.py")), "--port", str(port), "--model", MODEL,
        "--streams", str(LOAD.streams), "--max-tokens", str(tokens), "--spread", "1",
        "--warm-up", str(warm_up), "--seconds", str(seconds),
    ]  # fmt: skip
    with (
        started(_engine(engine, MODEL, model_path, LOAD.step_ms)),
        started(_engine(long_engine, LONG_MODEL, model_path, 0.0)),
        started(gateway_command, quiet=True) as gateway,
    ):
        for model in (MODEL, LONG_MODEL):
            wait_served(port, gateway, model)
        bodies = [_chat(number) for number in range(prompts)]
        with started(client_command) as client:
            assert client.stdout is not None
            client.stdout.readline()  # the window begins
            tree = Tree(gateway.pid)
            tree.begin()
            answers = send_evenly(port, bodies, seconds * 0.9)
            client.stdout.readline()  # the window ends
            spent = sum(tree.spent().values())
            found: dict[str, float] = json.loads(client.stdout.readline())
    found["cores"] = spent / seconds
    found["answered"] = len(answers)
    found["answer_ms"] = statistics.median(answers) * 1000 if answers else float("nan")
    return found


def _engine(port: int, name: str, model_path: str, step_ms: float) -> list[str]:
    return [
        sys.executable, "-m", "smg", "sim-engine", "--kind", "vllm", "--model-name", name, "--model-path", model_path,
        "--port", str(port), "--max-concurrency", "4096", "--step-ms", str(step_ms),
    ]  # fmt: skip


def _chat(number: int) -> bytes:
    messages = [{"role": "user", "content": text(HUGE, number)}]
    return json.dumps({"model": LONG_MODEL, "messages": messages, "max_tokens": 1}).encode()


def send_evenly(port: int, bodies: list[bytes], seconds: float) -> list[float]:
    """Send each body at its time within ``seconds``; the seconds that each answer took. Failures are left out."""
    begun = time.perf_counter()

    def send(place: int) -> float | None:
        due = begun + seconds * place / len(bodies)
        time.sleep(max(0.0, due - time.perf_counter()))
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", bodies[place], {"content-type": "application/json"}
        )
        sent = time.perf_counter()
        with suppress(OSError), urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return time.perf_counter() - sent
        return None

    with ThreadPoolExecutor(max(len(bodies), 1)) as threads:
        return [took for took in threads.map(send, range(len(bodies))) if took is not None]


def show_streams(model_path: str, seconds: float, rounds: int) -> None:
    print(f"  {LOAD.streams} streams, a token every {LOAD.step_ms:g} ms; {LOAD.prompts} prompts of {HUGE:,} characters")
    print(f"  {'':34}{'p50 ms':>8}{'p99 ms':>8}{'max ms':>8}{'cores':>7}{'answered':>10}{'each ms':>9}")
    for procs in (1, 2):
        for prompts in (0, LOAD.prompts):
            for _ in range(rounds):
                found = run_streams(model_path, procs, prompts, seconds)
                name = f"{procs} tokenizer process{'es' if procs > 1 else ''}, "
                print(f"  {name + ('long prompts' if prompts else 'alone'):34}", end="")
                print("".join(f"{found[f'gap_{kind}_ms']:8.1f}" for kind in ("p50", "p99", "max")), end="")
                print(f"{found['cores']:7.2f}", end="")
                print(f"{found['answered']:10.0f}{found['answer_ms']:9.0f}" if prompts else "", flush=True)
                if found["errors"]:
                    print(f"  {found['errors']:.0f} errors")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model-path", default=str(MODEL_DIR), help="model directory (default: the shipped one)")
    options.add_argument("--part", nargs="+", choices=("cost", "streams"), default=["cost", "streams"])
    options.add_argument("--rounds", type=int, default=1, help="runs of each load")
    options.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    chosen = options.parse_args()
    model_path = str(Path(chosen.model_path).resolve())  # the processes run in another directory
    if "cost" in chosen.part:
        show_costs(model_path)
    if "streams" in chosen.part:
        with roomy(model_path) as served:
            show_streams(served, chosen.seconds, chosen.rounds)


if __name__ == "__main__":
    main()
