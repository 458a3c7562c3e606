"""GSM8K (https://arxiv.org/abs/2110.14168): its files, its prompts, and what counts as a right answer."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

# A sign is one only where it does not follow a digit: 12-5 ends in 5. Commas group thousands.
_NUMBER = re.compile(r"(?<![\w)])[-−](?=\$?\d)\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?|(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?")
_MARK = "####"
_CALCULATION = re.compile(r"<<.*?>>")  # the data's calculator notes: <<48/2=24>>24
QUESTION, ANSWER = "Question:", "Answer:"
INSTRUCTION = f"Solve the problem step by step. End with a line of {_MARK} and the answer as one number."


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str  # ends in "#### 42"

    @property
    def worked(self) -> str:
        """The solution as a model should write it."""
        return _CALCULATION.sub("", self.solution)


def read_problems(path: Path) -> list[Problem]:
    """Raises ValueError, one line, for a file that holds no problems; OSError where it cannot be read."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            problem = Problem(row["question"], row["answer"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: expected a JSON object with question and answer") from None
        if extract_answer(problem.solution) is None:
            raise ValueError(f"{path}, line {number}: the answer has no number")
        problems.append(problem)
    return problems


def extract_answer(text: str) -> Decimal | None:
    """The number that a solution arrives at: the first after its first ####, or else its last one."""
    _, mark, rest = text.partition(_MARK)
    marked = _numbers(rest.strip().partition("\n")[0]) if mark else []
    if marked:
        return marked[0]
    return next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    numbers = []
    for match in _NUMBER.finditer(text):
        digits = (match[1] or match[3]).replace(",", "") + (match[2] or match[4] or "")
        numbers.append(Decimal(f"-{digits}" if match[1] else digits))
    return numbers


def chat_prompt(shots: list[Problem], problem: Problem) -> list[dict[str, str]]:
    """The shots as turns of a conversation that has gone well so far."""
    messages = [{"role": "system", "content": INSTRUCTION}]
    for shot in shots:
        messages += [{"role": "user", "content": shot.question}, {"role": "assistant", "content": shot.worked}]
    return [*messages, {"role": "user", "content": problem.question}]


def completion_prompt(shots: list[Problem], problem: Problem) -> str:
    """The shots as a text that goes on with the problem's question."""
    worked = [f"{QUESTION} {shot.question}\n{ANSWER} {shot.worked}" for shot in shots]
    return "\n\n".join([*worked, f"{QUESTION} {problem.question}\n{ANSWER}"])
