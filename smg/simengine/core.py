"""The generation core of the embedded engine: requests in, token ids out, one loop for all of them.

What a request will say is decided when it is admitted (a *plan* of token ids per choice); the loop then hands out
tokens step by step, as a real engine's scheduler does. The core knows no protocol: a front gives it a ``SimRequest``
and is called back for every step of the request's choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from smg.simengine.grammar import GrammarError, GrammarGenerator
from smg.simengine.prefix_cache import PrefixCache
from smg.simengine.reply import reply_ids
from smg.simengine.script import Failure, Output, Script
from smg.simengine.vocabulary import Vocabulary

# Length of an output nothing else limits (EOS ignored, or a grammar that does not come to an end).
UNLIMITED_TOKENS = 4096
MAX_CHOICES = 128
KV_TOKENS = 1_000_000
FORCED_BIAS, BANNED_BIAS = 100.0, -100.0


class RefusalError(Exception):
    """The engine does not take a request; ``code`` is a gRPC status name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(slots=True)
class SimOptions:
    """How the engine behaves. Times in milliseconds; ``step_ms`` 0: as fast as it goes. ``fail_at`` and ``vanish_at``:
    the number of tokens of a choice after which its request fails with ``fail_code``, or ``on_vanish`` is called."""

    seed: int = 0
    step_ms: float = 0.0
    prefill_ms: float = 0.0
    tokens_per_step: int = 1
    max_concurrency: int = 256
    dp_size: int = 1
    fail_at: int | None = None
    fail_code: str = "INTERNAL"
    vanish_at: int | None = None
    on_vanish: Callable[[], None] = lambda: None


