"""What packing tokens is worth: turns as native arrays of Postgres against packed bytes, in one run.

Run: python -m atropos.benchmarks.token_storage [--url URL] [--turns N] [--tokens N]. Prints a table and, last, one JSON
line. A turn is its ids, log-probabilities and mask. Both tables have the product's checks as far as a type can express
them, both are written by the product's driver from Python lists (conversion included) in transactions of a group, both
are read back into lists; rounds alternate, so that whatever else the machine does weighs on both. Medians over rounds.
Without --url, a Postgres is started and stopped; with one, its tables are made in a schema that is dropped again.
"""

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
from atropos.db.encoding import pack_floats, pack_ids, pack_mask, unpack_floats, unpack_ids
from psycopg.types.numeric import Float4, Int4

GROUP: Final = 8
SCHEMA: Final = "token_storage"
VOCABULARY: Final = 151_936

_ALL_FINITE: Final = "encode(logprobs, 'hex') !~ '^(?:.{8})*.{4}[89a-f].[7f]f'"
_TABLES: Final = {
    "arrays": "ids int[] NOT NULL, logprobs real[] NOT NULL, mask boolean[] NOT NULL,"
    " CHECK (cardinality(logprobs) = cardinality(ids) AND cardinality(mask) = cardinality(ids)),"
    " CHECK (0 <= ALL (ids)), CHECK ('-Infinity' < ALL (logprobs) AND 'Infinity' > ALL (logprobs))",
    "bytes": "ids bytea NOT NULL, logprobs bytea NOT NULL, mask bytea NOT NULL,"
    " CHECK (octet_length(logprobs) = octet_length(ids) AND octet_length(mask) * 4 = octet_length(ids)),"
    f" CHECK (encode(ids, 'hex') !~ '^(?:.{{8}})*.{{6}}[89a-f]'), CHECK ({_ALL_FINITE}),"
    r" CHECK (btrim(mask, '\x0001') = '')",
}
_IN_SQL: Final = {
    "arrays": "SELECT sum(p) FROM arrays, unnest(logprobs) AS p",
    "bytes": "SELECT sum(p) FROM bytes, unnest(atropos_logprobs(logprobs)) AS p",
}

Turn = tuple[list[int], list[float], list[int]]


def _array_values(turn: Turn) -> list[Any]:
    ids, logprobs, mask = turn
    return [[Int4(one) for one in ids], [Float4(one) for one in logprobs], [bool(one) for one in mask]]


def _byte_values(turn: Turn) -> list[Any]:
    ids, logprobs, mask = turn
    return [pack_ids(ids), pack_floats(logprobs), pack_mask(mask)]


def _array_turn(row: Any) -> Turn:
    return row[0], row[1], [int(one) for one in row[2]]


def _byte_turn(row: Any) -> Turn:
    return unpack_ids(row[0]), unpack_floats(row[1]), list(row[2])


WRITERS: Final[dict[str, Callable[[Turn], list[Any]]]] = {"arrays": _array_values, "bytes": _byte_values}
READERS: Final[dict[str, Callable[[Any], Turn]]] = {"arrays": _array_turn, "bytes": _byte_turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a migrated database; default: one of a stack of our own")
    parser.add_argument("--turns", type=int, default=512, help="turns of a round")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with _database(options.url) as url, psycopg.connect(url) as connection:
        figures = measure(connection, options.turns, options.tokens, options.rounds)
    _print(figures)
    print(json.dumps({"bench": "token_storage", "turns": options.turns, "tokens": options.tokens} | figures))


def measure(connection: psycopg.Connection[Any], turns: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each way of storage: tokens a second written, read and read in SQL, and bytes a token on disk."""
    connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}")
    connection.execute(f"SET search_path = {SCHEMA}, public")
    for table, columns in _TABLES.items():
        connection.execute(f"CREATE TABLE {table} (n int PRIMARY KEY, {columns})".encode())
        for column in ("ids", "logprobs", "mask"):
            connection.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL".encode())
    connection.commit()
    found: dict[str, dict[str, list[float]]] = {table: {} for table in _TABLES}
    chance = random.Random(0)
    for number in range(rounds):
        given = [_turn(chance, tokens) for _ in range(turns)]
        for table in sorted(_TABLES, reverse=bool(number % 2)):
            for what, seconds in _round(connection, table, given, number * turns).items():
                found[table].setdefault(what, []).append(turns * tokens / seconds)
    figures = {
        table: {what: round(statistics.median(rates)) for what, rates in several.items()}
        | {"bytes_per_token": round(_size(connection, table) / (rounds * turns * tokens), 2)}
        for table, several in found.items()
    }
    connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
    connection.commit()
    return figures


def _turn(chance: random.Random, tokens: int) -> Turn:
    return (
        [chance.randrange(VOCABULARY) for _ in range(tokens)],
        [-chance.expovariate(2.0) for _ in range(tokens)],
        [1] * tokens,
    )


def _round(connection: psycopg.Connection[Any], table: str, given: list[Turn], first: int) -> dict[str, float]:
    """Seconds that each took."""
    statement = f"INSERT INTO {table} VALUES (%b, %b, %b, %b)".encode()
    began = time.perf_counter()
    for start in range(0, len(given), GROUP):
        for place, turn in enumerate(given[start : start + GROUP], first + start):
            connection.execute(statement, [Int4(place), *WRITERS[table](turn)], prepare=True)
        connection.commit()
    wrote = time.perf_counter()
    query = f"SELECT ids, logprobs, mask FROM {table} WHERE n >= %s ORDER BY n".encode()
    with connection.cursor(binary=True) as cursor:
        read = [READERS[table](row) for row in cursor.execute(query, [first])]
    took = time.perf_counter() - wrote
    assert [turn[0] for turn in read] == [turn[0] for turn in given]
    before = time.perf_counter()
    connection.execute(f"{_IN_SQL[table]} WHERE n >= %s".encode(), [first])
    asked = time.perf_counter() - before
    connection.commit()
    return {"written_per_s": wrote - began, "read_per_s": took, "read_in_sql_per_s": asked}


def _size(connection: psycopg.Connection[Any], table: str) -> int:
    row = connection.execute("SELECT pg_total_relation_size(%s::regclass)", [table]).fetchone()
    assert row is not None
    return int(row[0])


def _print(figures: dict[str, dict[str, float]]) -> None:
    names = list(figures["bytes"])
    print(f"{'':<8}" + "".join(f"{name:>20}" for name in names))
    for table, found in figures.items():
        print(f"{table:<8}" + "".join(f"{found[name]:>20,}" for name in names), flush=True)


@contextlib.contextmanager
def _database(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    from atropos.cli.stack.options import StackOptions
    from atropos.cli.stack.running import running_stack

    with (
        tempfile.TemporaryDirectory(prefix="atropos-tokens-") as folder,
        running_stack(Path(folder), StackOptions(temporal=False, workers=False)) as stack,
    ):
        assert stack.database_url is not None
        yield stack.database_url.get_secret_value()


if __name__ == "__main__":
    main()
