"""`atropos sft-gen` and `atropos dpo-gen`: what runs have said, in files that TRL, Axolotl and `datasets` read.

Invariant: these only choose; which rows there are is said by the views `sft_examples` and `dpo_pairs`, and how a file
comes to be by `export_write`.
"""

import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from ..contracts.base import MOST
from .errors import CommandError
from .export_rows import Arguments, ExampleLayout, Images, PairLayout, Shape

_TIMES: Final = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S%z"]

Runs = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; all of the store unless given.")]
Out = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="FILE", help="File to write (FILE.parquet is Parquet), or - for standard output."
    ),
]
OfEnvironments = Annotated[list[str] | None, typer.Option("--environment", help="Only of this environment, or these.")]
Since = Annotated[
    datetime | None, typer.Option("--since", formats=_TIMES, metavar="TIME", help="Ended then or later; UTC.")
]
Until = Annotated[
    datetime | None, typer.Option("--until", formats=_TIMES, metavar="TIME", help="Ended before then; UTC.")
]
Oldest = Annotated[
    int | None,
    typer.Option("--min-version", min=0, max=MOST, help="Sampled by this policy version or newer ones alone."),
]
Newest = Annotated[
    int | None,
    typer.Option("--max-version", min=0, max=MOST, help="The oldest policy version it was sampled by, at most."),
]
Least = Annotated[float | None, typer.Option("--min-reward", help="Rewards from here on.")]
Most = Annotated[float | None, typer.Option("--max-reward", help="Rewards up to here.")]
Negative = Annotated[bool, typer.Option("--allow-negative-scores", help="Rewards of 0 and below, too.")]
Dedupe = Annotated[bool, typer.Option("--dedupe", help="Of rows that say the same, only the best.")]
Evaluations = Annotated[bool, typer.Option("--include-evaluations", help="Episodes of evaluations, too.")]
Scores = Annotated[
    str,
    typer.Option(
        "--scores",
        metavar="VERSION",
        help="Whose scores make the rewards: a version (see rescore), or the first or latest written of each.",
    ),
]
Test = Annotated[
    float,
    typer.Option(
        "--test",
        min=0,
        max=1,
        help="Share of tasks whose rows go to FILE-test instead; all groups of a task are on one side.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, max=MOST, help="Rows at most, drawn by the seed.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MOST, help="Of what --test and --limit draw.")]
ToolArguments = Annotated[
    Arguments, typer.Option("--tool-arguments", help="Arguments of tool calls: JSON in a string, or the object.")
]
WithImages = Annotated[
    Images, typer.Option("--images", help="Images: addresses inside the messages, or in a column `images`.")
]
Replace = Annotated[
    bool, typer.Option("--replace-surrogates", help="U+FFFD in place of lone surrogates, which `datasets` refuses.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


def sft_gen(
    runs: Runs = None,
    out: Out = "sft.jsonl",
    environment: OfEnvironments = None,
    since: Since = None,
    until: Until = None,
    min_version: Oldest = None,
    max_version: Newest = None,
    min_reward: Least = None,
    max_reward: Most = None,
    negative: Negative = False,
    top: Annotated[
        int | None, typer.Option("--top", min=1, max=MOST, help="The best of each group, at most so many.")
    ] = None,
    difference: Annotated[
        float,
        typer.Option("--min-difference", min=0, help="Between the highest and lowest reward of a group, at least."),
    ] = 0.0,
    layout: Annotated[
        ExampleLayout, typer.Option("--layout", help="Columns: the whole conversation, or its two parts.")
    ] = ExampleLayout.MESSAGES,
    dedupe: Dedupe = False,
    evaluations: Evaluations = False,
    scores: Scores = "first",
    test: Test = 0.0,
    limit: Limit = None,
    seed: Seed = 0,
    arguments: ToolArguments = Arguments.STRING,
    images: WithImages = Images.INLINE,
    replace_surrogates: Replace = False,
    force: Force = False,
) -> None:
    """Write scored episodes, each with its whole conversation, for supervised fine-tuning."""
    _export(
        "sft-gen",
        runs,
        out,
        Shape(layout, arguments, images, replace_surrogates),
        force,
        environments=environment,
        since=since,
        until=until,
        min_version=min_version,
        max_version=max_version,
        least=min_reward,
        most=max_reward,
        negative=negative,
        difference=difference,
        top=top,
        dedupe=dedupe,
        evaluations=evaluations,
        scores=scores,
        limit=limit,
        test=test,
        seed=seed,
    )


def dpo_gen(
    runs: Runs = None,
    out: Out = "dpo.jsonl",
    environment: OfEnvironments = None,
    since: Since = None,
    until: Until = None,
    min_version: Oldest = None,
    max_version: Newest = None,
    min_reward: Least = None,
    max_reward: Most = None,
    negative: Negative = False,
    pairs: Annotated[
        int | None, typer.Option("--pairs", min=1, max=MOST, help="Pairs of each group at most, farthest apart first.")
    ] = 1,
    difference: Annotated[
        float, typer.Option("--min-difference", min=0, help="Between the two rewards of a pair, at least.")
    ] = 0.0,
    layout: Annotated[
        PairLayout,
        typer.Option("--layout", help="The prompt in a column of its own, in both answers, or as Axolotl wants it."),
    ] = PairLayout.EXPLICIT,
    dedupe: Dedupe = False,
    evaluations: Evaluations = False,
    scores: Scores = "first",
    test: Test = 0.0,
    limit: Limit = None,
    seed: Seed = 0,
    arguments: ToolArguments = Arguments.STRING,
    images: WithImages = Images.INLINE,
    replace_surrogates: Replace = False,
    force: Force = False,
) -> None:
    """Write pairs of answers to the same prompt, the better one as chosen, for preference optimisation."""
    _export(
        "dpo-gen",
        runs,
        out,
        Shape(layout, arguments, images, replace_surrogates),
        force,
        environments=environment,
        since=since,
        until=until,
        min_version=min_version,
        max_version=max_version,
        least=min_reward,
        most=max_reward,
        negative=negative,
        difference=difference,
        top=pairs,
        one_message=layout is PairLayout.AXOLOTL,
        dedupe=dedupe,
        evaluations=evaluations,
        scores=scores,
        limit=limit,
        test=test,
        seed=seed,
    )


def sft_main() -> None:
    """Entry point of `atropos-sft-gen`."""
    _alone("sft-gen")


def dpo_main() -> None:
    """Entry point of `atropos-dpo-gen`."""
    _alone("dpo-gen")


def _export(command: str, runs: list[str] | None, out: str, shape: Shape, force: bool, **wanted: Any) -> None:
    from ..db.exports import Source, Wanted
    from .export_write import Request, export

    for name in ("since", "until"):
        if wanted[name] is not None and wanted[name].tzinfo is None:
            wanted[name] = wanted[name].replace(tzinfo=UTC)
    environments = wanted.pop("environments")
    source = Source.PAIRS if command == "dpo-gen" else Source.EXAMPLES
    chosen = Wanted(source, environments=tuple(sorted(environments)) if environments else None, **wanted)
    parquet = out.endswith(".parquet")
    if parquet and shape.arguments is Arguments.OBJECT:
        raise CommandError("A column of Parquet has one type: leave --tool-arguments out, or write JSON lines.")
    if out == "-" and chosen.test:
        raise CommandError("--test writes a second file beside the first; name a file with --out.")
    export(Request(command, runs, out, chosen, shape, parquet, force))


def _alone(command: str) -> None:
    """A command of `atropos` as a program of its own."""
    from .main import main

    sys.argv.insert(1, command)
    main()
