"""`atropos env`: try, check and list environments, with nothing running and nothing stored.

Invariant: nothing here imports Temporal, SQLAlchemy or torch, so an author sees a first episode within seconds of
installing. Each problem is one sentence on standard error and an exit code of 1.
"""

import asyncio
import json
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.text import Text

from ..contracts.base import MOST
from ..contracts.context import Context, JudgeUnavailable
from ..contracts.episode import Episode
from ..contracts.limits import Limits
from ..contracts.tasks import SPLITS, Task
from ..contracts.text import printable
from ..environments.faults import EnvironmentFault, EnvironmentProblem
from ..environments.loaded import LoadedEnvironment
from ..environments.play import Policy, play
from ..environments.pool import ProcessPool
from ..environments.registry import available, find_class, load
from ..environments.spec import describe_environment
from ..environments.splits import check_disjoint, require_size
from .env_policies import EchoPolicy, EnginePolicy, HumanPolicy, PolicyError, ScriptedPolicy, at_terminal
from .env_show import Printer, content_of, spec_table

app = typer.Typer(no_args_is_help=True, help="Try, check and list environments.")


_MOST_COMPARED = 100_000
"""Keys of three splits are held at once and each task is made: minutes already for a slow environment."""


class PolicyName(StrEnum):
    SCRIPTED = "scripted"
    ECHO = "echo"
    HUMAN = "human"


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    TEST = "test"


async def env_try(
    ref: str,
    *,
    args: dict[str, Any] | None = None,
    split: str = "train",
    index: int = 0,
    seed: int = 0,
    policy: PolicyName | None = None,
    engine: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    temperature: float = 1.0,
    max_tokens: int = 1024,
    turns: int | None = None,
    console: Console | None = None,
) -> Episode:
    """Play one episode of task `index` of `split` and print it. Raises EnvironmentProblem or PolicyError.

    `seed` is in what `ctx.rng` and `ctx.key` derive from, and seeds the scripted policy.
    """
    console = console or Console()
    env = load(ref, args)
    task = await make_task(env, split, index)
    if engine is not None:
        player: Policy = EnginePolicy(engine, model, api_key=api_key, temperature=temperature, max_tokens=max_tokens)
        who = f"{model or 'the model'} at {engine}"
    else:
        player, who = choose_policy(env, task, policy, seed)
    console.print(Text(f"{env.name} · {split} task {index} · {task.key[:12]} · played by {who}", style="dim"))
    async with ProcessPool(1) as pool:
        try:
            return await play(
                env,
                task,
                player,
                run_id=f"try-{seed}",
                limits=Limits(turns=turns),
                watch=Printer(console),
                pool=pool,
            )
        finally:
            await env.close()


async def make_task(env: LoadedEnvironment, split: str, index: int) -> Task[Any]:
    """The task at `index`; past the end of a split is refused."""
    size = await env.size(split)
    if size is not None and index >= size:
        last = f"; the last is {size - 1}" if size else ""
        raise EnvironmentFault(f"{env.name} has {size} tasks in {split}, so there is none at index {index}{last}")
    return await env.make_task(split, index)


def choose_policy(env: LoadedEnvironment, task: Task[Any], wanted: PolicyName | None, seed: int) -> tuple[Policy, str]:
    """Who plays without an engine: the one asked for, else the environment's demonstration, else a person."""
    if wanted is None:
        if env.spec.has_demonstrations:
            wanted = PolicyName.SCRIPTED
        elif at_terminal():
            wanted = PolicyName.HUMAN
        else:
            raise PolicyError(
                f"{env.name} has no `demonstrate`, and nobody is at this terminal to play it: "
                "give --engine URL, or --policy human or echo"
            )
    if wanted is PolicyName.ECHO:
        return EchoPolicy(), "an echo"
    if wanted is PolicyName.HUMAN:
        return HumanPolicy(), "you (/TOOL {json} calls a tool, Ctrl-D ends)"
    if not env.spec.has_demonstrations:
        raise PolicyError(f"{env.name} has no `demonstrate` to play from: give --engine URL, --policy human or echo")
    return ScriptedPolicy(env.demonstrate(task, random.Random(seed))), "its own demonstration"


def env_list(console: Console | None = None) -> list[str]:
    """Print the installed environments with what they are; the result is their names."""
    console = console or Console()
    names = available()
    for name in names:
        try:
            about = describe_environment(find_class(name)).description.partition("\n")[0]
        except EnvironmentProblem as problem:
            about = f"cannot be loaded: {problem}"
        console.print(Text.assemble((f"{name}  ", "bold"), printable(about)), soft_wrap=True)
    return names


