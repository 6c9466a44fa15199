"""Everything that is shown of an attempt of an episode, wherever it is shown.

Invariant: it is what the rows say; an episode that does not exist is answered with what there is instead.
"""

import math
from dataclasses import dataclass
from typing import Final

from ..contracts.episode import Episode, Score
from ..contracts.ids import EpisodeKey
from ..contracts.messages import ImagePart, Message
from ..contracts.records import EpisodeFacts, TurnRecord
from .episodes import episode_scores, episode_view, load_episode
from .errors import Unknown
from .groups import GroupFacts, load_group
from .late import params
from .runs import RunRow
from .scores import scores_beside
from .store import Store

_REASON: Final = """
SELECT reason FROM episodes
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
"""


@dataclass(frozen=True)
class Shown:
    """What is shown of an episode."""

    run: RunRow
    facts: EpisodeFacts
    scores: tuple[Score, ...]
    reason: str | None
    """What went wrong, in words."""
    beside: tuple[tuple[str, Score], ...] = ()
    """Scores of other versions, which do not count for the reward: version and score, in the order of writing."""

    @property
    def episode(self) -> Episode:
        return episode_view(self.facts, self.scores)


async def load_shown(store: Store, row: RunRow, key: EpisodeKey) -> Shown:
    """The episode. Raises Unknown saying what there is instead."""
    group = await load_group(store, key.group)
    facts = await load_episode(store, key)
    if facts is None:
        raise Unknown(f"There is no episode {key.workflow_id}: {_what_there_is(group)}.")
    async with store.direct() as connection:
        found = await (await connection.execute(_REASON, params(key))).fetchone()
    scores, beside = await episode_scores(store, key), await scores_beside(store, key)
    return Shown(row, facts, tuple(scores), None if found is None else found[0], tuple(beside))


async def check_episode(store: Store, key: EpisodeKey) -> None:
    """See that the attempt has started. Raises Unknown as `load_shown` does."""
    async with store.direct() as connection:
        found = await (await connection.execute(_REASON, params(key))).fetchone()
    if found is None:
        raise Unknown(f"There is no episode {key.workflow_id}: {_what_there_is(await load_group(store, key.group))}.")


def _what_there_is(group: GroupFacts) -> str:
    started = {member.key.member: member.key.attempt for member in group.members}
    where = f"group {group.group.key.group_no} has {group.group.size} episodes"
    if not started:
        return f"{where}, none of which has started"
    retried = [f"{member} (attempts 0 to {attempt})" for member, attempt in started.items() if attempt]
    several = f", retried: {', '.join(retried)}" if retried else ""
    return f"{where}, started: {', '.join(map(str, started))}{several}"


def mean_logprob(record: TurnRecord) -> float | None:
    """Mean log-probability of what a turn sampled; None where it sampled nothing."""
    return math.fsum(record.logprobs) / len(record.logprobs) if record.logprobs else None


def _counts(record: TurnRecord) -> str:
    if record.told_prompt is None and record.told_sampled is None:
        return f"{len(record.prompt_delta)} prompt + {len(record.sampled)} sampled tokens"
    counted = ("?" if count is None else str(count) for count in (record.told_prompt, record.told_sampled))
    return " + ".join(f"{n} {word}" for n, word in zip(counted, ("prompt", "sampled"), strict=True)) + (
        " tokens by the provider's count"
    )


def turn_facts(record: TurnRecord) -> str:
    """How a turn was sampled, on one line."""
    mean = mean_logprob(record)
    versions = ", ".join(dict.fromkeys(f"version {span.version}" for span in record.spans)) or "no version"
    parts = [
        _counts(record),
        "no logprob" if mean is None else f"mean logprob {mean:.3f}",
        versions,
        f"finish {record.finish}",
    ]
    if record.opens_segment and record.turn > 0:
        parts.append(f"opens segment {record.segment}")
    if record.provisional:
        parts.append("provisional")
    return ", ".join(parts)


def content_text(message: Message) -> str:
    """Text of a message; images by the beginning of their address."""
    if isinstance(message.content, str):
        return message.content
    parts = (f"[image {part.url[:60]}]" if isinstance(part, ImagePart) else part.text for part in message.content)
    return "".join(parts)
