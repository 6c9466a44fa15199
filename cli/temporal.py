"""Connecting to Temporal, and making a server fit for our workflows.

Invariant: nothing runs against a server that lacks our search attributes, since a workflow task that sets an unknown
one fails for ever. What is missing is registered; where that is not allowed, one sentence says what to run.
"""

import asyncio
import re
from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from ..contracts.search import SEARCH_ATTRIBUTES
from ..settings import temporal_connect_config
from ..workflows.plugin import AtroposPlugin

RETENTION = timedelta(days=30)
_TYPES = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "Double": IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}
_CONNECT_S = 10.0


class TemporalUnready(Exception):
    """Temporal cannot be used as it is; the message is one sentence that says what to do."""


async def connect(address: str | None) -> Client:
    """A client with our plugin. Raises TemporalUnready where nothing answers."""
    config = temporal_connect_config(address)
    target = config.get("target_host") or address or "?"
    try:
        client = await asyncio.wait_for(Client.connect(**config, plugins=[AtroposPlugin()]), _CONNECT_S)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
        return client
    except RPCError as error:
        raise TemporalUnready(
            f"Temporal at {target} refuses the namespace {config.get('namespace') or 'default'!r} ({error.message}); "
            "set TEMPORAL_NAMESPACE to one that exists, or ask for access."
        ) from None
    except (RuntimeError, OSError, TimeoutError) as error:
        found = re.search(r'message: "([^"]+)"', str(error))
        reason = found[1] if found else (str(error).splitlines() or ["no answer"])[0]
        raise TemporalUnready(
            f"Temporal does not answer at {target} ({reason}); start it with `atropos up` or "
            "`temporal server start-dev`, or set TEMPORAL_ADDRESS."
        ) from None


async def prepare(client: Client) -> list[str]:
    """Register our search attributes and ask for 30 days of retention; returns sentences worth a warning."""
    await _register_attributes(client)
    return await _ask_for_retention(client)


async def _register_attributes(client: Client) -> None:
    try:
        known = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
        for name, kind in SEARCH_ATTRIBUTES.items():
            if known.custom_attributes.get(name, _TYPES[kind]) != _TYPES[kind]:
                raise TemporalUnready(
                    f"The search attribute {name} exists with another type than {kind}; remove it, or use a "
                    "namespace of its own for Atropos."
                )
        missing = {
            name: _TYPES[kind] for name, kind in SEARCH_ATTRIBUTES.items() if name not in known.custom_attributes
        }
        if missing:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
            )
    except RPCError as error:
        flags = " ".join(f"--name {name} --type {kind}" for name, kind in SEARCH_ATTRIBUTES.items())
        raise TemporalUnready(
            f"The search attributes cannot be registered ({error.message}); ask an operator to run "
            f"`temporal operator search-attribute create {flags}`."
        ) from None


async def _ask_for_retention(client: Client) -> list[str]:
    """Histories are the replay of a conversation: a day, the dev server's default, is too short for a run."""
    service, namespace = client.workflow_service, client.namespace
    try:
        described = await service.describe_namespace(DescribeNamespaceRequest(namespace=namespace))
        kept = described.config.workflow_execution_retention_ttl.ToTimedelta()
        if kept >= RETENTION:
            return []
        config = NamespaceConfig()
        config.workflow_execution_retention_ttl.FromTimedelta(RETENTION)
        await service.update_namespace(UpdateNamespaceRequest(namespace=namespace, config=config))
    except RPCError as error:
        return [
            f"Histories are not kept for {RETENTION.days} days ({error.message}); ask for "
            f"`temporal operator namespace update -n {namespace} --retention {RETENTION.days}d`."
        ]
    return []
