"""The same workflows with every step a scheduled activity: what most integrations do, as the baseline.

Loaded in the workflow sandbox like the product's, and like them it writes every row.
"""

from atropos.workflows import episode, group
from atropos.workflows.calls import scheduled

episode.quick = scheduled  # type: ignore[attr-defined]
group.quick = scheduled  # type: ignore[attr-defined]

EpisodeWorkflow = episode.EpisodeWorkflow
GroupWorkflow = group.GroupWorkflow