@dataclass(slots=True)
class SimRequest:
    """One request, protocol-neutral. ``constraint`` is (kind, text) with the kinds of ``smg.engines.base.Constraint``;
    ``logprobs`` and ``prompt_logprobs`` are the numbers of alternatives, None for no logprobs. ``trim_stop``: the
    engine kind cuts a matched stop or EOS token off the output."""

    request_id: str
    prompt_ids: list[int]
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    constraint: tuple[str, str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    trim_stop: bool = False
    stream: bool = True
    dp_rank: int | None = None


@dataclass(slots=True)
class Choice:
    """One output: ``plan`` is all it will say, ``sent`` how many of its tokens have been handed out."""

    index: int
    plan: list[int]
    finish_reason: str
    matched_stop: str | int | None = None
    sent: int = 0
    done: bool = False


class Generation:
    """A request in the engine. ``deliver(generation, choice, ids)`` is called for every step of a choice, with
    ``choice.done`` set on its last; ``failed(generation)`` when the request breaks (see ``refusal``)."""

    __slots__ = ("cached_tokens", "choices", "deliver", "failed", "failure", "rank", "ready_at", "refusal", "request")

    def __init__(self, request: SimRequest, choices: list[Choice], rank: int) -> None:
        self.request = request
        self.choices = choices
        self.rank = rank
        self.cached_tokens = 0
        self.ready_at = 0.0
        self.failure: Failure | None = None
        self.refusal: RefusalError | None = None
        self.deliver: Callable[[Generation, Choice, list[int]], None] = lambda *_: None
        self.failed: Callable[[Generation], None] = lambda _: None

    @property
    def tokens(self) -> int:
        """KV tokens this generation holds."""
        return len(self.request.prompt_ids) + sum(choice.sent for choice in self.choices)


@dataclass(slots=True)
class RankStats:
    """Load of one data-parallel rank."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0


class SimEngine:
    """The engine. ``run`` is its loop; everything else must be called on the same event loop."""

    def __init__(self, vocabulary: Vocabulary, options: SimOptions | None = None, script: Script | None = None) -> None:
        self.vocabulary = vocabulary
        self.options = options or SimOptions()
        self.cache = PrefixCache()
        self.throughput = 0.0  # tokens per second, over the last second or so
        self.aborted = 0  # generations that were stopped from outside
        self.finished = 0
        self._script = script
        self._grammar = GrammarGenerator(vocabulary)
        self._worker = ThreadPoolExecutor(1, "sim-grammar")
        self._running: dict[str, Generation] = {}
        self._waiting: deque[Generation] = deque()
        self._wake = asyncio.Event()
        self._counted, self._counted_at = 0, 0.0

    # ---- requests

    async def prepare(self, request: SimRequest) -> Generation:
        """Check a request and plan its output; it runs once it is given to ``submit``. Raises ``RefusalError``."""
        self._check(request)
        output = None
        if self._script is not None:
            prompt = self.vocabulary.decode(request.prompt_ids) if self._script.needs_prompt else ""
            output = self._script.choose(prompt)
        choices = []
        for index in range(request.n):
            plan, finish = await self._plan(request, output, index)
            choices.append(self._bounded(request, index, plan, finish))
        generation = Generation(request, choices, self._rank(request))
        if output is not None:
            generation.failure = output.error
        return generation

    def submit(self, generation: Generation) -> None:
        """Queue a prepared generation. Its callbacks must be set. Raises ``RefusalError`` when its id is in use."""
        if self.is_known(generation.request.request_id):
            raise RefusalError("ALREADY_EXISTS", f"request id {generation.request.request_id} is in use")
        generation.cached_tokens = self.cache.lookup(generation.request.prompt_ids)
        self._waiting.append(generation)
        self._wake.set()

    def abort(self, request_id: str) -> bool:
        """Stop a generation; its callbacks are not called again. False when it is unknown."""
        found = self._running.pop(request_id, None) is not None
        for generation in self._waiting:
            if generation.request.request_id == request_id:
                self._waiting.remove(generation)
                found = True
                break
        self.aborted += found
        return found

    def is_known(self, request_id: str) -> bool:
        """Whether a generation of this id runs or waits."""
        return request_id in self._running or any(g.request.request_id == request_id for g in self._waiting)

    def loads(self) -> list[RankStats]:
        """Load per data-parallel rank."""
        ranks = [RankStats() for _ in range(self.options.dp_size)]
        for generation in self._running.values():
            rank = ranks[generation.rank]
            rank.running += 1
            rank.used_tokens += generation.tokens
        for generation in self._waiting:
            rank = ranks[generation.rank]
            rank.waiting += 1
            rank.waiting_tokens += len(generation.request.prompt_ids) - generation.cached_tokens
        return ranks

    def embed(self, ids: Sequence[int], dimension: int = 64) -> list[float]:
        """A unit vector that depends on the ids alone; prompts with many ids in common lie close together."""
        self._check_prompt(ids)
        vector = [0.0] * dimension
        for token in ids:
            rng = random.Random(token)
            for position in range(dimension):
                vector[position] += rng.uniform(-1.0, 1.0)
        norm = sum(value * value for value in vector) ** 0.5 or 1.0
        return [value / norm for value in vector]

    # ---- planning

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RefusalError("INVALID_ARGUMENT", "the prompt is empty")
        if len(ids) >= self.vocabulary.context_length:
            limit = self.vocabulary.context_length
            raise RefusalError("INVALID_ARGUMENT", f"the prompt has {len(ids)} tokens, the context length is {limit}")
        if max(ids) >= self.vocabulary.size:
            raise RefusalError("INVALID_ARGUMENT", f"token id {max(ids)} is outside the vocabulary")

    def _check(self, request: SimRequest) -> None:
        self._check_prompt(request.prompt_ids)
        if not 1 <= request.n <= MAX_CHOICES:
            raise RefusalError("INVALID_ARGUMENT", f"n must be between 1 and {MAX_CHOICES}")
        if request.dp_rank is not None and not 0 <= request.dp_rank < self.options.dp_size:
            raise RefusalError("INVALID_ARGUMENT", f"there is no data-parallel rank {request.dp_rank}")

    def _rank(self, request: SimRequest) -> int:
        if request.dp_rank is not None:
            return request.dp_rank
        loads = self.loads()
        return min(range(len(loads)), key=lambda rank: loads[rank].running + loads[rank].waiting)

    def _limit(self, request: SimRequest) -> int:
        room = self.vocabulary.context_length - len(request.prompt_ids)
        return room if request.max_tokens is None else min(request.max_tokens, room)

    async def _plan(self, request: SimRequest, output: Output | None, index: int) -> tuple[list[int], str]:
        """Ids of one choice before stops are looked for, and how they end ("stop": with EOS)."""
        eos = self.vocabulary.eos_ids[0]
        limit = self._limit(request)
        seed = self.options.seed if request.seed is None else request.seed
        rng = random.Random(f"{seed}/{index}/{hash(tuple(request.prompt_ids))}")
        if output is not None:
            ids = output.ids if output.ids is not None else self.vocabulary.encode(output.full_text())
            return ([*ids, eos], "stop") if output.finish_reason == "stop" else (list(ids), output.finish_reason)
        forced = [token for token, bias in request.logit_bias.items() if bias >= FORCED_BIAS]
        if forced:
            return [rng.choice(forced) for _ in range(min(limit, UNLIMITED_TOKENS))], "length"
        if request.constraint is not None:
            ids, complete = await self._constrained(request.constraint, rng, min(limit, UNLIMITED_TOKENS))
            return ([*ids, eos], "stop") if complete else (ids, "length")
        ids = reply_ids(self.vocabulary, request.prompt_ids, rng, at_least=request.min_tokens)
        if request.ignore_eos:
            length = min(limit, UNLIMITED_TOKENS) if request.max_tokens is None else limit
            ids = (ids * (length // len(ids) + 1))[:length]
            return ids, "length"
        return [*ids, eos], "stop"

    async def _constrained(self, constraint: tuple[str, str], rng: random.Random, limit: int) -> tuple[list[int], bool]:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._worker, self._grammar.generate, *constraint, rng, limit
            )
        except GrammarError as error:
            raise RefusalError("INVALID_ARGUMENT", str(error)) from error

    def _bounded(self, request: SimRequest, index: int, plan: list[int], finish: str) -> Choice:
        """Cut the plan at the first stop token, stop string or limit."""
        banned = {token for token, bias in request.logit_bias.items() if bias <= BANNED_BIAS}
        if banned and request.constraint is None:
            plan = [token for token in plan if token not in banned]
        matched: str | int | None = None
        eos = frozenset() if request.ignore_eos else frozenset(self.vocabulary.eos_ids)
        end = self._stop_string_end(request, plan)
        if end is not None:
            plan, (finish, matched) = plan[: end[0]], ("stop", end[1])
        stops = eos.union(request.stop_token_ids)
        for position, token in enumerate(plan):
            if token in stops and position >= request.min_tokens:
                plan, finish, matched = plan[: position + 1], "stop", token
                break
        limit = self._limit(request)
        if len(plan) > limit:
            plan, finish, matched = plan[:limit], "length", None
        elif request.trim_stop and isinstance(matched, int):
            plan = plan[:-1]
        return Choice(index, plan, finish, matched)

    def _stop_string_end(self, request: SimRequest, plan: list[int]) -> tuple[int, str] | None:
        """Number of tokens up to the first stop string, and that string."""
        if not request.stop:
            return None
        text = self.vocabulary.decode(plan)
        found = [(text.find(stop), stop) for stop in request.stop if stop and stop in text]
        if not found:
            return None
        start, stop = min(found)
        low, high = request.min_tokens, len(plan)
        while low < high:  # the fewest tokens whose text holds it
            middle = (low + high) // 2
            if stop in self.vocabulary.decode(plan[:middle])[: start + len(stop)]:
                high = middle
            else:
                low = middle + 1
        return low, stop

    # ---- the loop

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        pace = self.options.step_ms / 1000
        due = loop.time()
        while True:
            if not self._running and not self._waiting:
                self.throughput = 0.0
                self._wake.clear()
                await self._wake.wait()
                self._counted, self._counted_at, due = 0, loop.time(), loop.time()
            prefilled_at = self._step(loop.time())
            if prefilled_at is not None:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), prefilled_at - loop.time())
                due = loop.time()
                continue
            due = max(due + pace, loop.time() - pace)
            await asyncio.sleep(due - loop.time() if pace else 0)

    def _step(self, now: float) -> float | None:
        """One step of everything that runs. When all of it is still in prefill: the time at which that ends."""
        running = self._running
        while self._waiting and len(running) < self.options.max_concurrency:
            generation = self._waiting.popleft()
            generation.ready_at = now + self.options.prefill_ms / 1000
            running[generation.request.request_id] = generation
        produced = 0
        pending = []
        for generation in list(running.values()):
            if generation.ready_at > now:
                pending.append(generation.ready_at)
                continue
            produced += self._advance(generation)
        self._count(produced, now)
        return min(pending) if pending and len(pending) == len(running) else None

    def _advance(self, generation: Generation) -> int:
        """Hand out the next tokens of every choice; how many there were."""
        produced = 0
        step = self.options.tokens_per_step
        for choice in generation.choices:
            if choice.done:
                continue
            sent = choice.sent
            if self._breaks(generation, sent):
                return produced
            ids = choice.plan[sent : sent + step]
            choice.sent = sent + len(ids)
            choice.done = choice.sent >= len(choice.plan)
            produced += len(ids)
            generation.deliver(generation, choice, ids)
        if all(choice.done for choice in generation.choices):
            self._running.pop(generation.request.request_id, None)
            self.finished += 1
        return produced

    def _breaks(self, generation: Generation, sent: int) -> bool:
        """Whether the request breaks before its next token; it is taken off the engine then."""
        options, failure = self.options, generation.failure
        if options.vanish_at is not None and sent >= options.vanish_at:
            options.on_vanish()
        if options.fail_at is not None and sent >= options.fail_at:
            failure = Failure(options.fail_code, f"told to fail at token {options.fail_at}")
        elif failure is None or sent < failure.at:
            return False
        generation.refusal = RefusalError(failure.code, failure.message)
        self._running.pop(generation.request.request_id, None)
        generation.failed(generation)
        return True

    def _count(self, produced: int, now: float) -> None:
        self._counted += produced
        elapsed = now - self._counted_at
        if elapsed >= 1.0:
            self.throughput = self._counted / elapsed
            self._counted, self._counted_at = 0, now


def synthetic_logprobs(
    ids: Sequence[int], start: int, alternatives: int, vocabulary_size: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Logprobs for ids at positions ``start``, ``start + 1`` ...: multiples of 1/8, so they survive 32-bit floats.

    With alternatives, the token itself is the first of them and each further one is 1/4 less likely."""
    values = [-((position % 7) + 1) / 8 for position in range(start, start + len(ids))]
    top = [
        [((token + rank) % vocabulary_size, value - rank / 4) for rank in range(alternatives)]
        for token, value in zip(ids, values, strict=True)
    ]
    return values, top
