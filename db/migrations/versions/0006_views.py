"""Views over what was said: whole conversations, supervised examples, preference pairs."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_CHAT_PART = """
CREATE FUNCTION chat_part(part jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN
  CASE part->>'type'
    WHEN 'image' THEN jsonb_build_object('type', 'image_url', 'image_url', jsonb_build_object('url', part->'url'))
    ELSE part
  END
"""

_CHAT_MESSAGE = """
CREATE FUNCTION chat_message(message jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN
  jsonb_strip_nulls(jsonb_build_object(
    'role', message->'role',
    'content', CASE jsonb_typeof(message->'content')
      WHEN 'array' THEN (
        SELECT jsonb_agg(chat_part(p.part) ORDER BY p.place)
        FROM jsonb_array_elements(message->'content') WITH ORDINALITY AS p(part, place))
      ELSE coalesce(message->'content', '""'::jsonb) END,
    'reasoning_content', message->'reasoning',
    'tool_calls', CASE WHEN jsonb_array_length(coalesce(message->'tool_calls', '[]')) > 0 THEN (
      SELECT jsonb_agg(jsonb_build_object(
          'id', c.call->'id',
          'type', 'function',
          'function', jsonb_build_object(
            'name', coalesce(c.call->'name', '""'::jsonb),
            'arguments', coalesce(c.call->>'raw', c.call->>'arguments', '{}')))
        ORDER BY c.place)
      FROM jsonb_array_elements(message->'tool_calls') WITH ORDINALITY AS c(call, place)) END,
    'tool_call_id', message->'tool_call_id',
    'name', message->'name'
  ))
"""

_CHAT_MESSAGES = """
CREATE FUNCTION chat_messages(list jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN (
  SELECT coalesce(jsonb_agg(chat_message(m.message) ORDER BY m.place), '[]')
  FROM jsonb_array_elements(list) WITH ORDINALITY AS m(message, place))
"""

_CHAT_ANSWERS = """
CREATE FUNCTION chat_answers(run text, group_number int, member_number int, attempt_number int) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE RETURN (
  SELECT coalesce(jsonb_agg(said.message ORDER BY said.turn, said.part, said.place), '[]') FROM (
    SELECT t.turn, 0 AS part, 0::bigint AS place, chat_message(t.message) AS message
    FROM turns t
    WHERE (t.run_id, t.group_no, t.member, t.attempt) = (run, group_number, member_number, attempt_number)
    UNION ALL
    SELECT c.turn, 1, c.call_index, jsonb_strip_nulls(jsonb_build_object(
      'role', 'tool', 'content', c.content, 'tool_call_id', c.call->'id', 'name', nullif(c.call->'name', '""')))
    FROM tool_calls c
    WHERE (c.run_id, c.group_no, c.member, c.attempt) = (run, group_number, member_number, attempt_number)
      AND c.call_index >= 0
    UNION ALL
    SELECT c.turn, 2, r.place, chat_message(r.reply)
    FROM tool_calls c, jsonb_array_elements(c.replies) WITH ORDINALITY AS r(reply, place)
    WHERE (c.run_id, c.group_no, c.member, c.attempt) = (run, group_number, member_number, attempt_number)
      AND c.call_index < 0
  ) AS said)
"""

_CONVERSATIONS = """
CREATE VIEW conversations AS
SELECT e.run_id, e.group_no, e.member, e.attempt, g.kind, g.environment, e.environment_version, k.split, g.task_key,
  e.reward, e.stop, e.turns, e.sampled_tokens, e.policy_version, e.started_at, e.ended_at,
  chat_messages(e.prompt) AS prompt,
  chat_answers(e.run_id, e.group_no, e.member, e.attempt) AS completion,
  e.lossy OR EXISTS (SELECT FROM turns t
    WHERE (t.run_id, t.group_no, t.member, t.attempt) = (e.run_id, e.group_no, e.member, e.attempt) AND t.lossy)
  OR EXISTS (SELECT FROM tool_calls c
    WHERE (c.run_id, c.group_no, c.member, c.attempt) = (e.run_id, e.group_no, e.member, e.attempt) AND c.lossy)
    AS lossy
FROM episodes e JOIN groups g USING (run_id, group_no) JOIN tasks k USING (run_id, environment, task_key)
WHERE e.state = 'done'
"""

_SFT = """
CREATE VIEW sft_examples AS
SELECT c.run_id, c.group_no, c.member, c.attempt, c.environment, c.environment_version, c.split, c.task_key, c.reward,
  rank() OVER (PARTITION BY c.run_id, c.group_no ORDER BY c.reward DESC, c.member, c.attempt) AS rank_in_group,
  max(c.reward) OVER (PARTITION BY c.run_id, c.group_no) - min(c.reward) OVER (PARTITION BY c.run_id, c.group_no)
    AS reward_spread,
  c.stop, c.turns, c.sampled_tokens, c.policy_version, c.ended_at,
  c.prompt || c.completion AS messages, c.prompt, c.completion, c.lossy
FROM conversations c JOIN groups g USING (run_id, group_no)
WHERE c.kind = 'train' AND c.reward IS NOT NULL AND g.state IN ('sealed', 'leased', 'trained', 'filtered', 'stale')
"""

_DPO = """
CREATE VIEW dpo_pairs AS
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

_COMMENTS = (
    ("FUNCTION chat_part(jsonb)", "A part of a message as the chat format of OpenAI and its kin spells it"),
    ("FUNCTION chat_message(jsonb)", "A stored message in that format; arguments of tool calls are JSON in a string"),
    ("FUNCTION chat_messages(jsonb)", "A stored list of messages in that format"),
    (
        "FUNCTION chat_answers(text, int, int, int)",
        "What was said after the prompt of an episode, in order: messages of the model, results of its tools, replies",
    ),
    ("VIEW conversations", "Every finished episode with its conversation, evaluations included"),
    (
        "VIEW sft_examples",
        "Scored training episodes of groups that count, with their rank by reward within the group; no evaluations",
    ),
    ("VIEW dpo_pairs", "Two episodes of a group that answered the same prompt, the better one first; no evaluations"),
)


def upgrade() -> None:
    for statement in (_CHAT_PART, _CHAT_MESSAGE, _CHAT_MESSAGES, _CHAT_ANSWERS, _CONVERSATIONS, _SFT, _DPO):
        op.execute(statement)
    for what, comment in _COMMENTS:
        op.execute(f"COMMENT ON {what} IS '{comment}'")


def downgrade() -> None:
    for view in ("dpo_pairs", "sft_examples", "conversations"):
        op.execute(f"DROP VIEW {view}")
    for arguments in ("answers(text, int, int, int)", "messages(jsonb)", "message(jsonb)", "part(jsonb)"):
        op.execute(f"DROP FUNCTION chat_{arguments}")
