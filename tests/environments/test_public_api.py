"""`from atropos import …` gives everything an author needs, and importing `atropos` alone gives nothing heavy."""

import subprocess
import sys

import atropos
import pytest


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_public_name_resolves() -> None:
    for name in atropos.__all__:
        assert getattr(atropos, name) is not None
    assert set(atropos.__all__) <= set(dir(atropos))
    assert len(atropos.__all__) == len(set(atropos.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Enviroment'"):
        _ = atropos.Enviroment


def test_importing_the_package_pulls_in_nothing() -> None:
    loaded = loaded_by("import atropos")
    assert [name for name in loaded if name.startswith("atropos.")] == []
    assert not {"pydantic", "torch", "temporalio"} & loaded


def test_authors_need_no_temporal_store_or_torch() -> None:
    loaded = loaded_by("from atropos import Environment, tool, reward, Task")
    assert not {"temporalio", "sqlalchemy", "torch", "transformers", "httpx", "reasoning_gym"} & loaded