async def env_check(
    ref: str, *, args: dict[str, Any] | None = None, n: int = 256, console: Console | None = None
) -> None:
    """Load an environment, show what it is, and prove what a run relies on. Raises EnvironmentProblem.

    Checked: there is something to train on, three tasks give the same prompt and state twice, their data survives
    storage, and the first `n` tasks of each split share none by hash.
    """
    console = console or Console()
    env = load(ref, args)
    console.print(Text(f"{env.name} version {env.version}", style="bold"), Text(printable(env.spec.description)))
    console.print(spec_table(env.spec))
    await require_size(env, "train", 1)
    size = await env.size("train")
    for index in range(3 if size is None else min(3, size)):
        task = await env.make_task("train", index)
        prompt = await _check_task(env, task, index)
        console.print(Text(f"train {index} · {task.key[:12]} · {printable(prompt)}"), soft_wrap=True)
    report = await check_disjoint(env, n)
    for split in SPLITS:
        known = report.sizes[split]
        count = "endless" if known is None else str(known)
        seen = f"{report.distinct[split]} distinct in the first {report.compared[split]}"
        console.print(Text(f"{split}: {count} tasks, {seen}"))
    console.print(Text(f"ok: no task is in two splits among the first {n} of each", style="green"))
    await env.close()


async def _check_task(env: LoadedEnvironment, task: Task[Any], index: int) -> str:
    """Text of a task's prompt. Raises EnvironmentFault where it is not the same twice or does not survive storage."""
    if (await env.make_task("train", index)).key != task.key:
        raise EnvironmentFault(f"{env.name}.task gives another task for train {index} each time; make it deterministic")
    stored = json.loads(json.dumps(task.plain_data()))
    if (await env.task_from_data(stored, task.info)).key != task.key:
        raise EnvironmentFault(f"{env.name}: data of train {index} changes when it is stored and read back")
    ctx = Context(run_id="check", task_key=task.key, member=0, turn=0)
    first, second = await env.start(task, ctx), await env.start(task, ctx)
    await env.cleanup(task, first[1], ctx)
    await env.cleanup(task, second[1], ctx)
    if first[0] != second[0]:
        raise EnvironmentFault(
            f"{env.name}.prompt differs between two calls for train {index}; draw from ctx.rng or the task alone"
        )
    return " / ".join(content_of(message) for message in first[0])


def read_settings(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs as arguments; values are YAML, dots nest. Raises typer.BadParameter."""
    out: dict[str, Any] = {}
    for pair in pairs or []:
        path, separator, text = pair.partition("=")
        if not separator or not path:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value", param_hint="--set")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        *parents, last = path.split(".")
        here = out
        for parent in parents:
            here = here.setdefault(parent, {})
            if not isinstance(here, dict):
                raise typer.BadParameter(f"{parent!r} is given both a value and parts", param_hint="--set")
        here[last] = value
    return out


Ref = Annotated[str, typer.Argument(help="Entry point name, module:Class, or file.py[:Class].")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value of the environment's config; repeatable.")]


@app.command("try")
def try_command(
    ref: Ref,
    split: Annotated[Split, typer.Option(help="Which tasks.")] = Split.TRAIN,
    index: Annotated[int, typer.Option(min=0, max=MOST, help="Which task of the split.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed of ctx.rng and of the scripted policy.")] = 0,
    set_: Set = None,
    policy: Annotated[PolicyName | None, typer.Option(help="Who plays without an engine.")] = None,
    engine: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible server.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name there; default: the first it lists.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the engine's key.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of one completion.")] = 1024,
    turns: Annotated[int | None, typer.Option(min=1, max=MOST, help="Model calls at most.")] = None,
) -> None:
    """Play one episode in this terminal: no Temporal, no Postgres, no torch."""
    if engine is not None and policy is not None:
        _fail("give --engine or --policy, not both")
    if engine is None and model is not None:
        _fail("--model names a model of an engine; give --engine URL too")
    _run(
        env_try(
            ref,
            args=read_settings(set_),
            split=split.value,
            index=index,
            seed=seed,
            policy=policy,
            engine=engine,
            model=model,
            api_key=_api_key(api_key_env),
            temperature=temperature,
            max_tokens=max_tokens,
            turns=turns,
        )
    )


@app.command("check")
def check_command(
    ref: Ref,
    set_: Set = None,
    n: Annotated[
        int, typer.Option("-n", "--tasks", min=1, max=_MOST_COMPARED, help="Tasks of each split to compare.")
    ] = 256,
) -> None:
    """Load an environment, show what it is, and check what a run relies on."""
    _run(env_check(ref, args=read_settings(set_), n=n))


@app.command("list")
def list_command() -> None:
    """The installed environments."""
    env_list()


def _api_key(variable: str | None) -> str | None:
    """The key that the named variable holds. Refused where it holds none."""
    if variable is None:
        return None
    from ..settings import secret_from_environment

    key = secret_from_environment(variable)
    if key is None:
        _fail(f"the variable {variable} named by --api-key-env is not set")
    return key


def _run(work: Any) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        with _ctrl_c_at_once():
            asyncio.run(work)
    except (EnvironmentProblem, JudgeUnavailable, PolicyError) as problem:
        _fail(str(problem))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def _ctrl_c_at_once() -> Iterator[None]:
    """Let Ctrl-C end what runs in the loop, too: a person who is asked, a tool or step that never returns.

    A loop of its own would only cancel its main task, and that is noticed at the next `await`.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"atropos env: {printable(sentence)}", err=True)
    raise typer.Exit(1)
