"""The tiny policy of the demo: made once on this machine, then found by its content.

Invariant: a folder `<home>/policy/<key>` exists only complete. It is made under a hidden name, every file is synced,
and a rename publishes it; a creation that is killed leaves only the hidden folder, which the next one removes. One
process makes it, others that want the same one wait for it and find it. The key covers the recipe's source, its
settings and its demonstrations, so a changed recipe makes another policy and never alters one that a run already uses.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..contracts.base import MOST
from ..settings import SettingsError, load_settings
from .policy_recipe import Recipe

if TYPE_CHECKING:
    from ..trainer.cold_start import Progress as Step

_TYPICAL_STEPS: Final = 250
"""For the length of the progress bar only."""
_THREADS: Final = 1
"""So the weights do not depend on the number of cores. A second thread halves the time on an idle machine, but on a
busy one it waits for a core at every operation, which took seven times longer."""


class PolicyError(Exception):
    """The tiny policy cannot be made; one sentence with what to do."""


@dataclass(frozen=True)
class PolicyProgress:
    """`done`: 0 to 1, an estimate. `reward`: the last measured one."""

    done: float
    reward: float | None = None


def ensure_policy(
    home: Path,
    seed: int = 0,
    progress: Callable[[PolicyProgress], None] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of the tiny policy, made on first use in about a minute of one core.

    It holds weights (safetensors), tokenizer, `renderer.json`, and `policy.json` that says how it came out. `settings`
    overrides fields of ColdStartSettings. Blocks, and runs a loop of its own: from async code, call it in a thread.
    Raises PolicyError.
    """
    with closing(Recipe(seed, settings or {})) as recipe:
        folder = home.expanduser().absolute() / "policy" / recipe.key
        if folder.is_dir():
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder.parent / f".{recipe.key}.lock"):
                if not folder.is_dir():
                    _make(recipe, folder, progress)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PolicyError(
                f"the tiny policy cannot be written to {folder.parent} ({reason}); set ATROPOS_HOME elsewhere"
            ) from error
    return folder


def ensure_policy_shown(home: Path, seed: int = 0, console: Console | None = None) -> Path:
    """`ensure_policy` with a progress bar on stderr; nothing is shown where the policy exists already."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bar:
        row = bar.add_task("making the tiny policy", total=1.0, visible=False)

        def report(progress: PolicyProgress) -> None:
            reward = "" if progress.reward is None else f" (reward {progress.reward:.2f})"
            bar.update(row, description=f"making the tiny policy{reward}", completed=progress.done, visible=True)

        return ensure_policy(home, seed, report)


app = typer.Typer(help="Model folders: the tiny policy, and tied embeddings.", no_args_is_help=True)


@app.command("make")
def make(
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed of demonstrations and weights.")] = 0,
    home: Annotated[Path | None, typer.Option(help="State folder; default: ATROPOS_HOME.")] = None,
) -> None:
    """Make the tiny policy, or find it, and print its folder."""
    try:
        folder = ensure_policy_shown(home or load_settings().home, seed)
    except (PolicyError, SettingsError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(str(folder))


@app.command("untie")
def untie(folder: Annotated[Path, typer.Argument(help="Folder of a model with tied embeddings.")]) -> None:
    """Write the head of a tied model into its folder, so that vLLM can serve it untied and take in new weights.

    The policy stays tied. For a vLLM on a CPU that is quarantined because it goes on with the head it began with.
    """
    from ..trainer.heads import write_head
    from ..trainer.problem import TrainerProblem

    try:
        head = write_head(folder)
    except TrainerProblem as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"Wrote {head}. Start vLLM with --hf-overrides '{{\"tie_word_embeddings\": false}}'.")


def _make(recipe: Recipe, folder: Path, progress: Callable[[PolicyProgress], None] | None) -> None:
    """Make the policy in a hidden folder and rename it into place. The caller holds the lock of its key."""
    hidden = f".making-{folder.name}-"
    for left in folder.parent.glob(f"{hidden}*"):
        shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=hidden, dir=folder.parent))
    making.chmod(0o755)

    def report(step: "Step") -> None:
        if progress is not None:
            progress(PolicyProgress(min(0.95, step.step / _TYPICAL_STEPS), step.reward))

    if progress is not None:
        progress(PolicyProgress(0.0))
    try:
        result = _trained(recipe, making, report)
        facts = {"seed": recipe.seed, "steps": result.step, "reward": result.reward, "loss": result.loss}
        (making / "policy.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        for file in making.iterdir():
            _sync(file)
        _sync(making)
        making.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _trained(recipe: Recipe, folder: Path, report: "Callable[[Step], None]") -> Any:
    try:
        from ..trainer.cold_start import ColdStartFailed
    except ImportError as error:
        raise PolicyError(f'the tiny policy needs torch ({error}); pip install "atropos-durable[engine]"') from error
    try:
        return recipe.make(folder, _THREADS, report)
    except ColdStartFailed as error:
        raise PolicyError(str(error)) from error


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel frees it however its holder ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
