"""Groups stored whole, beside a bare binary COPY of the very same rows into the same tables: each commits once a group.

The rows of the bare COPY are those that the store wrote, read back in binary under another run's id. So constraints,
indexes and bytes are the same, and what differs is Python and the statements that number a group and keep it whole.
"""

import random
import statistics
import time
from typing import Any, Final

import psycopg
from atropos.contracts.episode import Score
from atropos.contracts.messages import assistant, user
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.contracts.records import NewGroup, TurnRecord, VersionSpan
from atropos.db.ingest import PlayedEpisode, store_group
from atropos.db.store import Store
from atropos.tests.db.samples import LABEL, new_run

MEMBERS: Final = 8
TOKENS: Final = 2048
_TABLES: Final = ("groups", "episodes", "segments", "turns", "scores")


def played(number: int, tokens: int = TOKENS) -> tuple[NewGroup, list[PlayedEpisode]]:
    """A group of episodes of one long turn each, of tokens that do not repeat."""
    rng = random.Random(number)
    episodes = []
    for member in range(MEMBERS):
        words = " ".join(rng.choice(("so", "then", "seven", "times", "hence", "minus")) for _ in range(tokens))
        turn = TurnRecord(
            turn=0, segment=0, opens_segment=True, message=assistant(words), prompt_delta=[7] * 64,
            sampled=[rng.randrange(150_000) for _ in range(tokens)],
            logprobs=[-rng.random() for _ in range(tokens)], mask=[1] * tokens, finish=FinishReason.STOP,
            spans=(VersionSpan("base", 0, 0, tokens),), temperature=1.0, engine_id="engine", incarnation="first",
            request_id=f"request-{number}-{member}",
        )  # fmt: skip
        scores = [Score(name="right", value=float(member % 2), weight=1.0, metric=False)]
        prompt = (user("What is it? " * 20),)
        episodes.append(PlayedEpisode(prompt, {}, "v1", [turn], [], StopReason.ANSWERED, scores, "v1"))
    return NewGroup(LABEL, "train", f"task-{number}", {"question": number}, {}, number, MEMBERS), episodes


async def measure(store: Store, database: str, groups: int, rounds: int) -> dict[str, float]:
    """`ingest_ratio`, and both rates in groups a second."""
    made = [played(number) for number in range(groups)]
    ratios, rates = [], []
    for number in range(rounds):
        run_id, other = await new_run(store), await new_run(store)
        began = time.perf_counter()
        for group, episodes in made:
            await store_group(store, run_id, group, episodes)
        ours = groups / (time.perf_counter() - began)
        bare = groups / _copy(database, run_id, other, groups)
        ratios.append(ours / bare)
        rates.append((ours, bare))
        print(f"round {number + 1}: stored {ours:6.1f} groups/s, bare COPY {bare:6.1f} groups/s", flush=True)
    return {
        "ingest_ratio": statistics.median(ratios),
        "ingest_groups_per_s": statistics.median(ours for ours, _ in rates),
    }


def _copy(database: str, run_id: str, other: str, groups: int) -> float:
    """Seconds that a bare COPY of a run's rows into another run takes. Both ids are equally long."""
    with psycopg.connect(database) as connection:
        connection.execute(
            "INSERT INTO tasks (run_id, environment, task_key, split, data, info)"
            " SELECT %s, environment, task_key, split, data, info FROM tasks WHERE run_id = %s",
            (other, run_id),
        )
        connection.commit()
        into = {table: _columns(connection, table) for table in _TABLES}
        read = [
            [_rows(connection, table, into[table], run_id, number, other) for table in _TABLES]
            for number in range(groups)
        ]
        connection.commit()
        began = time.perf_counter()
        for group in read:
            with connection.cursor() as cursor:
                for table, data in zip(_TABLES, group, strict=True):
                    with cursor.copy(f"COPY {table} ({into[table]}) FROM STDIN (FORMAT BINARY)".encode()) as copying:
                        copying.write(data)
            connection.commit()
        return time.perf_counter() - began


def _rows(
    connection: "psycopg.Connection[Any]", table: str, columns: str, run_id: str, group_no: int, other: str
) -> bytes:
    """A group's rows of a table as COPY sends them, as rows of the other run."""
    query = f"COPY (SELECT {columns} FROM {table} WHERE run_id = '{run_id}' AND group_no = {group_no}) TO STDOUT BINARY"
    with connection.cursor().copy(query.encode()) as copying:
        return b"".join(bytes(part) for part in copying).replace(run_id.encode(), other.encode())


def _columns(connection: "psycopg.Connection[Any]", table: str) -> str:
    """All columns but the order of writing, which the database gives."""
    query = (
        "SELECT string_agg(column_name, ', ' ORDER BY ordinal_position) FROM information_schema.columns"
        " WHERE table_name = %s AND column_name <> 'seq'"
    )
    row = connection.execute(query, (table,)).fetchone()
    return "" if row is None else str(row[0])
