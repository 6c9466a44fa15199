"""Views of how it goes and what it costs; pairs of a run without reading the others; a comment on every column."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_OUTCOMES = """
CREATE VIEW episode_outcomes AS
SELECT e.run_id, e.group_no, e.member, e.attempt, g.kind, g.evaluation, g.environment, e.environment_version, k.split,
  g.task_key,
  NOT EXISTS (SELECT FROM episodes l
    WHERE (l.run_id, l.group_no, l.member) = (e.run_id, e.group_no, e.member) AND l.attempt > e.attempt) AS newest,
  CASE e.state WHEN 'running' THEN 'running' WHEN 'failed' THEN 'invalid'
    ELSE CASE WHEN e.reward IS NULL THEN 'unscored' ELSE 'scored' END END AS outcome,
  e.stop, e.failure, e.reason, e.reward, e.turns, e.sampled_tokens, e.policy_version, g.state AS group_state,
  (SELECT b.step FROM batch_groups m JOIN batches b USING (run_id, batch_no)
    WHERE m.run_id = e.run_id AND m.group_no = e.group_no AND m.live AND b.state = 'committed') AS trained_in,
  extract(epoch FROM e.ended_at - e.started_at)::float8 AS seconds, e.started_at, e.ended_at
FROM episodes e JOIN groups g USING (run_id, group_no) JOIN tasks k USING (run_id, environment, task_key)
"""

_PROGRESS = """
CREATE VIEW run_progress AS
SELECT r.run_id, r.name, r.state, r.reason, r.waiting_for, r.created_at, r.ended_at,
  g.open_groups, g.sealed_groups, g.leased_groups, g.trained_groups, g.filtered_groups, g.stale_groups,
  g.failed_groups, g.evaluation_groups, g.sampled_tokens,
  CASE r.config->'trainer'->>'kind' WHEN 'none' THEN NULL ELSE (r.config->'trainer'->>'steps')::int END AS wanted_steps,
  s.steps, s.last_step_at, last.staleness, reported.reward_mean, v.version, v.published_version
FROM runs r
CROSS JOIN LATERAL (
  SELECT
    count(*) FILTER (WHERE kind = 'train' AND state IN ('admitted', 'running', 'waiting')) AS open_groups,
    count(*) FILTER (WHERE kind = 'train' AND state = 'sealed') AS sealed_groups,
    count(*) FILTER (WHERE state = 'leased') AS leased_groups,
    count(*) FILTER (WHERE state = 'trained') AS trained_groups,
    count(*) FILTER (WHERE kind = 'train' AND state = 'filtered') AS filtered_groups,
    count(*) FILTER (WHERE state = 'stale') AS stale_groups,
    count(*) FILTER (WHERE kind = 'train' AND state = 'failed') AS failed_groups,
    count(*) FILTER (WHERE kind = 'eval') AS evaluation_groups,
    coalesce(sum(sampled_tokens), 0)::bigint AS sampled_tokens
  FROM groups WHERE groups.run_id = r.run_id
) AS g
CROSS JOIN LATERAL (
  SELECT count(*) AS steps, max(committed_at) AS last_step_at FROM train_steps WHERE train_steps.run_id = r.run_id
) AS s
LEFT JOIN LATERAL (
  SELECT staleness FROM train_steps WHERE train_steps.run_id = r.run_id ORDER BY step DESC LIMIT 1
) AS last ON true
LEFT JOIN LATERAL (
  SELECT reward_mean FROM batches WHERE batches.run_id = r.run_id AND batches.state <> 'abandoned'
  ORDER BY step DESC LIMIT 1
) AS reported ON true
CROSS JOIN LATERAL (
  SELECT max(policy_versions.version) AS version,
    max(policy_versions.version) FILTER (WHERE published_at IS NOT NULL) AS published_version
  FROM policy_versions WHERE policy_versions.run_id = r.run_id
) AS v
"""

_STALENESS = """
CREATE VIEW staleness AS
SELECT g.run_id, g.group_no, g.environment, g.state, g.oldest_version, b.step,
  CASE g.state
    WHEN 'sealed' THEN (SELECT count(*) FROM train_steps s WHERE s.run_id = g.run_id)
    ELSE b.step END - g.oldest_version AS staleness,
  g.sampled_tokens, g.closed_at
