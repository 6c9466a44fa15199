"""Supervised examples and preference pairs, streamed out of their views.

Invariant: what is exported is what the views say, filtered by columns of theirs and in the order of its keys, read in
one snapshot through a cursor on the server: an export of any size takes little memory, and disturbs no live run. Each
row names what it came from.
"""

from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any, Final

from psycopg.rows import dict_row

from .store import Store

_PAGE: Final = 200
"""Rows fetched at once."""

_FILTERS: Final = (
    "(%(runs)s::text[] IS NULL OR run_id = ANY(%(runs)s)) AND (%(environment)s::text IS NULL OR"
    " environment = %(environment)s) AND (%(top)s::int IS NULL OR rank_in_group <= %(top)s)"
)

_SFT: Final = f"""
SELECT messages, prompt, completion, reward, run_id, group_no, member, attempt, environment, environment_version, split,
  task_key, rank_in_group::int, policy_version, lossy
FROM sft_examples WHERE {_FILTERS}
  AND (%(least)s::float8 IS NULL OR reward >= %(least)s) AND (%(negative)s OR reward > 0)
  AND reward_spread >= %(difference)s
ORDER BY run_id, group_no, member, attempt LIMIT %(limit)s
"""

_DPO: Final = f"""
SELECT prompt, chosen, rejected, chosen_reward, rejected_reward, run_id, group_no, chosen_member, chosen_attempt,
  rejected_member, rejected_attempt, environment, environment_version, split, task_key, rank_in_group::int,
  chosen_version, rejected_version, lossy
FROM dpo_pairs WHERE {_FILTERS}
  AND (%(least)s::float8 IS NULL OR chosen_reward >= %(least)s) AND (%(negative)s OR chosen_reward > 0)
  AND reward_difference >= %(difference)s
ORDER BY run_id, group_no, rank_in_group LIMIT %(limit)s
"""


@dataclass(frozen=True)
class Wanted:
    """Which rows. None: any."""

    runs: tuple[str, ...] | None = None
    environment: str | None = None
    least: float | None = None
    """Reward of an example, or of the better one of a pair, at least."""
    negative: bool = False
    """Rewards of 0 and below, too."""
    difference: float = 0.0
    """Of an example's group: highest and lowest reward; of a pair: its two rewards; at least."""
    top: int | None = None
    """Examples, or pairs, of a group at most: the best, or the farthest apart."""
    limit: int | None = None
    """Rows at most."""

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "runs": None if self.runs is None else list(self.runs)}


def sft_examples(store: Store, wanted: Wanted) -> AsyncGenerator[dict[str, Any]]:
    """Rows of `sft_examples`: `messages` is the whole conversation, `prompt` + `completion` its two parts."""
    return _stream(store, _SFT, wanted)


def dpo_pairs(store: Store, wanted: Wanted) -> AsyncGenerator[dict[str, Any]]:
    """Rows of `dpo_pairs`: messages of the `prompt` both answered, and what `chosen` and `rejected` said after it."""
    return _stream(store, _DPO, wanted)


async def _stream(store: Store, query: str, wanted: Wanted) -> AsyncGenerator[dict[str, Any]]:
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        async with connection.cursor(name="export", row_factory=dict_row) as cursor:
            cursor.itersize = _PAGE
            await cursor.execute(query, wanted.values())
            async for row in cursor:
                yield row
