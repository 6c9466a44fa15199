"""Search attributes of our workflows: one table, read by whoever registers them and by whoever sets them.

A workflow task that sets an attribute the server does not know fails for ever, so no name is spelt elsewhere.
"""

from typing import Final

RUN: Final = "AtroposRun"
ENVIRONMENT: Final = "AtroposEnvironment"
TASK: Final = "AtroposTask"
POLICY_VERSION: Final = "AtroposPolicyVersion"
REWARD: Final = "AtroposReward"
STOP_REASON: Final = "AtroposStopReason"

SEARCH_ATTRIBUTES: Final[dict[str, str]] = {
    RUN: "Keyword",
    ENVIRONMENT: "Keyword",
    TASK: "Keyword",
    POLICY_VERSION: "Int",
    REWARD: "Double",
    STOP_REASON: "Keyword",
}
"""Name → Temporal's type name, as `temporal operator search-attribute create --type` spells it."""
