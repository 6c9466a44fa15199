"""A run of very many episodes, written by the database itself: what pages have to cope with."""

from typing import Any, Final

import psycopg
from atropos.db.store import Store

from ..db.samples import LABEL, mixture, run_config

MEMBERS: Final = 8
TOKENS: Final = 64
GROUPS_A_STEP: Final = 64
_SECONDS_A_GROUP: Final = 0.5

_STATEMENTS: Final = (
    """INSERT INTO tasks (run_id, environment, task_key, split, data, info)
    SELECT %(run)s, %(label)s, 'task-' || g, 'train', jsonb_build_object('question', g), '{}'
    FROM generate_series(0, %(groups)s - 1) g""",
    """INSERT INTO policy_versions (run_id, version, label, path)
    SELECT %(run)s, v, %(run)s || '@' || v, '/checkpoints/' || v FROM generate_series(0, %(steps)s) v""",
    """INSERT INTO batches (run_id, batch_no, step, state, fence, reward_mean, rewards, filtered, stale, ended_at)
    SELECT %(run)s, s, s, 'committed', 1, 0.5, %(a_step)s * %(members)s, 0, 0, now()
    FROM generate_series(0, %(steps)s - 1) s""",
    """INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid, mean_reward,
      sampled_tokens, oldest_version, admitted_at, started_at, closed_at, reported_in)
    SELECT %(run)s, g, 'train', %(label)s, 'task-' || g, g, %(members)s, 'sealed', %(members)s,
      0.5 + 0.4 * sin(g / 1000.0), %(members)s * %(tokens)s, g / %(a_step)s, at, at, at + interval '9 s',
      nullif(g / %(a_step)s, %(steps)s)
    FROM (SELECT g, now() - make_interval(secs => (%(groups)s - g) * %(seconds)s) AS at
          FROM generate_series(0, %(groups)s - 1) g) AS made""",
    """INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, start_state, state, stop,
      failure, reason, reward, turns, sampled_tokens, policy_version, started_at, ended_at)
    SELECT g.run_id, g.group_no, m, 0, 'v1', jsonb_build_array(jsonb_build_object('role', 'user', 'content',
        'What is ' || g.group_no || ' + ' || m || '? ' || repeat('Think about it. ', 20))), '{}',
      CASE WHEN bad THEN 'failed' ELSE 'done' END, CASE WHEN bad THEN 'failed' ELSE 'answered' END,
      CASE WHEN bad THEN 'engine' END, CASE WHEN bad THEN 'it was away' END,
      CASE WHEN bad THEN NULL ELSE (m %% 2)::float8 END, 1, %(tokens)s, g.group_no / %(a_step)s,
      g.started_at, g.closed_at
    FROM groups g, generate_series(0, %(members)s - 1) m, LATERAL (SELECT (g.group_no + m) %% 50 = 0 AS bad) AS fate
    WHERE g.run_id = %(run)s""",
    """INSERT INTO segments (run_id, group_no, member, attempt, segment, first_turn)
    SELECT run_id, group_no, member, 0, 0, 0 FROM episodes WHERE run_id = %(run)s""",
    """INSERT INTO turns (run_id, group_no, member, attempt, turn, segment, opens_segment, message, prompt_delta,
      sampled, logprobs, mask, finish, spans, policy_version, temperature, engine_id, incarnation, request_id)
    SELECT run_id, group_no, member, 0, 0, 0, true,
      jsonb_build_object('role', 'assistant', 'content', 'It is ' || group_no + member),
      decode(repeat('07000000', 16), 'hex'), decode(repeat('08000000', %(tokens)s), 'hex'),
      decode(repeat('000000bf', %(tokens)s), 'hex'), decode(repeat('01', %(tokens)s), 'hex'), 'stop',
      jsonb_build_array(jsonb_build_array('base', policy_version, 0, %(tokens)s)), policy_version, 1.0, 'engine',
      'first', 'request' FROM episodes WHERE run_id = %(run)s""",
    """INSERT INTO train_steps (run_id, step, batch_no, fence, version, groups, staleness, metrics)
    SELECT %(run)s, s, s, 1, s + 1, %(a_step)s, s %% 3, '{"reward_mean": 0.5, "loss": 0.1}'
    FROM generate_series(0, %(steps)s - 1) s""",
    "UPDATE runs SET next_group_no = %(groups)s WHERE run_id = %(run)s",
)


async def many_episodes(store: Store, database: str, run_id: str, episodes: int, **changes: Any) -> None:
    """A run that trains and has so many episodes of one turn each, in groups of eight, and is still alive."""
    from atropos.db.runs import create_run

    groups = episodes // MEMBERS
    steps = groups // GROUPS_A_STEP
    config = run_config(trainer={"kind": "builtin", "steps": steps + 10}, batch={"groups": GROUPS_A_STEP}, **changes)
    await create_run(store, run_id, config, mixture(LABEL))
    values = {
        "run": run_id,
        "label": LABEL,
        "groups": groups,
        "members": MEMBERS,
        "tokens": TOKENS,
        "a_step": GROUPS_A_STEP,
        "steps": steps,
        "seconds": _SECONDS_A_GROUP,
    }
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        for statement in _STATEMENTS:
            await connection.execute(statement.encode(), values)
        await connection.execute(b"ANALYZE")
