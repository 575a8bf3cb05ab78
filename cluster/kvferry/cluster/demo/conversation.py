"""What the demo asks: sessions of several turns over one long document, and extra prompts.

Prompts are built from token ids: a later turn is the earlier prompt, the tokens that were
generated, and the new question, so that it shares its whole past as a prefix.
"""

from dataclasses import dataclass
from importlib.metadata import distribution
from typing import Any

from kvferry.proto.errors import ModelError

NUM_SESSIONS = 3
DOCUMENT_TOKENS = 1050
"""The shared document has at least this many tokens."""

QUESTIONS = (
    "What is this document?",
    "Who may use the work?",
    "What does Contributor mean here?",
    "Does the license cover patents?",
    "Name one thing that must be kept when redistributing.",
    "What is a Derivative Work?",
    "Is there a warranty?",
    "May I charge money for support?",
    "What ends the patent license?",
    "What is meant by Source form?",
    "Are trademarks covered?",
    "Summarize the text in one sentence.",
)
_ANSWER = "\u2063answer\u2063"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the conversation, before its past is known."""

    request_id: str
    session: int
    question: str


def plan_turns(num_requests: int) -> tuple[Turn, ...]:
    """Return the turns in order of asking: request i belongs to session i mod 3."""
    return tuple(
        Turn(f"request-{i}", i % NUM_SESSIONS, QUESTIONS[i % len(QUESTIONS)])
        for i in range(num_requests)
    )


class PromptWriter:
    """Turns documents, questions and generated tokens into prompt token ids for one tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        text = distribution("kvferry").read_text("licenses/LICENSE") or ""
        words = text.split()
        self._document = self._part(words, from_end=False)
        self._other_document = self._part(words, from_end=True)

    def first_turn(self, question: str) -> tuple[int, ...]:
        """Return the prompt that opens a session: the document and a question."""
        return self._opening(f"{self._document}\n\n{question}")

    def extra_prompt(self, number: int) -> tuple[int, ...]:
        """Return a prompt over another long text, sharing only the template with the rest.

        Those of two numbers of one digit are equally long and differ from their first line on.
        """
        return self._opening(f"{number}. {self._other_document}\n\nWhat is this text about?")

    def next_turn(
        self, prompt: tuple[int, ...], answer: tuple[int, ...], question: str
    ) -> tuple[int, ...]:
        """Return the earlier prompt, the answer as generated, and a new question."""
        while answer and answer[-1] in self._eos:
            answer = answer[:-1]  # the template closes the turn itself
        return prompt + answer + self._encode(self._after_answer(question))

    def longest_next_turn(self, prompt_tokens: int, answer_tokens: int, question: str) -> int:
        """Return the most tokens that `next_turn` can have."""
        return prompt_tokens + answer_tokens + len(self._encode(self._after_answer(question)))

    def _opening(self, content: str) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            return tuple(self._tokenizer.encode(f"{content}\n"))
        return self._encode(self._render([{"role": "user", "content": content}]))

    def _after_answer(self, question: str) -> str:
        if self._tokenizer.chat_template is None:
            return f"\n\n{question}\n"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": question},
        ]
        text = self._render(messages)
        if _ANSWER not in text:
            raise ModelError(
                "the model's chat template drops earlier answers, so no later turn can begin with "
                "an earlier one",
                given=text,
                allowed="a template that keeps every answer as it was given",
            )
        return text.rsplit(_ANSWER, 1)[1]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author
            raise ModelError("the model's chat template fails", given=str(error)) from error
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _part(self, words: list[str], *, from_end: bool) -> str:
        for count in range(DOCUMENT_TOKENS // 2, len(words), 20):
            part = " ".join(words[-count:] if from_end else words[:count])
            if len(self._encode(part)) >= DOCUMENT_TOKENS:
                return part
        return " ".join(words)
