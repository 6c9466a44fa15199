"""Options of `atropos up` that cannot hold: refused, or answered by what a running stack has instead.

Invariant: no option that a person gave is dropped in silence. What contradicts another option, or asks for a part that
is used from elsewhere, is refused before anything is started; what a running stack has its own of is named.
"""

import json
from collections.abc import Collection, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from .errors import CommandError
from .stack.addresses import Address, Addresses, DatabaseAddress, Origin
from .stack.apps import WORKERS
from .stack.files import StackHome
from .stack.state import StackState

_OF_PART: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("model", "seed", "engine_port"),
    "dashboard": ("dashboard_port",),
}
"""Switch → options that mean something only where the switch is on."""
_OF_SERVER: Final[Mapping[str, tuple[str, ...]]] = {
    "temporal": ("temporal_port", "ui_port"),
    "database": ("postgres_port",),
    "engine": ("model", "seed", "engine_port"),
}
_NAMES: Final = {"temporal": "Temporal", "database": "Postgres", "engine": "the engine"}


def spelt(name: str, value: object = None) -> str:
    """A parameter as it is typed."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Raise CommandError for two options (name → value, only those typed) that cannot both hold."""
    for switch, names in _OF_PART.items():
        for name in names:
            if given.get(switch) is False and name in given:
                raise CommandError(
                    f"{spelt(name)} is about the {switch} and {spelt(switch, False)} starts none; "
                    "leave one of them out."
                )
    if "model" in given and "seed" in given:
        raise CommandError("--seed is for making a tiny policy and --model names another one; leave one of them out.")
    ports = {name: port for name, port in given.items() if name.endswith("_port")}
    for one, other in combinations(ports, 2):
        if ports[one] == ports[other]:
            raise CommandError(
                f"{spelt(one)} and {spelt(other)} are both {ports[one]}; each part needs a port of its own."
            )


def refuse_idle(given: Collection[str], addresses: Addresses) -> None:
    """Raise CommandError for an option about a server that is not started, since one from elsewhere is used."""
    for server, names in _OF_SERVER.items():
        address: Address | DatabaseAddress = getattr(addresses, server)
        for name in names:
            if name in given and address.origin in (Origin.SETTINGS, Origin.FOUND):
                raise CommandError(
                    f"{spelt(name)} would have no effect: {_NAMES[server]} at {address.shown()} is used "
                    f"({address.source}) and none is started; leave it out."
                )


def kept_by_running(given: Mapping[str, Any], home: StackHome, state: StackState) -> str | None:
    """What a running stack has otherwise than was asked, and how to change it, in words; None where nothing is."""
    has = _of_running(home, state)
    differences = [
        words for name, wanted in given.items() if (words := _difference(name, wanted, has.get(name))) is not None
    ]
    if not differences:
        return None
    return (
        f"The stack was running already and keeps what it has: {'; '.join(differences)}. "
        "To change that: `atropos down`, then `atropos up` with these options again."
    )


def _difference(name: str, wanted: object, has: object) -> str | None:
    if isinstance(wanted, Path):
        wanted = wanted.expanduser().resolve()
    if wanted == has:
        return None
    if isinstance(wanted, bool):
        return f"not {spelt(name, wanted)}, since it was started {'without' if wanted else 'with'}"
    if has is None:
        return f"not {spelt(name)} {wanted}, since it has no such part"
    return f"{spelt(name)} is {has}, not {wanted}"


def _of_running(home: StackHome, state: StackState) -> dict[str, object]:
    """The options under which a stack would have come up as it is; those of parts that it does not have are absent."""
    parts = {part.name: part for part in state.parts}
    found: dict[str, object] = {
        "engine": "engine" in parts,
        "workers": any(name in WORKERS for name in parts),
        "dashboard": "dashboard" in parts,
    }
    urls = {
        "temporal_port": f"//{state.temporal_address}" if "temporal" in parts else None,
        "ui_port": state.temporal_ui,
        "postgres_port": None if state.database_url is None else state.database_url.get_secret_value(),
        "engine_port": state.engine_url,
        "dashboard_port": parts["dashboard"].address if "dashboard" in parts else None,
    }
    found |= {name: urlsplit(url).port for name, url in urls.items() if url is not None}
    model = home.root / "model"
    if found["engine"] and model.is_dir():
        found["model"] = model.resolve()
        found["seed"] = _seed_of(model)
    return found


def _seed_of(model: Path) -> int | None:
    """The seed that a tiny policy was made with; None for another model."""
    try:
        seed = json.loads((model / "policy.json").read_text("utf-8"))["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None
