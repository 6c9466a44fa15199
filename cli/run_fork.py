"""`atropos run fork`: a new run that begins with the weights of a version of another one.

Invariant: a fork is an ordinary run with an ordinary run file; what it begins with is named there as a folder, and it
takes a copy of that folder before its first step. The run it comes from is not touched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.runfile import RunConfig, RunFileError, parse_run
from .documents import with_change, with_engines
from .errors import CommandError

if TYPE_CHECKING:
    from ..db.runs import RunRow
    from ..db.store import Store


async def forked(
    store: "Store", row: "RunRow", version: int | None, changes: Sequence[str], engines: Sequence[str]
) -> RunConfig:
    """The run file of a fork. Raises CommandError where the version has no weights to begin with any more."""
    from ..db.engines import version_paths

    if not row.config.trains:
        raise CommandError(f"{row.run_id} trains nothing, so it has no versions to fork from.")
    paths = await version_paths(store, row.run_id)
    if not paths:
        raise CommandError(f"{row.run_id} has no version yet; `atropos run why {row.run_id}` says what it waits for.")
    chosen = max(paths) if version is None else version
    there = sorted(number for number, path in paths.items() if path is not None and Path(path).is_dir())
    if chosen not in there:
        kept = ", ".join(map(str, there)) or "none"
        raise CommandError(
            f"{row.run_id} has no weights of version {chosen} on this machine (kept: {kept}); choose one of those with "
            "--from-version, or keep more with trainer.checkpoint.keep."
        )
    document: dict[str, Any] = row.config.model_dump(mode="json", exclude_defaults=True)
    if chosen > 0 or row.config.model.init_from is not None:
        document["model"]["init_from"] = paths[chosen]
    document = with_engines(document, engines)
    try:
        for change in changes:
            document = with_change(document, change)
        return parse_run(document)
    except RunFileError as error:
        raise CommandError("; ".join(error.problems)) from None
