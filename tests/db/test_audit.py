"""The audit finds what contradicts the ledger, whatever let it in, and nothing else."""

from typing import Any

import psycopg
import pytest
from atropos.contracts.ids import weight_label
from atropos.db.audit import Audit, Violation, audit_run
from atropos.db.store import Store
from atropos.tests.db.ledger import ENGINE, MEMBERS, ledger


@pytest.fixture(scope="module")
def lawless(database_url: str) -> str:
    """A database whose schema forbids nothing that an audit looks for."""
    with psycopg.connect(database_url) as connection:
        checks = connection.execute(
            "SELECT conrelid::regclass::text, conname FROM pg_constraint"
            " WHERE contype = 'c' AND connamespace = 'public'::regnamespace AND conrelid <> 0"
        ).fetchall()
        for table, name in checks:
            connection.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
        connection.execute("DROP INDEX uq_batch_groups_live, uq_batches_step")
    return database_url


async def damaged(store: Store, database: str, *statements: str) -> Audit:
    """What the audit says of a ledger after these; `:run`, `:engine` and `:label` stand for its own."""
    run_id = await ledger(store)
    named = {":run": run_id, ":engine": ENGINE, ":label": weight_label(run_id, 0)}
    with psycopg.connect(database) as connection:
        connection.execute("SET session_replication_role = replica")
        for statement in statements:
            for name, value in named.items():
                statement = statement.replace(name, value)
            assert connection.execute(statement.encode()).rowcount == 1, statement
    return await audit_run(store, run_id)


async def test_a_sound_ledger_has_no_violation(store: Store) -> None:
    found = await audit_run(store, await ledger(store))
    assert found.violations == ()
    assert found.checked == {
        "groups": 9,
        "episodes": 18,
        "batches": 3,
        "steps": 2,
        "turns": 18,
        "calls": 0,
        "scores": 0,
        "spans": 16,
    }


GROUP = "UPDATE groups SET state = '{}' WHERE run_id = ':run' AND group_no = {}"
STEP = "UPDATE train_steps SET {} WHERE run_id = ':run' AND step = 1"
BATCH = "UPDATE batches SET {} WHERE run_id = ':run' AND batch_no = 1"
TURN = "UPDATE turns SET {} WHERE run_id = ':run' AND group_no = 2 AND member = 1"
VERSION = "UPDATE policy_versions SET {} WHERE run_id = ':run' AND version = 2"
FIRST_TURN = "UPDATE turns SET {} WHERE run_id = ':run' AND group_no = 0 AND member = 0"
PUBLICATION = "UPDATE publications SET {} WHERE run_id = ':run' AND version = 0"
SAMPLED_BY_0 = [("published", f"turn {group}/{member}/0/0") for group in (0, 1) for member in range(MEMBERS)]


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        pytest.param([GROUP.format("running", 8)], [("group_state", "group 8")], id="closed and running"),
        pytest.param([GROUP.format("sealed", 6)], [("group_state", "group 6")], id="sealed and in a leased batch"),
        pytest.param([GROUP.format("leased", 8)], [("group_state", "group 8")], id="leased by no batch"),
        pytest.param([GROUP.format("trained", 4)], [("trained_once", "group 4")], id="trained by no batch"),
        pytest.param([GROUP.format("sealed", 3)], [("trained_once", "group 3")], id="in a committed batch, untrained"),
        pytest.param(
            ["INSERT INTO batch_groups VALUES (':run', 1, 0)", STEP.format("groups = 3")],
            [("never_twice", "group 0")],
            id="in two committed batches",
        ),
        pytest.param(
            [STEP.format("step = 2, version = 3"), BATCH.format("step = 2"), VERSION.format("version = 3")],
            [("steps", "step 2")],
            id="a step is left out",
        ),
        pytest.param([STEP.format("version = 1")], [("steps", "step 1")], id="a step made another version"),
        pytest.param(
            ["DELETE FROM policy_versions WHERE run_id = ':run' AND version = 2"],
            [("steps", "step 1")],
            id="a step's version is gone",
        ),
        pytest.param([STEP.format("groups = 1")], [("batches", "batch 1")], id="a step counts other groups"),
        pytest.param([BATCH.format("step = 7")], [("batches", "batch 1")], id="a batch of another step"),
        pytest.param(
            ["DELETE FROM train_steps WHERE run_id = ':run' AND step = 1"],
            [("batches", "batch 1")],
            id="committed without a step",
        ),
        pytest.param(
            ["UPDATE batch_groups SET live = false WHERE run_id = ':run' AND group_no = 2"],
            [("batches", "batch 1")],
            id="a group left its batch",
        ),
        pytest.param([TURN.format("provisional = true")], [("provisional", "turn 2/1/0/0")], id="counts unconfirmed"),
        pytest.param([FIRST_TURN.format("seq = 0")], [("published", "turn 0/0/0/0")], id="sampled before publication"),
        pytest.param([TURN.format("incarnation = 'second'")], [("published", "turn 2/1/0/0")], id="by another life"),
        pytest.param(
            [FIRST_TURN.format("""spans = '[[":label", 0, 0, 1], [":label", 0, 1, 3, ":engine", "second"]]'""")],
            [("published", "turn 0/0/0/0")],
            id="a part by another life",
        ),
        pytest.param([TURN.format("""spans = '[["x", 1, 0, 3]]'""")], [("published", "turn 2/1/0/0")], id="misnamed"),
        pytest.param([PUBLICATION.format("proved = false")], SAMPLED_BY_0, id="never proved"),
        pytest.param([PUBLICATION.format("first_seq = nextval('turns_seq')")], SAMPLED_BY_0, id="loaded after it"),
        pytest.param(
            [PUBLICATION.format("state = 'failed', seq = nextval('turns_seq')")],
            [],
            id="proved, and loaded again since",
        ),
        pytest.param([TURN.format(r"logprobs = '\x00000000'")], [("lengths", "turn 2/1/0/0")], id="short logprobs"),
        pytest.param([TURN.format(r"mask = '\x01010101'")], [("lengths", "turn 2/1/0/0")], id="long mask"),
        pytest.param(
            [FIRST_TURN.format("""spans = '[[":label", 0, 0, 2]]'""")], [("lengths", "turn 0/0/0/0")], id="short span"
        ),
        pytest.param(
            [FIRST_TURN.format("""spans = '[[":label", 0, 0, 1], [":label", 0, 2, 3]]'""")],
            [("lengths", "turn 0/0/0/0")],
            id="a gap between spans",
        ),
    ],
)
async def test_what_contradicts_the_ledger_is_named(
    store: Store, lawless: str, statements: list[str], expected: list[tuple[str, str]]
) -> None:
    found = await damaged(store, lawless, *statements)
    assert found.violations == tuple(Violation(*one) for one in expected)


async def test_an_abandoned_batch_keeps_no_group(store: Store, lawless: str) -> None:
    abandoned = "UPDATE batches SET state = 'abandoned' WHERE run_id = ':run' AND batch_no = 2"
    found = await damaged(store, lawless, abandoned)
    expected: Any = [("batches", "batch 2"), ("group_state", "group 6"), ("group_state", "group 7")]
    assert sorted((one.check, one.row) for one in found.violations) == expected
