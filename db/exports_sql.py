"""The statements of an export: which rows are wanted, in which order, and what each of them says.

Invariant: examples are those of the view `sft_examples`, and what they said is what the view `conversations` says; a
pair is two examples of one group with the same prompt, exactly. An order and a draw depend on keys and the seed alone,
never on a collation, a plan or the moment, so that the same rows are the same export. Choosing reads no text (unless
copies are to be left out); texts are rendered page by page for what was chosen.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

EPISODE: Final = "run_id, group_no, member, attempt"
_RUN: Final = 'run_id COLLATE "C"'


class Source(StrEnum):
    """What a row of an export is made of."""

    EXAMPLES = "sft"
    PAIRS = "dpo"


@dataclass(frozen=True)
class Wanted:
    """Which rows. None: any."""

    source: Source = Source.EXAMPLES
    runs: tuple[str, ...] | None = None
    environments: tuple[str, ...] | None = None
    since: datetime | None = None
    """Episodes that ended at this moment or later; of a pair, both."""
    until: datetime | None = None
    """Episodes that ended before this moment."""
    min_version: int | None = None
    """Oldest policy version that sampled a token of an episode; of a pair, of both."""
    max_version: int | None = None
    least: float | None = None
    """Reward of an example, or of the better one of a pair, at least."""
    most: float | None = None
    negative: bool = False
    """Rewards of 0 and below, too."""
    difference: float = 0.0
    """Of an example's group: highest and lowest reward; of a pair: its two rewards; at least."""
    top: int | None = None
    """Rows of a group at most: the best examples, or the pairs that are farthest apart."""
    one_message: bool = False
    """Only episodes in which all that followed the prompt is one message without tool calls."""
    dedupe: bool = False
    """Of rows that say the same, the best one only."""
    evaluations: bool = False
    """Episodes of evaluations, too."""
    scores: str = "first"
    """Whose scores make the rewards: `first`, `latest`, or a version, beside whose others the first ones count."""
    limit: int | None = None
    """Rows at most, drawn by the seed."""
    test: float = 0.0
    """Share of tasks whose rows are for testing, drawn by the seed."""
    seed: int = 0

    def values(self, as_of: datetime) -> dict[str, Any]:
        """What the statement's placeholders stand for."""
        return {
            "as_of": as_of,
            "runs": None if self.runs is None else list(self.runs),
            "environments": None if self.environments is None else list(self.environments),
            "since": self.since,
            "until": self.until,
            "oldest": self.min_version,
            "newest": self.max_version,
            "least": self.least,
            "most": self.most,
            "difference": self.difference,
            "top": self.top,
            "limit": self.limit,
            "scores": self.scores,
            "seed": f"{self.seed}/",
            "test": min(int(self.test * 2**32), 2**32 - 1).to_bytes(4, "big"),
        }


@dataclass(frozen=True)
class _Key:
    """The columns that name a row of an export."""

    columns: tuple[str, ...]
    reward: str
    """Which of several equal rows is the best."""
    worth: str
    """Their order within a group."""
    sides: tuple[tuple[str, str], ...] = field(default=())
    """Columns of member and attempt of each episode in it."""

    @property
    def order(self) -> str:
        return ", ".join((_RUN, *self.columns[1:]))

    @property
    def text(self) -> str:
        return " || '/' || ".join(self.columns)


_KEYS: Final = {
    Source.EXAMPLES: _Key(
        ("run_id", "group_no", "member", "attempt"), "reward DESC", "reward DESC", (("member", "attempt"),)
    ),
    Source.PAIRS: _Key(
        ("run_id", "group_no", "member", "attempt", "rejected_member", "rejected_attempt"),
        "reward - rejected_reward DESC",
        "reward - rejected_reward DESC",
        (("member", "attempt"), ("rejected_member", "rejected_attempt")),
    ),
}

_COLUMNS: Final = f"{EPISODE}, environment, task_key, reward, reward_spread, policy_version, ended_at"

