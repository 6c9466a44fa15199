"""A group that was played elsewhere, stored whole.

Invariant: a group is there with all its episodes, turns, calls and scores, sealed, or not at all; the second one for a
position of the environment's order changes nothing. Everything is checked and packed before the transaction begins, so
the run's row, which numbers the groups, is locked for the copying alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from ..contracts.episode import Score, total_reward
from ..contracts.ids import GroupKey
from ..contracts.messages import Message
from ..contracts.reasons import StopReason
from ..contracts.records import BadRecord, CallRecord, NewGroup, TurnRecord
from ..contracts.states import EpisodeState, GroupState
from .calls import call_values
from .encoding import check_bounded, clean, clean_or_none, encode, encode_state, plain_message
from .errors import Refused
from .runs import unknown_run
from .store import Direct, Store
from .turns import turn_values

_NUMBER: Final = """
WITH drawn AS (
  UPDATE environments SET next_draw = greatest(next_draw, %(draw)s + 1)
  WHERE run_id = %(run)s AND label = %(environment)s RETURNING label
)
UPDATE runs SET next_group_no = next_group_no + 1 WHERE run_id = %(run)s AND EXISTS (SELECT FROM drawn)
RETURNING next_group_no - 1
"""
_LOCK: Final = "SELECT FROM runs WHERE run_id = %(run)s FOR NO KEY UPDATE"
_KNOWN: Final = """
SELECT group_no FROM groups
WHERE run_id = %(run)s AND environment = %(environment)s AND draw = %(draw)s AND kind = 'train'
"""
_TASK: Final = """
INSERT INTO tasks (run_id, environment, task_key, split, data, info, exact, lossy)
VALUES (%(run)s, %(environment)s, %(task)s, %(split)s, %(data)s::jsonb, %(info)s::jsonb, %(exact)b, %(lossy)s)
ON CONFLICT DO NOTHING
"""
_BLOB: Final = "INSERT INTO blobs (run_id, digest, data) VALUES (%(run)s, %(digest)s, %(data)b) ON CONFLICT DO NOTHING"

_EPISODE: Final = {"run_id": "text", "group_no": "int4", "member": "int4", "attempt": "int4"}
_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "groups": {
        "run_id": "text", "group_no": "int4", "kind": "text", "environment": "text", "task_key": "text", "draw": "int8",
        "size": "int4", "state": "text", "valid": "int4", "mean_reward": "float8", "sampled_tokens": "int8",
        "oldest_version": "int4", "started_at": "timestamptz", "closed_at": "timestamptz",
    },
    "episodes": {
        **_EPISODE, "environment_version": "text", "prompt": "jsonb", "prompt_exact": "bytea", "lossy": "bool",
        "start_state": "jsonb", "start_state_blob": "text", "state": "text", "stop": "text", "reward": "float8",
        "turns": "int4", "sampled_tokens": "int4", "policy_version": "int4", "ended_at": "timestamptz",
    },
    "segments": {**_EPISODE, "segment": "int4", "first_turn": "int4", "agent": "text", "prompt": "bytea"},
    "turns": {
        **_EPISODE, "turn": "int4", "segment": "int4", "opens_segment": "bool", "agent": "text", "message": "jsonb",
        "message_exact": "bytea", "lossy": "bool", "prompt_delta": "bytea", "sampled": "bytea", "logprobs": "bytea",
        "mask": "bytea", "finish": "text", "spans": "jsonb", "policy_version": "int4", "temperature": "float8",
        "engine_id": "text", "incarnation": "text", "request_id": "text",
    },
    "tool_calls": {
        **_EPISODE, "turn": "int4", "call_index": "int4", "call": "jsonb", "content": "text", "error": "text",
        "replies": "jsonb", "reward": "float8", "done": "bool", "truncated": "bool", "info": "jsonb", "exact": "bytea",
        "lossy": "bool", "state": "jsonb", "state_blob": "text", "seconds": "float8",
    },
    "scores": {
        **_EPISODE, "name": "text", "scorer_version": "text", "value": "float8", "weight": "float8", "metric": "bool",
    },
}  # fmt: skip
"""Table → columns that are copied, with their types, in the order that foreign keys ask for."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One member of a group, from its prompt to its scores."""

    prompt: Sequence[Message]
    state: dict[str, Any]
    environment_version: str
    turns: Sequence[TurnRecord]
    calls: Sequence[CallRecord]
    stop: StopReason
    scores: Sequence[Score]
    scorer_version: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a group is. `new`: it was stored now."""

    key: GroupKey
    new: bool


async def store_group(store: Store, run_id: str, group: NewGroup, episodes: Sequence[PlayedEpisode]) -> Stored:
    """Store a sealed group of training episodes; where its position was drawn before, that group stands.

    Raises BadRecord for what contradicts itself, Unknown where there is no such run, Refused for what the schema
    forbids.
    """
    if len(episodes) != group.size or not episodes:
        raise BadRecord(f"the group has {len(episodes)} episodes and should have {group.size}, at least one")
    if group.evaluation is not None:
        raise BadRecord("an evaluation's groups are drawn by the evaluation")
    rows = _Rows(group, episodes)
    task = encode([group.task_data, group.task_info])
    values = {
        "run": run_id, "environment": group.environment, "draw": group.draw, "task": group.task_key,
        "split": group.split, "exact": task.exact, "lossy": task.lossy,
        "data": encode(group.task_data).display, "info": encode(group.task_info).display,
    }  # fmt: skip
    async with store.direct() as connection, connection.transaction():
        if not (await connection.execute(_LOCK, values)).rowcount:
            raise unknown_run(run_id)
        known = await (await connection.execute(_KNOWN, values)).fetchone()
        if known is not None:
            return Stored(GroupKey(run_id=run_id, group_no=known[0]), new=False)
        numbered = await (await connection.execute(_NUMBER, values)).fetchone()
        if numbered is None:
            raise Refused(f"The run {run_id} has no environment called {group.environment!r}.")
        async with connection.pipeline():
            await connection.execute(_TASK, values)
            for digest, data in rows.blobs.items():
                await connection.execute(_BLOB, {"run": run_id, "digest": digest, "data": data})
        await rows.copy(connection, run_id, numbered[0])
    return Stored(GroupKey(run_id=run_id, group_no=numbered[0]), new=True)


class _Rows:
    """The rows of a group without its number: by table, values behind those of the key."""

    def __init__(self, group: NewGroup, episodes: Sequence[PlayedEpisode]) -> None:
        self.blobs: dict[str, bytes] = {}
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _COLUMNS}
        self._now = datetime.now(UTC)
        ended = [self._episode(member, episode) for member, episode in enumerate(episodes)]
        rewards = [reward for reward, _, _ in ended if reward is not None]
        self._rows["groups"].append(
            (
                "train", clean(group.environment), clean(group.task_key), group.draw, group.size,
                str(GroupState.SEALED), group.size, sum(rewards) / len(rewards) if rewards else None,
                sum(tokens for _, tokens, _ in ended),
                min((version for _, _, version in ended if version is not None), default=None), self._now, self._now,
            )
        )  # fmt: skip

    def _episode(self, member: int, episode: PlayedEpisode) -> tuple[float | None, int, int | None]:
        """Its rows; its reward, its sampled tokens and the oldest version that sampled one."""
        who = (member, 0)
        turns = [turn_values(turn) for turn in episode.turns]
        for turn in turns:
            self._turn(who, turn)
        for call in episode.calls:
            self._call(who, call)
        for score in episode.scores:
            check_bounded((score.value, score.weight), f"score {score.name!r}: a value or weight")
            self._rows["scores"].append(
                (*who, clean(score.name), clean(episode.scorer_version), score.value, score.weight, score.metric)
            )
        reward = total_reward(tuple(episode.scores))
        tokens = sum(len(turn.sampled) for turn in episode.turns)
        version = min((turn["version"] for turn in turns if turn["version"] is not None), default=None)
        prompt, state = encode([plain_message(one) for one in episode.prompt]), encode_state(episode.state)
        if state.digest is not None and state.data is not None:
            self.blobs[state.digest] = state.data
        self._rows["episodes"].append(
            (
                *who, clean(episode.environment_version), _json(prompt.display), prompt.exact, prompt.lossy,
                _json(state.inline), state.digest, str(EpisodeState.DONE), str(episode.stop), reward, len(turns),
                tokens, version, self._now,
            )
        )  # fmt: skip
        return reward, tokens, version

    def _turn(self, who: tuple[int, int], turn: dict[str, Any]) -> None:
        if turn["opens"]:
            self._rows["segments"].append((*who, turn["segment"], turn["turn"], turn["agent"], turn["prompt"]))
        self._rows["turns"].append(
            (
                *who, turn["turn"], turn["segment"], turn["opens"], turn["agent"], _json(turn["message"]),
                turn["exact"], turn["lossy"], turn["delta"], turn["sampled"], turn["logprobs"], turn["mask"],
                str(turn["finish"]), _json(turn["spans"]), turn["version"], turn["temperature"], turn["engine"],
                turn["incarnation"], turn["request"],
            )
        )  # fmt: skip

    def _call(self, who: tuple[int, int], record: CallRecord) -> None:
        call = call_values(record)
        if call["digest"] is not None:
            self.blobs[call["digest"]] = call["data"]
        self._rows["tool_calls"].append(
            (
                *who, call["turn"], call["index"], _json(call["call"]), call["content"], clean_or_none(call["error"]),
                _json(call["replies"]), call["reward"], call["done"], call["truncated"], _json(call["info"]),
                call["exact"], call["lossy"], _json(call["state"]), call["digest"], call["seconds"],
            )
        )  # fmt: skip

    async def copy(self, connection: Direct, run_id: str, group_no: int) -> None:
        async with connection.cursor() as cursor:
            for table, columns in _COLUMNS.items():
                if not self._rows[table]:
                    continue
                into = f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)"
                async with cursor.copy(into.encode()) as copying:
                    copying.set_types(list(columns.values()))
                    for row in self._rows[table]:
                        await copying.write_row((run_id, group_no, *row))


def _json(text: str | None) -> Jsonb | None:
    """JSON that is text already."""
    return None if text is None else Jsonb(text, dumps=str)