FROM groups g
LEFT JOIN batch_groups m ON m.run_id = g.run_id AND m.group_no = g.group_no AND m.live
LEFT JOIN batches b ON b.run_id = m.run_id AND b.batch_no = m.batch_no
WHERE g.kind = 'train' AND g.state IN ('sealed', 'leased', 'trained', 'stale')
"""

# Tokens of a call stand where its first version is, what was sampled where the version is that sampled it.
_COSTS = """
CREATE VIEW token_costs AS
SELECT p.run_id, p.kind, p.version, sum(p.calls)::bigint AS calls, sum(p.prompt)::bigint AS prompt_tokens,
  sum(p.added)::bigint AS new_prompt_tokens, sum(p.rendered)::bigint AS rerendered_tokens,
  sum(p.sampled)::bigint AS sampled_tokens, sum(p.trainable)::bigint AS trainable_tokens,
  coalesce(sum(p.sampled) FILTER (WHERE p.provisional), 0)::bigint AS provisional_tokens,
  coalesce(sum(p.sampled) FILTER (WHERE p.lost), 0)::bigint AS lost_tokens, sum(p.late)::bigint AS late_tokens
FROM (
  SELECT c.run_id, c.kind, (s.span->>1)::int AS version, f.first::int AS calls, f.first::int * c.prompt AS prompt,
    f.first::int * c.added AS added, f.first::int * c.rendered AS rendered, f.n AS sampled,
    CASE WHEN f.n > 0 THEN bit_count(substring(c.mask FROM (s.span->>2)::int + 1 FOR f.n)) ELSE 0 END AS trainable,
    c.provisional, c.lost, 0 AS late
  FROM (
    SELECT t.run_id, g.kind, t.spans, t.mask, t.provisional, e.state = 'failed' AS lost,
      octet_length(t.prompt_delta) / 4 AS added, coalesce(octet_length(o.prompt) / 4, 0) AS rendered,
      sum((octet_length(t.prompt_delta) + coalesce(octet_length(o.prompt), 0) + octet_length(t.sampled)) / 4) OVER (
        PARTITION BY t.run_id, t.group_no, t.member, t.attempt, t.segment ORDER BY t.turn)
        - octet_length(t.sampled) / 4 AS prompt
    FROM turns t
    JOIN episodes e USING (run_id, group_no, member, attempt)
    JOIN groups g USING (run_id, group_no)
    LEFT JOIN segments o ON t.opens_segment AND t.segment > 0 AND (o.run_id, o.group_no, o.member, o.attempt, o.segment)
      = (t.run_id, t.group_no, t.member, t.attempt, t.segment)
  ) AS c
  LEFT JOIN LATERAL jsonb_array_elements(c.spans) WITH ORDINALITY AS s(span, place) ON true
  CROSS JOIN LATERAL (
    SELECT coalesce(s.place, 1) = 1 AS first, coalesce((s.span->>3)::int - (s.span->>2)::int, 0) AS n
  ) AS f
  UNION ALL
  SELECT l.run_id, g.kind, (l.record->'spans'->0->>'version')::int, 0, 0, 0, 0, 0, 0, false, false,
    jsonb_array_length(l.record->'sampled')
  FROM late_results l JOIN groups g USING (run_id, group_no) WHERE l.kind = 'turn'
) AS p
GROUP BY p.run_id, p.kind, p.version
"""

# Plain joins, so that any condition on the run is one on each table.
_DPO = """
CREATE OR REPLACE VIEW dpo_pairs AS
SELECT g.run_id, g.group_no, g.environment, p.environment_version, k.split, g.task_key,
  p.member AS chosen_member, p.attempt AS chosen_attempt, r.member AS rejected_member, r.attempt AS rejected_attempt,
  p.reward AS chosen_reward, r.reward AS rejected_reward, p.reward - r.reward AS reward_difference,
  row_number() OVER (
    PARTITION BY g.run_id, g.group_no ORDER BY p.reward - r.reward DESC, p.member, p.attempt, r.member, r.attempt
  ) AS rank_in_group,
  p.policy_version AS chosen_version, r.policy_version AS rejected_version,
  greatest(p.ended_at, r.ended_at) AS ended_at,
  chat_messages(p.prompt) AS prompt,
  chat_answers(p.run_id, p.group_no, p.member, p.attempt) AS chosen,
  chat_answers(r.run_id, r.group_no, r.member, r.attempt) AS rejected,
  p.lossy OR r.lossy
  OR EXISTS (SELECT FROM turns t WHERE t.run_id = g.run_id AND t.group_no = g.group_no AND t.lossy
    AND (t.member, t.attempt) IN ((p.member, p.attempt), (r.member, r.attempt)))
  OR EXISTS (SELECT FROM tool_calls c WHERE c.run_id = g.run_id AND c.group_no = g.group_no AND c.lossy
    AND (c.member, c.attempt) IN ((p.member, p.attempt), (r.member, r.attempt))) AS lossy
