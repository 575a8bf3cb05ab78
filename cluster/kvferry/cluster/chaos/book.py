"""What is asked: conversations over shared documents, and the answers of an undisturbed run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from typing import Any

NUM_DOCUMENTS = 6
CONVERSATIONS_PER_DOCUMENT = 3
TURNS = 3
DOCUMENT_WORDS = (40, 160)
ANSWER_TOKENS = 12

QUESTIONS = (
    "Who may use the work?",
    "What is meant by Contributor?",
    "Name one thing that must be kept.",
    "Is there a warranty?",
    "What ends the license?",
    "Are trademarks covered?",
    "Summarize the text.",
)


@dataclass(slots=True)
class Conversation:
    """Turns over one document: each prompt holds the ones before it, and their answers.

    `prompts` and `answers` are filled by the undisturbed run.
    """

    document: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def write(self) -> Iterator[tuple[int, ...]]:
        """Yield the prompt of each turn; the answer to one must be noted before the next."""
        prompt = self.document
        for question in self.questions:
            prompt += question
            self.prompts.append(prompt)
            yield prompt
            prompt += self.answers[-1]


def write_conversations(tokenizer: Any, seed: int) -> tuple[Conversation, ...]:
    """Return conversations without answers; those over one document follow each other."""
    chance = random.Random(f"book {seed}")
    words = (distribution("kvferry").read_text("licenses/LICENSE") or "").split()

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    conversations = []
    for _ in range(NUM_DOCUMENTS):
        count = chance.randint(*DOCUMENT_WORDS)
        begin = chance.randrange(len(words) - count)
        document = encode(" ".join(words[begin : begin + count]))
        for _ in range(CONVERSATIONS_PER_DOCUMENT):
            questions = chance.sample(QUESTIONS, TURNS)
            conversations.append(
                Conversation(document, tuple(encode(f"\n\n{one}\n") for one in questions))
            )
    return tuple(conversations)
