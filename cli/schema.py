"""`python -m atropos.cli.schema`: write docs/schema.md, the tables and views as a migrated database describes them.

Invariant: the page is a function of the schema alone. What stands in it is asked of Postgres' catalogues, in words that
Postgres 15 to 18 spell alike, so a test can demand that the committed page is what any of them says.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer
from psycopg.rows import dict_row

from .reference import CHECK, FOLDER, write_pages

_HEAD: Final = """\
<!-- Written by `python -m atropos.cli.schema`: change the migrations instead. -->

# Schema

What the database says of itself: each table and view, each column, and what a row must be. [Data](data.md) shows how to
ask; [Architecture](architecture.md) why it is so. `run_id` leads every primary key, so that big tables can be
partitioned by run.

What has no table of its own: comparisons of answers by a judge or a person are `scores` of the episodes compared (and
pairs are `dpo_pairs`, a view), messages are columns of the turn or call that said them, and images stand in their
messages. What stands beside its subject for good reason: `partial_turns` is what was sampled so far of a call that is
not whole, kept out of `turns` so that a turn is written once; `publications` says which version was given to which life
of which engine.

Token columns are packed little-endian (`int32` ids, `float32` log-probabilities, `uint8` masks) and not compressed; the
functions below read them, and [Data](data.md#tokens) says what packing is worth.
"""

_TABLES: Final = """
SELECT c.oid, c.relname AS name, c.relkind::text AS kind, obj_description(c.oid) AS comment
FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')
  AND c.relname <> 'alembic_version' ORDER BY c.relname
"""
_COLUMNS: Final = """
SELECT a.attrelid AS oid, a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS needed,
  pg_get_expr(d.adbin, d.adrelid) AS standard, col_description(a.attrelid, a.attnum) AS comment
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attrelid, a.attnum
"""
_RULES: Final = """
SELECT conrelid AS oid, contype::text AS kind, conname AS name, pg_get_constraintdef(oid) AS definition
FROM pg_constraint WHERE conrelid = ANY(%s) AND contype IN ('p', 'f', 'c')
ORDER BY conrelid, position(contype IN 'pfc'), conname
"""
_INDEXES: Final = """
SELECT i.indrelid AS oid, c.relname AS name, i.indisunique AS once,
  regexp_replace(pg_get_indexdef(i.indexrelid), '^.* USING btree ', '') AS definition
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = ANY(%s) AND NOT i.indisprimary ORDER BY i.indrelid, c.relname
"""
_FUNCTIONS: Final = """
SELECT proname AS name, pg_get_function_arguments(oid) AS arguments, pg_get_function_result(oid) AS result,
  obj_description(oid) AS comment
FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY proname
"""

Row = Mapping[str, Any]


def schema_page(url: str) -> str:
    """docs/schema.md, of the database at `url`."""
    with psycopg.connect(url, row_factory=dict_row) as connection:
        tables = connection.execute(_TABLES).fetchall()
        oids = ([table["oid"] for table in tables],)
        columns, rules, indexes = (
            _by_table(connection.execute(query, oids).fetchall()) for query in (_COLUMNS, _RULES, _INDEXES)
        )
        functions = connection.execute(_FUNCTIONS).fetchall()
    lines = [_HEAD]
    for kind, title in (("r", "Tables"), ("v", "Views")):
        chosen = [table for table in tables if table["kind"] == kind]
        links = ", ".join(f"[`{table['name']}`](#{table['name']})" for table in chosen)
        lines += [f"## {title}\n", f"{links}.\n"]
        for table in chosen:
            lines += _table(table, columns[table["oid"]], rules.get(table["oid"], []), indexes.get(table["oid"], []))
    lines += ["## Functions\n", "| function | what it returns |\n|---|---|"]
    lines += [f"| `{one['name']}({one['arguments']})` → `{one['result']}` | {one['comment']} |" for one in functions]
    return "\n".join(lines).rstrip() + "\n"


def _by_table(rows: list[dict[str, Any]]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["oid"], []).append(row)
    return found


def _table(table: Row, columns: list[Row], rules: list[Row], indexes: list[Row]) -> Iterator[str]:
    yield f"### `{table['name']}`\n\n{table['comment']}.\n"
    plain = table["kind"] == "v"
    yield (
        "| column | type | meaning |\n|---|---|---|"
        if plain
        else "| column | type | default | meaning |\n|---|---|---|---|"
    )
    for one in columns:
        kind = f"{one['type']}{'' if plain or one['needed'] else ', may be NULL'}"
        standard = "" if plain else f" {_code(one['standard'])} |"
        yield f"| `{one['name']}` | {kind} |{standard} {_cell(one['comment'] or '')} |"
    yield ""
    for rule in rules:
        yield f"- {_code(rule['definition'])}"
    for index in indexes:
        yield f"- {'Unique' if index['once'] else 'Index'} `{index['name']}` {_code(index['definition'])}"
    if rules or indexes:
        yield ""


def _code(text: str | None) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


@contextmanager
def _database(url: str | None) -> Iterator[str]:
    """The database that was named, or one of a stack of our own for the while."""
    if url is not None:
        yield url
        return
    from .stack.options import StackOptions
    from .stack.running import running_stack

    with (
        tempfile.TemporaryDirectory(prefix="atropos-schema-") as folder,
        running_stack(Path(folder), StackOptions(temporal=False, workers=False)) as stack,
    ):
        assert stack.database_url is not None
        yield stack.database_url.get_secret_value()


def main(
    check: Annotated[bool, CHECK] = False,
    folder: Annotated[Path | None, FOLDER] = None,
    url: Annotated[str | None, typer.Option(help="A migrated database; default: one made for the while.")] = None,
) -> None:
    """Write docs/schema.md from a migrated database."""
    with _database(url) as address:
        page = schema_page(address)
    write_pages({"schema.md": page}, check, folder, "atropos.cli.schema")


if __name__ == "__main__":
    typer.run(main)