FROM groups g
JOIN tasks k USING (run_id, environment, task_key)
JOIN episodes p ON p.run_id = g.run_id AND p.group_no = g.group_no AND p.state = 'done'
JOIN episodes r ON r.run_id = g.run_id AND r.group_no = g.group_no AND r.state = 'done'
WHERE g.kind = 'train' AND g.state IN ('sealed', 'leased', 'trained', 'filtered', 'stale')
  AND p.reward > r.reward AND p.prompt = r.prompt
"""

_DPO_BEFORE = """
CREATE OR REPLACE VIEW dpo_pairs AS
SELECT p.run_id, p.group_no, p.environment, p.environment_version, p.split, p.task_key,
  p.member AS chosen_member, p.attempt AS chosen_attempt, r.member AS rejected_member, r.attempt AS rejected_attempt,
  p.reward AS chosen_reward, r.reward AS rejected_reward, p.reward - r.reward AS reward_difference,
  row_number() OVER (
    PARTITION BY p.run_id, p.group_no ORDER BY p.reward - r.reward DESC, p.member, p.attempt, r.member, r.attempt
  ) AS rank_in_group,
  p.policy_version AS chosen_version, r.policy_version AS rejected_version,
  greatest(p.ended_at, r.ended_at) AS ended_at,
  p.prompt, p.completion AS chosen, r.completion AS rejected, p.lossy OR r.lossy AS lossy
