"""An environment scored as a group: a judge compares the answers of one prompt pairwise.

There is no right answer to write a verifier for, only a preference, so an episode's reward is the share of
comparisons it wins. Each pair is asked in both orders, because judges favour a place.
"""

from itertools import combinations

from atropos import Environment, Episode, Judge, Limits, Message, Task, group_reward, metric, user
from pydantic import BaseModel

SUBJECTS = ("a lighthouse", "the first snow", "an old bicycle", "rain on a tin roof", "a night train", "a stone wall")
FORMS = ("haiku", "limerick", "riddle", "slogan")


class Request(BaseModel):
    form: str
    subject: str
    split: str


class Pairwise(Environment):
    """Write something short that a judge prefers."""

    limits = Limits(turns=1)

    def size(self, split: str) -> int:
        return len(FORMS) * len(SUBJECTS) if split == "train" else len(FORMS)

    def task(self, split: str, index: int) -> Task[Request]:
        subject = SUBJECTS[index // len(FORMS) % len(SUBJECTS)] if split == "train" else f"the {split} of a recipe"
        return Task(data=Request(form=FORMS[index % len(FORMS)], subject=subject, split=split))

    def prompt(self, task: Task[Request]) -> list[Message]:
        return [user(f"Write a {task.data.form} about {task.data.subject}.")]

    @metric
    def length(self, episode: Episode) -> int:
        return len(episode.answer)

    @group_reward(min_valid=2)
    async def wins(self, task: Task[Request], episodes: list[Episode], judge: Judge) -> list[float | None]:
        won = [0.0] * len(episodes)
        for left, right in combinations(range(len(episodes)), 2):
            for first, second in ((left, right), (right, left)):
                verdict = await judge.ask([user(question(task, episodes[first].answer, episodes[second].answer))])
                won[first if verdict.strip().upper().startswith("A") else second] += 1.0
        return [count / (2 * (len(episodes) - 1)) for count in won]


def question(task: Task[Request], a: str, b: str) -> str:
    """What the judge is asked."""
    asked = f"Which is the better {task.data.form} about {task.data.subject}? Answer with the letter alone."
    return f"{asked}\n\nA: {a}\n\nB: {b}"
