"""Episodes this process has read before: only what was added since is read again.

Invariant: the rows decide. What is remembered are turns and calls, which never change once they are stored; state,
status and whatever was added are read each time. Forgetting an episode costs a read, never a result.
"""

from collections import OrderedDict
from typing import Final

from ..contracts.ids import EpisodeKey
from ..contracts.records import EpisodeFacts
from ..db.episodes import load_episode, refresh_episode
from ..db.store import Store

TOKENS_KEPT: Final = 1_000_000
"""Over all remembered episodes: about 100 MB of Python integers and floats."""
_LEAST: Final = 64
"""What an episode weighs before its first token, in tokens."""


class EpisodeMemory:
    """The episodes of one process, the least recently used forgotten first."""

    def __init__(self, store: Store, tokens: int = TOKENS_KEPT) -> None:
        self._store = store
        self._limit = tokens
        self._known: OrderedDict[EpisodeKey, EpisodeFacts] = OrderedDict()
        self._weight = 0

    async def episode(self, key: EpisodeKey) -> EpisodeFacts | None:
        """The episode as far as it is stored, or None."""
        known = self._known.get(key)
        facts = await (load_episode(self._store, key) if known is None else refresh_episode(self._store, known))
        return None if facts is None else self.keep(facts)

    def keep(self, facts: EpisodeFacts) -> EpisodeFacts:
        """Remember what was just read, and return it."""
        self.forget(facts.key)
        self._known[facts.key] = facts
        self._weight += _weight(facts)
        while self._weight > self._limit and len(self._known) > 1:
            self.forget(next(iter(self._known)))
        return facts

    def forget(self, key: EpisodeKey) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._weight -= _weight(known)


def _weight(facts: EpisodeFacts) -> int:
    return _LEAST + sum(len(turn.prompt_delta) + len(turn.sampled) for turn in facts.turns)