FROM sft_examples p JOIN sft_examples r USING (run_id, group_no)
WHERE p.reward > r.reward AND p.prompt = r.prompt
"""

_VIEWS = {
    "episode_outcomes": (
        _OUTCOMES,
        "Every attempt of every episode with how it ended; running ones and evaluations included",
    ),
    "run_progress": (_PROGRESS, "Every run with what it has done so far"),
    "staleness": (_STALENESS, "Groups that training took, could take or found too old, with how old their tokens are"),
    "token_costs": (
        _COSTS,
        "Tokens by run, kind and policy version: what was sampled, what prompts cost, what was lost",
    ),
}

_EPISODE = {
    "run_id": "The run",
    "group_no": "Number of the group in the run",
    "member": "Which episode of the group, from 0",
    "attempt": "Which attempt of the episode, from 0",
    "environment": "Label of the environment",
    "environment_version": "Version of the environment's code that started it",
    "split": "Split of the task: train, eval or test",
    "task_key": "The task",
    "stop": "Why it ended",
    "turns": "Model calls",
    "sampled_tokens": "Tokens sampled",
    "policy_version": "Oldest version that sampled a token of it",
    "ended_at": "When it ended",
}
_SAID = {
    "prompt": "Messages the environment began with, as chat messages",
    "completion": "All that was said after the prompt, as chat messages",
    "lossy": "Some character is one that JSON in Postgres cannot hold; the tables have the exact text",
}

_COLUMNS = {
    "conversations": {
        **_EPISODE,
        **_SAID,
        "kind": "train, or eval for an episode of an evaluation",
        "reward": "Its reward; NULL: unscored, which is not 0",
        "started_at": "When it started",
    },
    "sft_examples": {
        **_EPISODE,
        **_SAID,
        "reward": "Its reward",
        "rank_in_group": "1: the best of its group; of equal rewards the lower member comes first",
        "reward_spread": "Highest less lowest reward of the group",
        "messages": "The whole conversation as chat messages",
    },
    "dpo_pairs": {
        **{name: _EPISODE[name] for name in ("run_id", "group_no", "environment", "split", "task_key")},
        "environment_version": "Version of the environment's code that started the chosen one",
        "chosen_member": "Member with the higher reward",
        "chosen_attempt": "Its attempt",
        "rejected_member": "Member with the lower reward",
        "rejected_attempt": "Its attempt",
        "chosen_reward": "Reward of the chosen one",
        "rejected_reward": "Reward of the rejected one",
        "reward_difference": "The first less the second; always above 0",
        "rank_in_group": "1: the pair of its group that is farthest apart",
        "chosen_version": "Oldest version that sampled a token of the chosen one",
        "rejected_version": "Oldest version that sampled a token of the rejected one",
        "ended_at": "When the later of the two ended",
        "prompt": "Messages both answered, as chat messages",
        "chosen": "What the better one said after them",
        "rejected": "What the other one said",
        "lossy": _SAID["lossy"],
    },
    "episode_outcomes": {
        **_EPISODE,
        "kind": "train, or eval for an episode of an evaluation",
        "evaluation": "The evaluation it belongs to; NULL for training",
        "newest": "No later attempt of the same member exists: the one that counts",
        "outcome": "running, scored, unscored (a judge failed), or invalid (it never votes)",
        "stop": "Why it ended; NULL while it runs",
        "failure": "Whose fault it is where something went wrong",
        "reason": "What went wrong, in words",
        "reward": "Its reward; NULL unless scored",
        "turns": "Model calls; 0 while it runs",
        "sampled_tokens": "Tokens sampled; 0 while it runs",
        "group_state": "Where its group is in its life",
        "trained_in": "The train step that consumed its group; NULL: none did",
        "seconds": "From its start to its end",
        "started_at": "When it started",
        "ended_at": "When it ended; NULL while it runs",
    },
    "run_progress": {
        "run_id": "The run",
        "name": "Name from the run file",
        "state": "Where the run is in its life",
        "reason": "Why it is in this state, in words",
        "waiting_for": "Why nothing is admitted right now; NULL: it is not waiting",
        "created_at": "When it was registered",
        "ended_at": "When it ended; NULL while it is alive",
        "open_groups": "Training groups in flight",
        "sealed_groups": "Training groups that wait for a batch, or are finished where there is no trainer",
        "leased_groups": "Groups of the batch that is being trained on",
        "trained_groups": "Groups that made a step",
        "filtered_groups": "Groups without signal",
        "stale_groups": "Groups dropped since their tokens were too old",
        "failed_groups": "Training groups that failed",
        "evaluation_groups": "Groups of evaluations, in whatever state",
        "sampled_tokens": "Tokens sampled by all closed groups, evaluations and failed attempts included",
        "wanted_steps": "Train steps the run should make; NULL: it has no trainer",
        "steps": "Train steps that were committed",
        "last_step_at": "When the last one was",
        "staleness": "Of the last step: its number less the oldest version that sampled a token of it",
        "reward_mean": "Mean reward that the newest batch reported",
        "version": "Newest version of the weights",
        "published_version": "Newest version that reached every engine that could be reached",
    },
    "staleness": {
        "run_id": "The run",
        "group_no": "Number of the group in the run",
        "environment": "Label of its environment",
        "state": "sealed (waiting), leased, trained or stale (dropped)",
        "oldest_version": "Oldest version that sampled a token of a valid member; NULL: none did",
        "step": "The step whose batch has it; NULL: none has",
        "staleness": "That step, or for a waiting one the next, less the oldest version; NULL for a dropped one",
        "sampled_tokens": "Tokens sampled by its episodes, failed attempts included",
        "closed_at": "When it was sealed",
    },
    "token_costs": {
        "run_id": "The run",
        "kind": "train, or eval for evaluations",
        "version": "The policy version; NULL: calls that sampled nothing",
        "calls": "Model calls whose first token it sampled",
        "prompt_tokens": "Tokens of the whole prompts of these calls, as the engine was given them",
        "new_prompt_tokens": "Of these, tokens that were appended for the call; stored once",
        "rerendered_tokens": "Of these, tokens of whole prompts that a fork rendered anew; stored a second time",
        "sampled_tokens": "Tokens it sampled, whatever became of them",
        "trainable_tokens": "Of these, tokens that may train (mask 1)",
        "provisional_tokens": "Of these, tokens sampled around a reload and not confirmed",
        "lost_tokens": "Of these, tokens of episodes that failed and had to be sampled again or were given up",
        "late_tokens": "Tokens beside these that came after another answer had been stored",
    },
}


def upgrade() -> None:
    op.execute(_DPO)
    for view, (statement, comment) in _VIEWS.items():
        op.execute(statement)
        op.execute(f"COMMENT ON VIEW {view} IS {_quoted(comment)}")
    for view, columns in _COLUMNS.items():
        for column, comment in columns.items():
            op.execute(f"COMMENT ON COLUMN {view}.{column} IS {_quoted(comment)}")


def downgrade() -> None:
    for view in reversed(_VIEWS):
        op.execute(f"DROP VIEW {view}")
    op.execute(_DPO_BEFORE)
    for view in _COLUMNS.keys() - _VIEWS.keys():
        for column in _COLUMNS[view]:
            op.execute(f"COMMENT ON COLUMN {view}.{column} IS NULL")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''").replace(":", "\\:") + "'"