_EVALUATED: Final = f"""
  UNION ALL
  SELECT {EPISODE}, environment, task_key, reward,
    max(reward) OVER (PARTITION BY run_id, group_no) - min(reward) OVER (PARTITION BY run_id, group_no),
    policy_version, ended_at
  FROM conversations WHERE kind = 'eval' AND reward IS NOT NULL"""

_RESCORED: Final = f"""
  SELECT {EPISODE}, environment, task_key, reward,
    max(reward) OVER (PARTITION BY run_id, group_no) - min(reward) OVER (PARTITION BY run_id, group_no)
      AS reward_spread,
    policy_version, ended_at
  FROM (SELECT {EPISODE}, environment, task_key, policy_version, ended_at,
      coalesce(episode_reward(run_id, group_no, member, attempt, %(scores)s), reward) AS reward
    FROM given) AS by_version"""

_FITTING: Final = """
  (%(runs)s::text[] IS NULL OR x.run_id = ANY(%(runs)s))
  AND g.closed_at <= %(as_of)s
  AND (%(environments)s::text[] IS NULL OR x.environment = ANY(%(environments)s))
  AND (%(since)s::timestamptz IS NULL OR x.ended_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR x.ended_at < %(until)s)
  AND (%(oldest)s::int IS NULL OR x.policy_version >= %(oldest)s)
  AND (%(newest)s::int IS NULL OR x.policy_version <= %(newest)s)"""

_ONE_MESSAGE: Final = """
  AND EXISTS (SELECT FROM turns t
    WHERE (t.run_id, t.group_no, t.member, t.attempt) = (x.run_id, x.group_no, x.member, x.attempt)
    HAVING count(*) = 1 AND count(*) FILTER (WHERE coalesce(t.message->'tool_calls', '[]') <> '[]') = 0)
  AND NOT EXISTS (SELECT FROM tool_calls c
    WHERE (c.run_id, c.group_no, c.member, c.attempt) = (x.run_id, x.group_no, x.member, x.attempt)
      AND (c.call_index >= 0 OR c.replies <> '[]'))"""

_REWARDED: Final = """
  (%(least)s::float8 IS NULL OR x.reward >= %(least)s) AND (%(most)s::float8 IS NULL OR x.reward <= %(most)s)"""

_PAIRED: Final = """
  SELECT x.run_id, x.group_no, x.task_key, x.member, x.attempt, x.reward,
    r.member AS rejected_member, r.attempt AS rejected_attempt, r.reward AS rejected_reward
  FROM fitting x
  JOIN fitting r ON (r.run_id, r.group_no) = (x.run_id, x.group_no) AND x.reward > r.reward
  JOIN episodes p ON (p.run_id, p.group_no, p.member, p.attempt) = (x.run_id, x.group_no, x.member, x.attempt)
  JOIN episodes q ON (q.run_id, q.group_no, q.member, q.attempt) = (r.run_id, r.group_no, r.member, r.attempt)
  WHERE x.reward - r.reward >= %(difference)s
    AND p.prompt = q.prompt AND p.prompt_exact IS NOT DISTINCT FROM q.prompt_exact"""


def chosen(wanted: Wanted) -> str:
    """The rows that are wanted, by their keys and in their order, and whether each is for testing."""
    key = _KEYS[wanted.source]
    given = f"SELECT {_COLUMNS} FROM sft_examples{_EVALUATED if wanted.evaluations else ''}"
    parts = [
        f"WITH examples AS (\n  {given})"
        if wanted.scores == "first"
        else f"WITH given AS (\n  {given}),\nexamples AS ({_RESCORED})",
        f"fitting AS (\n  SELECT x.* FROM examples x JOIN groups g USING (run_id, group_no)\n  WHERE {_FITTING}"
        f"{_ONE_MESSAGE if wanted.one_message else ''})",
        f"rows AS ({_rewarded(wanted)})",
    ]
    last = "rows"
    if wanted.dedupe:
        said = " || ".join(_said(*side) for side in key.sides)
        parts.append(
            f"several AS (SELECT x.*, row_number() OVER (PARTITION BY {said} ORDER BY {key.reward}, {key.order})"
            f" AS copy FROM {last} x)"
        )
        parts.append("single AS (SELECT * FROM several WHERE copy = 1)")
        last = "single"
    if wanted.top is not None:
        within = ", ".join(key.columns[2:])
        parts.append(
            f"ranked AS (SELECT x.*, row_number() OVER (PARTITION BY run_id, group_no ORDER BY {key.worth}, {within})"
            f" AS place FROM {last} x)"
        )
        parts.append("best AS (SELECT * FROM ranked WHERE place <= %(top)s)")
        last = "best"
    if wanted.limit is not None:
        parts.append(f"drawn AS (SELECT * FROM {last} ORDER BY {_draw(key.text)}, {key.order} LIMIT %(limit)s::bigint)")
        last = "drawn"
    test = f"{_draw('task_key')} < %(test)s::bytea" if wanted.test else "false"
    return ",\n".join(parts) + f"\nSELECT {', '.join(key.columns)}, {test} FROM {last} ORDER BY {key.order}"


