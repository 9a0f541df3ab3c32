import base64
import secrets

import pytest

from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import RunKey, key_problem, new_api_key
from langchain_art.wire.redaction import REDACTED, Redactor, redact, redact_values
from langchain_art_server.config import load_settings


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-" + "a1B2c3D4" * 4,
        "sk-ant-api03-" + "a1B2c3D4" * 4,
        "ghp_" + "a1B2c3D4" * 4,
        "github_pat_" + "a1B2c3D4" * 4,
        *(f"gh{kind}_" + "a1B2c3D4" * 4 for kind in "osur"),
        "glpat-" + "a1B2c3D4" * 4,
        RunKey.of("key", "run-17", 1e9).text,
        "AKIA" + "ABCD1234" * 2,
        "ASIA" + "ABCD1234" * 2,
        "AIza" + "a1B2c3D4" * 4,
        "lsv2_" + "a1B2c3D4" * 4,
        "hf_" + "aBcD1234" * 4,
        "xoxb-1234567890-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIB\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_found_wherever_it_stands(secret: str) -> None:
    assert redact(f"My key is {secret}, keep it.") == f"My key is {REDACTED}, keep it."
    shown = redact_values({"metadata": [{"note": secret}], "n": 1, "none": None})
    assert shown == {"metadata": [{"note": REDACTED}], "n": 1, "none": None}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdefghijklmnop0123", f"Authorization: Bearer {REDACTED}"),
        ("postgresql://art:hunter2@db/art", f"postgresql://{REDACTED}@db/art"),
        ('{"password": "hunter22", "user": "ann"}', f'{{"{REDACTED}", "user": "ann"}}'),
        ("api_key=abcdef123456; next", f"{REDACTED}; next"),
        ("API-KEY: abcdef123456; next", f"{REDACTED}; next"),
        ("apikey=abcdef123456; next", f"{REDACTED}; next"),
        ("PASSWD=hunter22 next", f"{REDACTED} next"),
        ("Authorization: basic YXJ0OmFydDphcnQ6YXJ0", f"Authorization: basic {REDACTED}"),
    ],
)
def test_what_names_a_secret_tells_it(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "When is the falcon review? At https://example.com/a:b it says token 5 of 300.",
        "tiny@3 serves; max_tokens: 1024, total tokens: 123456",
        "chatcmpl-000641a2b3c4d5e6f7a8b9c0d1e2f3 was sampled",
        "The secret of a good risotto is patience.",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_it_takes_a_time_that_grows_with_the_text_alone() -> None:
    redact("sk-" * 100_000 + "eyJ" * 100_000 + "password:" * 50_000 + "-----BEGIN " * 20_000)


def test_an_entry_that_is_named_as_a_secret_is_one() -> None:
    given = {"password": "hunter22", "db_token": "abcdef1", "tokens": "many words", "token": "17"}
    redactor = Redactor()
    shown = redactor.value({"metadata": [given], "api-key": "abcdef", "secret": 17})
    kept = {"tokens": "many words", "token": "17"}
    hidden = {"password": REDACTED, "db_token": REDACTED}
    assert shown == {"metadata": [hidden | kept], "api-key": REDACTED, "secret": 17}
    assert redactor.count == 3
    redactor.value(["sk-" + "a1B2" * 6 + " and sk-" + "c3D4" * 6, "nothing"])
    assert redactor.count == 5


def test_random_keys_are_taken() -> None:
    made = {new_api_key() for _ in range(500)}
    assert len(made) == 500
    usual = [secrets.token_hex, lambda n: base64.b64encode(secrets.token_bytes(n)).decode()]
    for key in [*made, *(make(32) for make in usual for _ in range(500))]:
        assert key_problem(key) is None


@pytest.mark.parametrize(
    "key", ["a" * 16, "a" * 64, "0123456789abcdef" * 4, "69ab42fe9705b86f6e8b377cb5b14eb9"]
)
def test_others_are_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ART_API_KEY", key)
    with pytest.raises(ConfigError, match="langchain-art key new") as refused:
        load_settings(model="m")
    assert key not in str(refused.value)
