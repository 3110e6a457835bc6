"""What the embedded engine says when nobody scripts it: a few sentences around words of the prompt."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from smg.simengine.vocabulary import Vocabulary

# How much of the prompt's end is read for words to repeat.
PROMPT_TAIL = 256
OPEN_THINKING = re.compile(r"<think>\s*\Z")
MARKUP = re.compile(r"<[^<>\s]{1,40}>|\b(?:system|user|assistant|tool)\b")
WORD = re.compile(r"[^\W\d_]{4,}")
MAX_SENTENCES = 6
FALLBACK_WORDS = ("question", "answer", "example")

OPENINGS = (
    "You asked about {0}, so here is a short answer.",
    "Let us look at {0} and {1} together.",
    "That is a good question about {0}.",
    "Here is what can be said about {0}.",
)
SENTENCES = (
    "The word {0} often goes with {1}.",
    "When {0} changes, {1} usually changes too.",
    "A simple example of {0} is easy to find in daily life.",
    "Some people prefer {1}, others keep to {0}.",
    "It helps to write {0} down and to compare it with {1}.",
    "In short, {0} matters more than it seems.",
    "Nothing here depends on {1} alone — the context counts as well.",
)
CLOSINGS = ("I hope this helps.", "Tell me if you need more about {0}.", "That is all there is to say.")
THOUGHTS = (
    "The user mentions {0}. I should keep the answer short and say something about {1}.",
    "This is about {0}; a few plain sentences with {1} will do.",
)


def words_of(text: str) -> list[str]:
    """Words of at least four letters, each once, in order of appearance; a few stock words when there are none.

    Turn markers and role names are left out."""
    words = list(dict.fromkeys(WORD.findall(MARKUP.sub(" ", text))))
    return words if len(words) > 1 else [*words, *FALLBACK_WORDS]


def compose(prompt_tail: str, rng: random.Random) -> str:
    """A reply to a prompt that ends in ``prompt_tail``; closes the thinking block that the prompt may have opened."""
    words = words_of(prompt_tail)

    def say(choices: Sequence[str]) -> str:
        return rng.choice(choices).format(*rng.sample(words, 2))

    thought = say(THOUGHTS) + "\n</think>\n\n" if OPEN_THINKING.search(prompt_tail) else ""
    middle = [say(SENTENCES) for _ in range(rng.randrange(1, MAX_SENTENCES - 1))]
    return thought + " ".join([say(OPENINGS), *middle, say(CLOSINGS)])


def reply_ids(vocabulary: Vocabulary, prompt_ids: Sequence[int], rng: random.Random, at_least: int = 0) -> list[int]:
    """Token ids of a reply, without EOS; sentences are added until there are ``at_least`` ids."""
    tail = vocabulary.decode(prompt_ids[-PROMPT_TAIL:])
    ids = vocabulary.encode(compose(tail, rng))
    while len(ids) < at_least:
        ids += vocabulary.encode(" " + compose("", rng))
    return ids