def _rewarded(wanted: Wanted) -> str:
    positive = "" if wanted.negative else " AND x.reward > 0"
    if wanted.source is Source.PAIRS:
        return f"{_PAIRED} AND {_REWARDED}{positive}"
    return f"SELECT x.* FROM fitting x WHERE {_REWARDED}{positive} AND x.reward_spread >= %(difference)s"


def _draw(text: str) -> str:
    """Bytes that are spread evenly and depend on the seed and the text alone."""
    return f"sha256(convert_to(%(seed)s || {text}, 'UTF8'))"


def _said(member: str, attempt: str) -> str:
    """A digest of all that an episode says, exactly, but for the names of its tool calls."""
    where = f"= (x.run_id, x.group_no, x.{member}, x.{attempt})"
    message = (
        "coalesce(encode(t.message_exact, 'hex'), (t.message - 'tool_calls')::text || coalesce(("
        "SELECT jsonb_agg(call - 'id' ORDER BY n)"
        " FROM jsonb_array_elements(t.message->'tool_calls') WITH ORDINALITY AS u(call, n))::text, ''))"
    )
    answer = "coalesce(encode(c.exact, 'hex'), jsonb_build_array(c.call - 'id', c.content, c.replies)::text)"
    return f"""sha256(convert_to(
    (SELECT coalesce(encode(e.prompt_exact, 'hex'), e.prompt::text) FROM episodes e
      WHERE (e.run_id, e.group_no, e.member, e.attempt) {where})
    || coalesce((SELECT string_agg(t.turn || ':' || {message}, E'\\n' ORDER BY t.turn) FROM turns t
      WHERE (t.run_id, t.group_no, t.member, t.attempt) {where}), '')
    || coalesce((SELECT string_agg(c.turn || ':' || {answer}, E'\\n' ORDER BY c.turn, c.call_index) FROM tool_calls c
      WHERE (c.run_id, c.group_no, c.member, c.attempt) {where}
        AND (c.call_index >= 0 OR c.replies <> '[]')), ''), 'UTF8'))"""


# --- what rows say --------------------------------------------------------------------------------------------------


def _number(value: str) -> str:
    """A number as JSON that reads as a float everywhere, also where it is whole."""
    whole = f"{value} = trunc({value}) AND abs({value}) < 1e15"
    return f"CASE WHEN {whole} THEN {value}::text || '.0' ELSE {value}::text END"


def _reward(of: str) -> str:
    """The reward of an episode by the scores that are asked for."""
    key = f"{of}.run_id, {of}.group_no, {of}.member, {of}.attempt"
    by_version = f"coalesce(episode_reward({key}, %(scores)s::text), {of}.reward)"
    return f"(CASE %(scores)s::text WHEN 'first' THEN {of}.reward ELSE {by_version} END)"


