"""`atropos env`: an episode in the terminal from an empty folder, with nothing heavy, and errors as sentences."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from atropos.cli.env import app, env_check, env_list, env_try, read_settings
from atropos.cli.env_policies import EnginePolicy, HumanPolicy, PolicyError, read_call, read_reply, to_wire
from atropos.cli.env_show import Printer
from atropos.contracts.context import Context
from atropos.contracts.messages import ImagePart, Message, Role, TextPart, ToolCall, assistant, user
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.environments.faults import EnvironmentFault
from atropos.environments.play import Reply
from rich.console import Console
from typer import BadParameter
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
CTX = Context("r", "k", 0, 0)

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "temporalio", "sqlalchemy", "psycopg", "transformers"}:
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocker())
from atropos.cli.env import app
app(prog_name="atropos env")
"""


def run_blocked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )


def recorder() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- from an empty folder ---------------------------------------------------------------------------------------


def test_the_calculator_plays_from_an_empty_folder_without_torch_temporal_or_a_store(tmp_path: Path) -> None:
    done = run_blocked(tmp_path, "try", "calculator")
    assert done.returncode == 0, done.stderr
    assert "user  What is " in done.stdout
    assert 'calls  calculator {"expression": ' in done.stdout
    assert "stopped: answered after 2 turns" in done.stdout
    assert "reward: 1" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_ones_own_plays_and_its_pool_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from atropos import Environment, Limits, Task, reward\n"
        "import os\n"
        "class Mine(Environment):\n"
        "    limits = Limits(turns=1)\n"
        "    def task(self, split, index): return Task(data=[split, index])\n"
        "    def prompt(self, task): return 'say ' + task.data[0]\n"
        "    @reward\n"
        "    def pid(self, episode): return os.getpid()\n"
    )
    done = run_blocked(tmp_path, "try", "mine.py", "--policy", "echo", "--split", "eval", "--index", "7")
    assert done.returncode == 0, done.stderr
    assert "assistant  say eval" in done.stdout
    worker = int(float(done.stdout.rpartition("reward: ")[2]))
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("try", "calculater"), "no environment 'calculater'; did you mean 'calculator'?"),
        (("try", "calculator", "--set", "digit=3"), "unknown argument 'digit'; did you mean 'digits'?"),
        (("try", "calculator", "--index", "99999999"), "so there is none at index 99999999"),
        (("try", "calculator", "--engine", "http://127.0.0.1:9", "--model", "m"), "no answer from the engine"),
        (("try", "calculator", "--engine", "nonsense", "--model", "m"), "no answer from the engine"),
        (("try", "calculator", "--engine", "http://x", "--policy", "echo"), "give --engine or --policy, not both"),
        (("try", "calculator", "--model", "m"), "give --engine URL too"),
        (
            ("try", "calculator", "--engine", "http://x", "--api-key-env", "NOT_SET_X"),
            "NOT_SET_X named by --api-key-env",
        ),
        (("try", str(EXAMPLES / "pairwise.py")), "pairwise has no `demonstrate`, and nobody is at this terminal"),
        (("try", str(EXAMPLES / "pairwise.py"), "--policy", "scripted"), "pairwise has no `demonstrate` to play from"),
        (("try", "calculator", "--policy", "human"), "the input ended before the episode did"),
        (("check", "none.py"), "no file"),
    ],
)
def test_each_problem_is_one_sentence_on_stderr(arguments: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_settings_are_yaml_and_dots_nest() -> None:
    assert read_settings(["digits=3", "operators=['+']", "a.b.c=x: [", "e="]) == {
        "digits": 3,
        "operators": ["+"],
        "a": {"b": {"c": "x: ["}},
        "e": None,
    }
    for wrong in (["digits"], ["=3"], ["a=1", "a.b=2"]):
        with pytest.raises(BadParameter):
            read_settings(wrong)


# --- check and list ---------------------------------------------------------------------------------------------


async def test_check_shows_what_runs_where_and_proves_the_splits() -> None:
    console = recorder()
    await env_check("calculator", n=50, console=console)
    shown = text_of(console)
    assert "tool (state)" in shown
    assert "11928 tasks" in shown
    assert "ok: no task is in two splits among the first 50 of each" in shown


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("    def task(self, split, index): return Task(data=0)\n", "task 0 of eval is task 0 of train"),
        ("    def task(self, split, index): return Task(data=random.random())\n", "make it deterministic"),
        (
            "    def task(self, split, index): return Task(data=[split, index])\n"
            "    def prompt(self, task): return str(random.random())\n",
            "prompt differs between two calls",
        ),
        (
            "    def task(self, split, index): return Task(data=split)\n"
            "    def size(self, split): return int(split != 'train')\n",
            "bad has no tasks in train; a run needs one at least",
        ),
    ],
)
async def test_check_refuses_what_a_run_could_not_rely_on(tmp_path: Path, body: str, sentence: str) -> None:
    head = "import random\nfrom atropos import Environment, Task\nclass Bad(Environment):\n"
    (tmp_path / "bad.py").write_text(f"{head}    def prompt(self, task): return 'q'\n{body}")
    with pytest.raises(Exception, match=sentence):
        await env_check(str(tmp_path / "bad.py"), console=recorder())


def test_list_names_what_is_installed() -> None:
    console = recorder()
    assert "calculator" in env_list(console)
    assert "Answer a sum or difference" in text_of(console)


# --- what is shown ----------------------------------------------------------------------------------------------


