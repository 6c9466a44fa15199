"""Groups that were played elsewhere, written into a run of their own.

Invariant: a line's bytes, in `blobs` by their digest, and the group that was made of them are one transaction behind
the lock of the run's row. So a line is in the run exactly where its bytes are, and importing it again, after an
interruption or by two at once, adds nothing. Such a run is `completed` from its first row on: no worker ever begins it
or goes on with it, and only imports add to it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.ids import GroupKey
from ..contracts.runfile import parse_run, why_no_run_id
from ..contracts.states import RunState
from ..contracts.tasks import content_hash
from .calls import call_values
from .encoding import encode, plain_message
from .errors import Refused
from .events import add_event
from .importing_lines import IMPORTED, Line, Member
from .late import params
from .runs import get_run
from .store import Direct, Store
from .turns import turn_values

EVENT: Final = "import"
REF: Final = "import"
"""`environments.ref` of an imported run: nothing can be loaded from there."""
NO_ENGINE: Final = "http://imported.invalid"
"""A run file names an engine; this name is reserved never to exist."""

_CREATE: Final = """
WITH run AS (
  INSERT INTO runs (run_id, name, config, config_hash, seed, state, reason, concurrency, ended_at)
  VALUES (%(run)s, %(name)s, %(config)s::jsonb, %(hash)s, 0, 'completed', %(reason)s, 1, now())
  ON CONFLICT DO NOTHING RETURNING run_id
), environment AS (
  INSERT INTO environments (run_id, label, ref, version, args, group_size, weight, limits)
  SELECT run_id, %(environment)s, %(ref)s, %(version)s, '{}', 1, 1, '{}' FROM run
)
INSERT INTO policy_versions (run_id, version, label) SELECT run_id, 0, %(version)s FROM run
"""
_LOCK: Final = "SELECT next_group_no FROM runs WHERE run_id = %s FOR NO KEY UPDATE"
_KNOWN: Final = "SELECT digest FROM blobs WHERE run_id = %s AND digest = ANY(%s)"
_ADVANCE: Final = "UPDATE runs SET next_group_no = %s, changed_at = now(), ended_at = now() WHERE run_id = %s"
_DRAWN: Final = "UPDATE environments SET next_draw = %s WHERE run_id = %s"
_BLOB: Final = "INSERT INTO blobs (run_id, digest, data) VALUES (%(run)s, %(digest)s, %(data)b)"
_TASK: Final = """
INSERT INTO tasks (run_id, environment, task_key, split, data, info, exact, lossy)
VALUES (%(run)s, %(environment)s, %(task)s, 'train', %(data)s::jsonb, '{}', %(exact)b, %(lossy)s) ON CONFLICT DO NOTHING
"""
_GROUP: Final = """
INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid, mean_reward,
  sampled_tokens, started_at, closed_at, oldest_version)
VALUES (%(run)s, %(group)s, 'train', %(environment)s, %(task)s, %(group)s, %(size)s, 'sealed', %(size)s, %(mean)s,
  %(tokens)s, now(), now(), %(oldest)s)
"""
_EPISODE: Final = """
INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, prompt_exact, lossy, start_state,
  state, stop, reward, turns, sampled_tokens, policy_version, ended_at)
VALUES (%(run)s, %(group)s, %(member)s, 0, %(version)s, %(prompt)s::jsonb, %(exact)b, %(lossy)s, %(state)s::jsonb,
  'done', %(stop)s, %(reward)s, %(turns)s, %(tokens)s, %(oldest)s, now())
"""
_SEGMENT: Final = """
INSERT INTO segments (run_id, group_no, member, attempt, segment, first_turn, agent, prompt)
VALUES (%(run)s, %(group)s, %(member)s, 0, 0, 0, %(agent)s, NULL)
"""
_TURN: Final = """
INSERT INTO turns (run_id, group_no, member, attempt, turn, segment, opens_segment, agent, message, message_exact,
  lossy, prompt_delta, sampled, logprobs, mask, finish, spans, policy_version, temperature, engine_id, incarnation,
  request_id, provisional)
VALUES (%(run)s, %(group)s, %(member)s, 0, %(turn)s, %(segment)s, %(opens)s, %(agent)s, %(message)s::jsonb, %(exact)b,
  %(lossy)s, %(delta)b, %(sampled)b, %(logprobs)b, %(mask)b, %(finish)s, %(spans)s::jsonb, %(version)s, %(temperature)s,
  %(engine)s, %(incarnation)s, %(request)s, false)
"""
_CALL: Final = """
INSERT INTO tool_calls (run_id, group_no, member, attempt, turn, call_index, call, content, error, replies, reward,
  done, truncated, info, exact, lossy, seconds)
VALUES (%(run)s, %(group)s, %(member)s, 0, %(turn)s, %(index)s, %(call)s::jsonb, %(content)s, %(error)s,
  %(replies)s::jsonb, %(reward)s, %(done)s, %(truncated)s, %(info)s::jsonb, %(exact)b, %(lossy)s, %(seconds)s)