def _episode(of: str) -> str:
    """Where one episode came from, as arguments of json_build_object."""
    key = f"({of}.run_id, {of}.group_no, {of}.member, {of}.attempt)"
    return f"""
  'member', {of}.member, 'attempt', {of}.attempt, 'reward', ({_number(_reward(of))})::json, 'stop', {of}.stop,
  'policy_version', {of}.policy_version,
  'versions', (SELECT coalesce(jsonb_agg(DISTINCT (s.span->>1)::int), '[]')
    FROM turns t, jsonb_array_elements(t.spans) AS s(span) WHERE (t.run_id, t.group_no, t.member, t.attempt) = {key}),
  'scorers', (SELECT coalesce(json_agg(json_build_object('name', s.name, 'version', s.scorer_version)
      ORDER BY s.name COLLATE "C"), '[]')
    FROM (SELECT DISTINCT ON (name) name, scorer_version FROM scores
      WHERE (run_id, group_no, member, attempt) = {key} AND NOT metric
      ORDER BY name, value IS NULL, scorer_version <> %(scores)s::text,
        CASE %(scores)s::text WHEN 'latest' THEN -seq ELSE seq END) AS s),
  'sampled_at', to_char({of}.ended_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""


def _built(of: str) -> str:
    return f"json_build_object({_episode(of)})"


def _group(of: str) -> str:
    names = ("run_id", "group_no", "kind", "environment", "environment_version", "split", "task_key")
    return ", ".join(f"'{name}', {of}.{name}" for name in names)


def _exact(of: str) -> str:
    """Kinds and bytes of what an episode consists of, where its display copy is not exact."""
    key = f"= ({of}.run_id, {of}.group_no, {of}.member, {of}.attempt)"
    return f"""CASE WHEN {of}.lossy THEN (
    SELECT array_agg(part.data ORDER BY part.turn, part.kind, part.place) FROM (
      SELECT -1 AS turn, 0 AS kind, 0 AS place, coalesce(prompt_exact, convert_to(prompt::text, 'UTF8')) AS data
      FROM episodes WHERE (run_id, group_no, member, attempt) {key}
      UNION ALL
      SELECT turn, 1, 0, coalesce(message_exact, convert_to(message::text, 'UTF8'))
      FROM turns WHERE (run_id, group_no, member, attempt) {key}
      UNION ALL
      SELECT turn, CASE WHEN call_index < 0 THEN 3 ELSE 2 END, call_index,
        coalesce(exact, convert_to(jsonb_build_array(call, content, error, replies, info)::text, 'UTF8'))
      FROM tool_calls WHERE (run_id, group_no, member, attempt) {key}) AS part) END"""


def _json(value: str) -> str:
    return f"convert_to({value}::text, 'UTF8')"


SAID: Final[dict[Source, str]] = {
    Source.EXAMPLES: f"""
SELECT {_json(f"json_build_object({_group('c')}, {_episode('c')})")}, {_json(_number(_reward("c")))}, NULL::bytea,
  {_json("c.prompt")}, {_json("c.completion")}, NULL::bytea, {_exact("c")}, NULL::bytea[]
FROM unnest(%(run_id)s::text[], %(group_no)s::int[], %(member)s::int[], %(attempt)s::int[])
  WITH ORDINALITY AS k(run_id, group_no, member, attempt, place)
JOIN conversations c USING ({EPISODE}) ORDER BY k.place LIMIT %(rows)s
""",
    Source.PAIRS: f"""
SELECT {_json(f"json_build_object({_group('c')}, 'chosen', {_built('c')}, 'rejected', {_built('r')})")},
  {_json(_number(_reward("c")))}, {_json(_number(_reward("r")))},
  {_json("c.prompt")}, {_json("c.completion")}, {_json("r.completion")}, {_exact("c")}, {_exact("r")}
FROM unnest(%(run_id)s::text[], %(group_no)s::int[], %(member)s::int[], %(attempt)s::int[],
    %(rejected_member)s::int[], %(rejected_attempt)s::int[])
  WITH ORDINALITY AS k(run_id, group_no, member, attempt, rejected_member, rejected_attempt, place)
JOIN conversations c USING ({EPISODE})
JOIN conversations r ON (r.run_id, r.group_no, r.member, r.attempt)
  = (k.run_id, k.group_no, k.rejected_member, k.rejected_attempt)
ORDER BY k.place LIMIT %(rows)s
""",
}
"""Texts of a page of chosen rows, in order. (With the limit they are rendered after the sort, one by one.)"""


def key_columns(source: Source) -> tuple[str, ...]:
    return _KEYS[source].columns
