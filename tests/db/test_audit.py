"""The audit finds what contradicts the ledger, whatever let it in, and nothing else."""

from typing import Any

import psycopg
import pytest
from atropos.contracts.ids import weight_label
from atropos.db.audit import Audit, Violation, audit_run
from atropos.db.store import Store
from atropos.tests.db.ledger import ENGINE, MEMBERS, ledger

KEYS = [
    "groups", "episodes", "turns", "segments", "tool_calls", "scores", "batches", "batch_groups", "train_steps",
    "policy_versions",
]  # fmt: skip
"""Tables that lose their primary key."""


@pytest.fixture(scope="module")
def lawless(database_url: str) -> str:
    """A database whose schema forbids nothing that an audit looks for."""
    with psycopg.connect(database_url) as connection:
        constraints = connection.execute(
            "SELECT conrelid::regclass::text, conname FROM pg_constraint"
            " WHERE (contype = 'c' OR contype = 'p' AND conrelid::regclass::text = ANY(%s))"
            " AND connamespace = 'public'::regnamespace AND conrelid <> 0",
            (KEYS,),
        ).fetchall()
        for table, name in constraints:
            connection.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}" CASCADE')
        indexes = connection.execute(
            "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indrelid"
            " WHERE indisunique AND NOT indisprimary AND relnamespace = 'public'::regnamespace"
        ).fetchall()
        connection.execute(f"DROP INDEX {', '.join(name for (name,) in indexes)}".encode())
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
        "calls": 9,
        "scores": 36,
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
OF_GROUP = "UPDATE groups SET {} WHERE run_id = ':run' AND group_no = {}"
RUN = "UPDATE runs SET {} WHERE run_id = ':run'"
ANSWERED = "UPDATE episodes SET {} WHERE run_id = ':run' AND group_no = 8 AND member = 0"
STEPPED = "UPDATE episodes SET {} WHERE run_id = ':run' AND group_no = 8 AND member = 1"
LOST = "UPDATE episodes SET {} WHERE run_id = ':run' AND group_no = 5 AND member = 0"
LAST_TURN = "UPDATE turns SET {} WHERE run_id = ':run' AND group_no = 8 AND member = 0"
SCORE = "UPDATE scores SET {} WHERE run_id = ':run' AND group_no = 8 AND member = 1 AND name = 'right'"
COPY = (
    "INSERT INTO {0} SELECT (jsonb_populate_record(NULL::{0}, to_jsonb(o) || '{2}')).* FROM {0} o"
    " WHERE run_id = ':run' AND {1}"
)
"""Insert a row of a table once more, with these columns changed."""
MEMBER_0 = "group_no = 8 AND member = 0"
MEMBER_1 = "group_no = 8 AND member = 1"
NOBODY = (
    '{"group_no": 77, "state": "failed", "stop": "failed", "failure": "engine", "reward": null, "turns": 0,'
    ' "sampled_tokens": 0, "policy_version": null}'
)


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
        pytest.param([OF_GROUP.format("failure = NULL", 5)], [("group_state", "group 5")], id="failed without a kind"),
        pytest.param(
            [OF_GROUP.format("failure = 'gremlins'", 5)], [("group_state", "group 5")], id="failed of an unknown kind"
        ),
        pytest.param([OF_GROUP.format("failure = 'engine'", 8)], [("group_state", "group 8")], id="sealed with a kind"),
        pytest.param([GROUP.format("lost", 8)], [("group_state", "group 8")], id="in no state of ours"),
        pytest.param([OF_GROUP.format("closed_at = NULL", 8)], [("group_state", "group 8")], id="sealed and open"),
        pytest.param([RUN.format("next_group_no = 10")], [("group_numbers", "group 9")], id="admitted without a row"),
        pytest.param([RUN.format("next_group_no = 8")], [("group_numbers", "group 8")], id="a row nobody admitted"),
        pytest.param(
            [OF_GROUP.format("sampled_tokens = 7", 8)], [("group_totals", "group 8")], id="a group counts other tokens"
        ),
        pytest.param(
            [ANSWERED.format("state = 'running', stop = NULL, ended_at = NULL, reward = NULL")],
            [("group_ended", "episode 8/0/0")],
            id="runs in a closed group",
        ),
        pytest.param([ANSWERED.format("ended_at = NULL")], [("episode_ending", "episode 8/0/0")], id="done, not ended"),
        pytest.param([ANSWERED.format("stop = NULL")], [("episode_ending", "episode 8/0/0")], id="done without a stop"),
        pytest.param([ANSWERED.format("stop = 'failed'")], [("episode_ending", "episode 8/0/0")], id="done as failed"),
        pytest.param(
            [ANSWERED.format("failure = 'engine'")], [("episode_ending", "episode 8/0/0")], id="done by an outage"
        ),
        pytest.param([ANSWERED.format("failure = 'judge'")], [], id="done without its judge"),
        pytest.param([LOST.format("failure = NULL")], [("episode_ending", "episode 5/0/0")], id="lost without a kind"),
        pytest.param([LOST.format("failure = 'policy'")], [("episode_ending", "episode 5/0/0")], id="lost by policy"),
        pytest.param([LOST.format("reward = 0")], [("episode_ending", "episode 5/0/0")], id="lost with a reward"),
        pytest.param([LOST.format("state = 'gone'")], [("episode_ending", "episode 5/0/0")], id="an unknown state"),
        pytest.param([ANSWERED.format("stop = 'length'")], [("episode_stop", "episode 8/0/0")], id="not cut"),
        pytest.param([LAST_TURN.format("finish = 'length'")], [("episode_stop", "episode 8/0/0")], id="cut"),
        pytest.param([ANSWERED.format("stop = 'done'")], [("episode_stop", "episode 8/0/0")], id="no step ended it"),
        pytest.param([STEPPED.format("stop = 'truncated'")], [("episode_stop", "episode 8/1/0")], id="not truncated"),
        pytest.param([STEPPED.format("stop = 'answered'")], [("episode_stop", "episode 8/1/0")], id="was answered"),
        pytest.param([ANSWERED.format("turns = 2")], [("episode_counts", "episode 8/0/0")], id="counts other turns"),
        pytest.param(
            [ANSWERED.format("sampled_tokens = 4"), OF_GROUP.format("sampled_tokens = 7", 8)],
            [("episode_counts", "episode 8/0/0")],
            id="counts other tokens",
        ),
        pytest.param(
            [ANSWERED.format("policy_version = 0")], [("episode_counts", "episode 8/0/0")], id="of another version"
        ),
        pytest.param(
            [
                LAST_TURN.format("turn = 1"),
                "UPDATE segments SET first_turn = 1 WHERE run_id = ':run' AND " + MEMBER_0,
            ],
            [("episode_counts", "episode 8/0/0")],
            id="a turn is left out",
        ),
        pytest.param([STEPPED.format("reward = 0.5")], [("episode_reward", "episode 8/1/0")], id="another reward"),
        pytest.param([STEPPED.format("reward = NULL")], [("episode_reward", "episode 8/1/0")], id="unscored"),
        pytest.param([SCORE.format("value = NULL")], [("episode_reward", "episode 8/1/0")], id="a part is unscored"),
        pytest.param([SCORE.format("weight = 2")], [("episode_reward", "episode 8/1/0")], id="a part weighs more"),
        pytest.param(
            [COPY.format("scores", MEMBER_1 + " AND name = 'right'", '{"name": "new", "seq": 900000}')],
            [],
            id="scored again after its group had closed",
        ),
        pytest.param(
            [
                COPY.format(
                    "scores", MEMBER_1 + " AND name = 'right'", '{"scorer_version": "v2", "value": 9, "seq": 900000}'
                )
            ],
            [],
            id="scored by a later version",
        ),
        pytest.param([COPY.format("turns", MEMBER_1, "{}")], [("no_key_twice", "turn 8/1/0/0")], id="a turn twice"),
        pytest.param(
            [COPY.format("tool_calls", MEMBER_1, "{}")], [("no_key_twice", "call 8/1/0/0/-1")], id="a call twice"
        ),
        pytest.param(
            [COPY.format("scores", MEMBER_1 + " AND name = 'right'", "{}")],
            [("no_key_twice", "score 8/1/0/right/v1")],
            id="a score twice",
        ),
        pytest.param(
            [COPY.format("episodes", MEMBER_1, "{}")], [("no_key_twice", "episode 8/1/0")], id="an episode twice"
        ),
        pytest.param(
            [COPY.format("segments", MEMBER_1, "{}")], [("no_key_twice", "segment 8/1/0/0")], id="a segment twice"
        ),
        pytest.param([COPY.format("groups", "group_no = 8", "{}")], [("no_key_twice", "group 8")], id="a group twice"),
        pytest.param([COPY.format("batches", "batch_no = 1", "{}")], [("no_key_twice", "batch 1")], id="a batch twice"),
        pytest.param(
            [COPY.format("batch_groups", "group_no = 2", "{}")], [("no_key_twice", "member 1/2")], id="a member twice"
        ),
        pytest.param([COPY.format("train_steps", "step = 1", "{}")], [("no_key_twice", "step 1")], id="a step twice"),
        pytest.param(
            [COPY.format("policy_versions", "version = 1", "{}")],
            [("no_key_twice", "version 1")],
            id="a version twice",
        ),
        pytest.param(
            [COPY.format("turns", MEMBER_0, '{"attempt": 7}')], [("no_orphans", "turn 8/0/7/0")], id="a turn of nobody"
        ),
        pytest.param(
            ["DELETE FROM segments WHERE run_id = ':run' AND " + MEMBER_0],
            [("no_orphans", "turn 8/0/0/0")],
            id="a turn of no segment",
        ),
        pytest.param(
            [COPY.format("tool_calls", MEMBER_1, '{"turn": 5}')],
            [("no_orphans", "call 8/1/0/5/-1")],
            id="a call of no turn",
        ),
        pytest.param(
            [COPY.format("scores", MEMBER_1 + " AND name = 'right'", '{"member": 7}')],
            [("no_orphans", "score 8/7/0/right/v1")],
            id="a score of nobody",
        ),
        pytest.param(
            [COPY.format("episodes", MEMBER_1, NOBODY)], [("no_orphans", "episode 77/1/0")], id="an episode of no group"
        ),
        pytest.param(
            ["INSERT INTO batch_groups VALUES (':run', 1, 99)", STEP.format("groups = 3")],
            [("no_orphans", "member 1/99")],
            id="a group that does not exist was trained",
        ),
        pytest.param(
            [LAST_TURN.format("policy_version = 0"), ANSWERED.format("policy_version = 0")],
            [("turn_version", "turn 8/0/0/0")],
            id="names another version than its spans",
        ),
        pytest.param(
            [LAST_TURN.format(r"sampled = sampled || '\x00'")], [("lengths", "turn 8/0/0/0")], id="half an id"
        ),
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
