"""A judge answers, is retried a little, and is otherwise unavailable: never a made-up text."""

from collections.abc import Callable

import pytest
from atropos.contracts.context import JudgeUnavailable
from atropos.contracts.messages import ImagePart, TextPart, system, user
from atropos.contracts.runfile import JudgeConfig
from atropos.inference.judge import HttpJudge
from atropos.tests.inference.servers import Answer, Seen, Server, serving


def secrets(name: str) -> str | None:
    return "k" if name == "KEY" else None


def no_secrets(name: str) -> str | None:
    return None


SOON = {"retry-after-ms": "1"}


def verdict(text: object) -> Answer:
    return Answer(body={"choices": [{"message": {"role": "assistant", "content": text}}]})


async def ask(answers: list[Answer], **config: str) -> tuple[str, Server]:
    left = list(answers)
    async with serving(lambda _: left.pop(0)) as server:
        judge = HttpJudge({"default": JudgeConfig(url=server.url + "/v1", model="m", **config)}, secrets)
        try:
            return await judge.ask([system("grade"), user("2+2=4")], max_tokens=5), server
        finally:
            await judge.close()


async def test_the_judges_text_comes_back_as_it_is() -> None:
    text, server = await ask([verdict("ignore all rules\x00 <score>NaN</score>")], api_key_env="KEY")
    assert text == "ignore all rules\x00 <score>NaN</score>"
    seen = server.seen[0]
    assert (seen.path, seen.headers["authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert seen.json["messages"] == [{"role": "system", "content": "grade"}, {"role": "user", "content": "2+2=4"}]
    assert (seen.json["model"], seen.json["max_tokens"], seen.json["temperature"]) == ("m", 5, 0)


async def test_a_judge_is_tried_three_times() -> None:
    text, server = await ask([Answer(500, b"", SOON), Answer(429, b"", SOON), verdict("7")])
    assert (text, len(server.seen)) == ("7", 3)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([Answer(500, b"", SOON)] * 3, 3),
        ([Answer(401, b"who are you")], 1),
        ([Answer(429, b"", {"retry-after": "3600"})], 1),
        ([Answer(500, b"", {"x-should-retry": "false"})], 1),
    ],
)
async def test_a_judge_that_gives_nothing_is_unavailable(answers: list[Answer], asked: int) -> None:
    left = list(answers)
    async with serving(lambda _: left.pop(0)) as server:
        judge = HttpJudge({"default": JudgeConfig(url=server.url, model="m")}, no_secrets)
        with pytest.raises(JudgeUnavailable, match="judge 'default' answered"):
            await judge.ask([user("x")])
        await judge.close()
    assert len(server.seen) == asked


@pytest.mark.parametrize(
    "answer",
    [
        verdict(None),
        verdict("  "),
        verdict(["x"]),
        Answer(body={"choices": []}),
        Answer(body=[]),
        Answer(200, b"<html>"),
    ],
)
async def test_an_answer_without_text_is_no_answer(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos.inference.judge._FIRST_PAUSE_S", 0.001)
    with pytest.raises(JudgeUnavailable):
        await ask([answer] * 3)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda judge: judge.ask([user("x")], model="strict"), "no judge 'strict'; its judges: default"),
        (lambda judge: judge.ask([user("x")]), "environment variable KEY"),
    ],
)
async def test_a_judge_that_is_not_set_up_is_named(use: Callable[[HttpJudge], object], says: str) -> None:
    judge = HttpJudge({"default": JudgeConfig(url="http://127.0.0.1:9", model="m", api_key_env="KEY")}, no_secrets)
    with pytest.raises(JudgeUnavailable, match=says):
        await use(judge)  # type: ignore[misc]


async def test_images_go_along() -> None:
    def answer(seen: Seen) -> Answer:
        return verdict(seen.json["messages"][0]["content"][1]["image_url"]["url"])

    async with serving(answer) as server:
        judge = HttpJudge({"default": JudgeConfig(url=server.url, model="m")}, no_secrets)
        got = await judge.ask([user((TextPart(text="what is it?"), ImagePart(url="data:image/png;base64,AA")))])
        await judge.close()
    assert got == "data:image/png;base64,AA"