"""
_SCORE: Final = """
INSERT INTO scores (run_id, group_no, member, attempt, name, scorer_version, value, weight, metric)
VALUES (%(run)s, %(group)s, %(member)s, 0, %(name)s, %(version)s, %(reward)s, 1, false)
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A line and where it stood."""

    file: str
    number: int
    line: Line


async def open_import(store: Store, run_id: str, environment: str | None, *, standard: str, tokenizer: str) -> str:
    """Make the run unless it is there; the label of its environment.

    `environment`: None takes that of the run, or `standard` for a new one. `tokenizer`: the model's path in a new one.
    Raises Refused where the run is no imported one, has another environment, or cannot be called so.
    """
    no_id = why_no_run_id(run_id)
    if no_id is not None:
        raise Refused(f"{no_id[:1].upper()}{no_id[1:]}.")
    label = environment or standard
    document = {
        "name": run_id.removeprefix("run/")[:63],
        "model": {"path": tokenizer},
        "engines": [{"url": NO_ENGINE}],
        "environments": [{"id": REF, "name": label, "group_size": 1}],
        "budget": {"hours": 1},
    }
    config = parse_run(document).model_dump(mode="json")
    async with store.direct() as connection:
        await connection.execute(
            _CREATE,
            {
                "run": run_id,
                "name": config["name"],
                "config": json.dumps(config),
                "hash": content_hash(config),
                "reason": "it was imported from files",
                "environment": label,
                "ref": REF,
                "version": IMPORTED,
            },
        )
    row = await get_run(store, run_id)
    if row is None or [one.ref for one in row.environments] != [REF] or row.state is not RunState.COMPLETED:
        raise Refused(f"{run_id} is a run that was played here; import into a run of its own, with another --run.")
    [found] = [one.label for one in row.environments]
    if environment not in (None, found):
        raise Refused(
            f"{run_id} holds what was imported as {found!r}; import {environment!r} into a run of its own, with "
            "another --run."
        )
    return found


async def add_lines(store: Store, run_id: str, environment: str, sources: Sequence[Source]) -> list[Source]:
    """Add what the run does not have yet, in one transaction; those that were added. Of equal lines one counts."""
    unique = {source.line.digest: source for source in sources}
    async with store.direct() as connection, connection.transaction():
        row = await (await connection.execute(_LOCK, (run_id,))).fetchone()
        if row is None:
            raise Refused(f"The run {run_id} is gone; somebody pruned it meanwhile.")
        known = await (await connection.execute(_KNOWN, (run_id, list(unique)))).fetchall()
        for (digest,) in known:
            del unique[digest]
        new = list(unique.values())
        if not new:
            return []
        rows = _Rows(environment)
        for number, source in enumerate(new, row[0]):
            rows.add(GroupKey(run_id=run_id, group_no=number), source)
        await rows.write(connection)
        await connection.execute(_ADVANCE, (row[0] + len(new), run_id))
        await connection.execute(_DRAWN, (row[0] + len(new), run_id))
    return new


async def note_import(store: Store, run_id: str, file: str, added: int, known: int, refused: int) -> None:
    """Write down that a file was read to its end, where that added something."""
    if added:
        text = f"{added} groups were imported from {file}"
        text += f"; {known} lines were there already" if known else ""
        text += f"; {refused} bad lines were left out" if refused else ""
        data = {"file": file, "added": added, "known": known, "refused": refused}
        await add_event(store, run_id, EVENT, text, data)


class _Rows:
    """Values of the rows of many groups, by statement, in the order in which they have to be written."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._values: dict[str, list[dict[str, Any]]] = {
            statement: [] for statement in (_BLOB, _TASK, _GROUP, _EPISODE, _SEGMENT, _TURN, _CALL, _SCORE)
        }

    def add(self, key: GroupKey, source: Source) -> None:
        line = source.line
        group = {"run": key.run_id, "group": key.group_no, "environment": self._environment}
        self._put(_BLOB, group, digest=line.digest, data=line.raw)
        prompt = [plain_message(message) for message in line.members[0].prompt]
        data = encode([{"prompt": prompt}, {}])
        task = content_hash({"prompt": prompt})
        shown = json.dumps(json.loads(data.display)[0])
        self._put(_TASK, group, task=task, data=shown, exact=data.exact, lossy=data.lossy)
        sampled = sum(member.sampled for member in line.members)
        self._put(
            _GROUP,
            group,
            task=task,
            size=len(line.members),
            mean=line.mean_reward,
            tokens=sampled,
            oldest=0 if sampled else None,
        )
        for index, member in enumerate(line.members):
            self._add_member(params(key.episode(index)), member, source)

    def _add_member(self, key: dict[str, Any], member: Member, source: Source) -> None:
        prompt = encode([plain_message(message) for message in member.prompt])
        where = encode({IMPORTED: {"file": source.file, "line": source.number, "digest": source.line.digest}})
        self._put(
            _EPISODE,
            key,
            version=IMPORTED,
            prompt=prompt.display,
            exact=prompt.exact,
            lossy=prompt.lossy,
            state=where.display,
            stop=member.stop,
            reward=member.reward,
            turns=len(member.turns),
            tokens=member.sampled,
            oldest=0 if member.sampled else None,
        )
        turns = [turn_values(turn) for turn in member.turns]
        self._put(_SEGMENT, key, agent=turns[0]["agent"])
        for turn in turns:
            self._put(_TURN, key, **turn)
        for call in member.calls:
            self._put(_CALL, key, **call_values(call))
        if member.reward is not None:
            self._put(_SCORE, key, name=source.line.score, version=IMPORTED, reward=member.reward)

    def _put(self, statement: str, key: dict[str, Any], **values: Any) -> None:
        self._values[statement].append(key | values)

    async def write(self, connection: Direct) -> None:
        async with connection.cursor() as cursor:
            for statement, values in self._values.items():
                if values:
                    await cursor.executemany(statement.encode(), values)
