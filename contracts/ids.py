"""Identities: who a row or a workflow is, and how its id is spelt.

Invariant: an id is a pure function of (run, group, member, attempt), so starting something twice names the same
thing twice and the second start finds the first. A run's id is its workflow's id.
"""

from __future__ import annotations

import re

from .base import Wire

_EPISODE = re.compile(r"^(?P<run>.+)/group/(?P<group>\d+)/episode/(?P<member>\d+)(?:/attempt/(?P<attempt>\d+))?$")


class GroupKey(Wire):
    """A group of a run: all attempts of G episodes of one task."""

    run_id: str
    group_no: int

    @property
    def workflow_id(self) -> str:
        return f"{self.run_id}/group/{self.group_no}"

    def episode(self, member: int, attempt: int = 0) -> EpisodeKey:
        return EpisodeKey(run_id=self.run_id, group_no=self.group_no, member=member, attempt=attempt)


class EpisodeKey(Wire):
    """One attempt of one member of a group. `attempt` is ours, raised only by a group's top-up or restart."""

    run_id: str
    group_no: int
    member: int
    attempt: int = 0

    @property
    def group(self) -> GroupKey:
        return GroupKey(run_id=self.run_id, group_no=self.group_no)

    @property
    def workflow_id(self) -> str:
        suffix = f"/attempt/{self.attempt}" if self.attempt else ""
        return f"{self.run_id}/group/{self.group_no}/episode/{self.member}{suffix}"

    @classmethod
    def parse(cls, text: str) -> EpisodeKey:
        """Read an episode's workflow id back. Raises ValueError with the expected form."""
        match = _EPISODE.match(text)
        if match is None:
            raise ValueError(f"{text!r} is no episode id; it looks like run/NAME/group/12/episode/3")
        return cls(
            run_id=match["run"],
            group_no=int(match["group"]),
            member=int(match["member"]),
            attempt=int(match["attempt"] or 0),
        )


def rollout_workflow_id(run_id: str) -> str:
    return f"{run_id}/rollout"


def trainer_workflow_id(run_id: str) -> str:
    return f"{run_id}/trainer"


def weight_label(run_id: str, version: int) -> str:
    """What engines call a version of the run's weights."""
    return f"{run_id}@{version}"


def evaluation_workflow_id(run_id: str, name: str) -> str:
    return f"{run_id}/evaluation/{name}"
