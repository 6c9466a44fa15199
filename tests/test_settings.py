"""Settings: one place, one sentence for what is wrong, no secret on the outside."""

from pathlib import Path

import pytest
from atropos.settings import (
    SettingsError,
    child_environment,
    load_settings,
    mask_url,
    secret_from_environment,
    temporal_connect_config,
    temporal_profile,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATABASE_URL", "ATROPOS_DATABASE_URL", "ATROPOS_HOME", "ATROPOS_ENGINE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ADDRESS", "NAMESPACE", "PROFILE", "API_KEY", "TLS"):
        monkeypatch.delenv(f"TEMPORAL_{name}", raising=False)
    empty = tmp_path / "temporal.toml"
    empty.write_text("")
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(empty))


def test_nothing_set_gives_defaults() -> None:
    settings = load_settings()
    assert settings.home == Path(".atropos")
    assert settings.database_url is None
    assert settings.log_level == "INFO"


def test_environment_is_read_and_overrides_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@db/x")
    monkeypatch.setenv("ATROPOS_LOG_LEVEL", "debug")
    monkeypatch.setenv("ATROPOS_HOME", "/somewhere")
    settings = load_settings(home=tmp_path)
    assert settings.home == tmp_path
    assert settings.log_level == "DEBUG"
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == "postgresql://u:secret@db/x"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://u:hunter2@db/x"),
        ("ATROPOS_LOG_LEVEL", "loud"),
        ("ATROPOS_MAX_MODEL_CALLS", "many"),
        ("ATROPOS_DATABASE_POOL", "50"),
        ("ATROPOS_ENGINE_URL", "localhost:8000"),
    ],
)
def test_an_unusable_setting_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} is not usable")
    assert "\n" not in sentence
    assert "hunter2" not in sentence


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:pw@host:5432/db", "postgresql://u:***@host:5432/db"),
        ("postgresql://u:p%40w@[::1]:5432/db", "postgresql://u:***@[::1]:5432/db"),
        ("postgresql://host/db", "postgresql://host/db"),
        ("postgresql://host/db?user=u&password=pw", "postgresql://host/db?user=u&password=***"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("postgresql://u:pw@host:notaport/db", "***"),
    ],
)
def test_masked_urls_show_no_password(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_temporal_address_comes_from_the_environment_or_a_profile_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert temporal_profile().address is None
    (tmp_path / "temporal.toml").write_text(
        '[profile.default]\naddress = "file:1"\n[profile.rl]\naddress = "rl:2"\nnamespace = "training"\n'
    )
    assert (temporal_profile().address, temporal_profile().source) == ("file:1", "profile file")
    monkeypatch.setenv("TEMPORAL_PROFILE", "rl")
    assert (temporal_profile().address, temporal_profile().namespace) == ("rl:2", "training")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "env:3")
    assert (temporal_profile().address, temporal_profile().source) == ("env:3", "TEMPORAL_ADDRESS")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_postgres_url_becomes_the_plain_one(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("DATABASE_URL", f"{scheme}://u:p@h:1/d")
    url = load_settings().database_url
    assert url is not None
    assert url.get_secret_value() == "postgresql://u:p@h:1/d"


def test_a_missing_profile_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEMPORAL_PROFILE", "absent")
    with pytest.raises(SettingsError, match="TEMPORAL_PROFILE"):
        temporal_profile()
    (tmp_path / "temporal.toml").write_text("not = [toml")
    monkeypatch.delenv("TEMPORAL_PROFILE")
    with pytest.raises(SettingsError, match="profile file"):
        temporal_profile()


def test_credentials_of_a_profile_are_not_sent_to_a_local_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_API_KEY", "key")
    assert temporal_connect_config("127.0.0.1:1") == {"target_host": "127.0.0.1:1", "namespace": "default"}
    monkeypatch.setenv("TEMPORAL_ADDRESS", "cloud:7233")
    config = temporal_connect_config("127.0.0.1:1")
    assert (config["target_host"], config["api_key"], config["tls"]) == ("cloud:7233", "key", True)


@pytest.mark.parametrize("address", ["127.0.0.1:7233", "a-host.example.com:443", "[::1]:7233", "temporal_1:65535"])
def test_a_host_and_a_port_are_an_address_of_temporal(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", address)
    assert temporal_profile().address == address


@pytest.mark.parametrize(
    "address",
    [
        "rubbish", "host:", ":7233", "host:99999", "host:0", "host:port", "http://host:7233", "host:7233/x", "a b:7233",
        " host:7233", "host:7233 ", "host:7233\n", "::1:7233", "user:hunter2@host:7233", "hö:7233", "x" * 1000,
    ],
)  # fmt: skip
def test_an_address_of_temporal_that_is_none_is_refused_before_anything_connects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", address)
    for ask in (temporal_profile, temporal_connect_config):
        with pytest.raises(SettingsError) as refused:
            ask()
        sentence = str(refused.value)
        assert sentence.startswith(
            "TEMPORAL_ADDRESS is not usable: it must look like host:port, such as 127.0.0.1:7233"
        )
        assert "\n" not in sentence
        assert len(sentence) < 200
        assert "hunter2" not in sentence
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    (tmp_path / "temporal.toml").write_text('[profile.default]\naddress = "http://host:1"\n')
    with pytest.raises(SettingsError, match="The address in Temporal's profile file is not usable"):
        temporal_profile()


def test_no_temporal_address_anywhere_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match="atropos up"):
        temporal_connect_config()


def test_servers_do_not_inherit_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key")
    assert secret_from_environment("SOME_API_KEY") == "key"
    assert secret_from_environment("NO_SUCH_KEY") is None
    assert "SOME_API_KEY" not in child_environment({}, inherit=False)
    assert "PATH" in child_environment({}, inherit=False)
    assert child_environment({"SOME_API_KEY": None, "A": "b"}, inherit=True)["A"] == "b"
    assert "SOME_API_KEY" not in child_environment({"SOME_API_KEY": None}, inherit=True)