def test_what_was_said_is_never_markup_and_never_controls_the_terminal() -> None:
    console = recorder()
    Printer(console).said(0, Reply(assistant("[bold]x[/bold] [/] \x1b[2J\x1b]0;title\x07 \ud800")))
    shown = text_of(console)
    assert "[bold]x[/bold] [/] ␛[2J␛]0;title␇ \ufffd" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


async def test_tokens_are_shown_where_the_engine_gives_them() -> None:
    console = recorder()
    Printer(console).said(1, Reply(assistant("x"), FinishReason.LENGTH, prompt_tokens=40, sampled_tokens=7))
    assert "turn 1: 40 prompt + 7 sampled tokens, cut at the token limit" in text_of(console)


# --- policies ---------------------------------------------------------------------------------------------------


async def test_a_person_speaks_or_calls_tools() -> None:
    lines = iter(['/calculator {"expression": "1+1"}', "/calculator {", "two"])
    person = HumanPolicy(lambda prompt: next(lines))
    call = (await person([], [], CTX)).message.tool_calls[0]
    assert (call.name, call.arguments) == ("calculator", {"expression": "1+1"})
    broken = (await person([], [], CTX)).message.tool_calls[0]
    assert broken.problem is not None
    assert broken.raw == "{"
    assert (await person([], [], CTX)).message == assistant("two")


async def test_an_empty_line_is_asked_again_and_says_how_to_end() -> None:
    asked: list[str] = []
    lines = iter(["", "  ", "two"])

    def read(prompt: str) -> str:
        asked.append(prompt)
        return next(lines)

    assert (await HumanPolicy(read)([], [], CTX)).message == assistant("two")
    assert asked[0] == "you> "
    assert all("Ctrl-D ends" in prompt for prompt in asked[1:])


def test_ctrl_c_ends_an_episode_at_once_also_while_a_person_is_asked(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from atropos import Environment, Step, Task\n"
        "class Slow(Environment):\n"
        "    def task(self, split, index): return Task(data=[split, index])\n"
        "    def prompt(self, task): return 'q'\n"
        "    def step(self, message):\n"
        "        print('stepping', flush=True)\n"
        "        time.sleep(600)\n"
        "        return Step('', done=True)\n"
    )
    for policy, until in (("human", "you> "), ("echo", "stepping")):
        process = subprocess.Popen(
            [sys.executable, "-c", BLOCKED, "try", "slow.py", "--policy", policy],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        shown = b""
        while until.encode() not in shown:
            read = os.read(process.stdout.fileno(), 4096)
            assert read, (shown, process.communicate())
            shown += read
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, b"Traceback" in err) == (130, False), err


def test_messages_travel_in_the_chat_format() -> None:
    call = ToolCall(id="c1", name="t", arguments={"a": 1})
    assert to_wire(assistant("", (call,))) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}}],
    }
    assert to_wire(Message(role=Role.TOOL, content="r", tool_call_id="c1")) == {
        "role": "tool",
        "content": "r",
        "tool_call_id": "c1",
    }
    picture = user((TextPart(text="see"), ImagePart(url="http://x/y.png")))
    assert to_wire(picture)["content"][1] == {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [{"message": {"tool_calls": [3]}}]}])
def test_what_is_no_completion_is_refused(answer: Any) -> None:
    with pytest.raises(PolicyError, match="no chat completion"):
        read_reply(answer)


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', ""])
def test_malformed_arguments_are_kept_with_their_problem(arguments: str) -> None:
    call = read_call("1", "t", arguments)
    assert call.problem is not None
    assert call.raw == arguments


class Engine(BaseHTTPRequestHandler):
    """A chat completions server that plays the calculator: calls the tool, then says its result."""

    asked: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "authorization": self.headers.get("Authorization")})
        last = body["messages"][-1]
        if last["role"] == "tool":
            message: dict[str, Any] = {"content": last["content"]}
        else:
            expression = last["content"].removeprefix("What is ").removesuffix("?")
            function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
            message = {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 40, "completion_tokens": 8}
        self._answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def _answer(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    Engine.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_engine_plays_over_http(engine: str) -> None:
    console = recorder()
    episode = await env_try("calculator", engine=engine, api_key="secret", index=4, console=console)
    assert (episode.stop, episode.reward) == (StopReason.ANSWERED, 1.0)
    assert sum(turn.sampled_tokens for turn in episode.turns) == 16
    first = Engine.asked[0]
    assert (first["model"], first["authorization"]) == ("tiny", "Bearer secret")
    assert first["tools"][0]["function"]["name"] == "calculator"
    assert "40 prompt + 8 sampled tokens" in text_of(console)
    assert "secret" not in text_of(console)


async def test_an_engine_that_refuses_is_quoted(engine: str) -> None:
    policy = EnginePolicy(f"{engine}/v1", None)
    assert (await policy([user("What is 1+1?")], [], CTX)).message.tool_calls[0].arguments == {"expression": "1+1"}
    Engine.do_POST, kept = (lambda self: self.send_error(404, "no such model")), Engine.do_POST  # type: ignore[method-assign]
    try:
        with pytest.raises(PolicyError, match="refused the call with 404"):
            await policy([user("q")], [], CTX)
    finally:
        Engine.do_POST = kept  # type: ignore[method-assign]


async def test_the_same_seed_plays_the_same_episode() -> None:
    first = await env_try("calculator", seed=3, index=2, console=recorder())
    again = await env_try("calculator", seed=3, index=2, console=recorder())
    assert first == again


async def test_a_task_past_the_end_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"calculator has 1442 tasks in eval.*the last is 1441"):
        await env_try("calculator", split="eval", index=1442, console=recorder())
