import json
from datetime import UTC, datetime, timedelta

import openai
import pytest

from service.webhooks import Delivery, WebhookUrlError, check_url, next_try, sign_message

SECRET = "whsec_QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB"
NOW = datetime(2026, 1, 2, 12, 0, 0, 700_000, tzinfo=UTC)


def delivery() -> Delivery:
    return Delivery(
        event_id="evt_1",
        endpoint_id="we_1",
        batch_id="batch_1",
        type="batch.failed",
        created_at=NOW,
        attempts=1,
        url="https://host.example/hook",
        secret="encrypted",
    )


@pytest.mark.parametrize(
    "url",
    [
        "https://host.example/hook?x=1",
        "http://8.8.8.8:8080/",
        "http://[2606:4700::1111]/",
        "http://receiver/",
        "HTTPS://HOST/",
    ],
)
def test_url_of_a_public_host_is_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/", "must start with http"),
        ("host/path", "must start with http"),
        ("https:///path", "name a host"),
        ("https://user:secret@host/", "no user name or password"),
        ("https://:@host/", "no user name or password"),
        ("https://host:99999/", "cannot be read"),
        ("https://[::1/", "cannot be read"),
        ("https://höst/", "printable ASCII"),
        ("https://host/a b", "without spaces"),
        ("https://host/\nx", "printable ASCII"),
        ("https://host/" + "x" * 2_048, "at most 2048"),
        ("http://169.254.169.254/latest/meta-data/", "is link-local"),
        ("http://[fe80::1]/", "is link-local"),
        ("http://[::ffff:169.254.169.254]/", "is link-local"),
        ("http://[fd00:ec2::254]/", "is link-local"),
    ],
)
def test_forbidden_url_is_refused_with_the_reason(url: str, message: str) -> None:
    with pytest.raises(WebhookUrlError, match=message) as raised:
        check_url(url)
    assert "secret" not in str(raised.value)


def test_message_has_only_the_id_of_the_batch() -> None:
    content = json.loads(sign_message(delivery(), SECRET, NOW)[0])
    assert content == {
        "id": "evt_1",
        "object": "event",
        "created_at": int(NOW.timestamp()),
        "type": "batch.failed",
        "data": {"id": "batch_1"},
    }


def test_official_client_verifies_a_message_and_refuses_another_secret() -> None:
    now = datetime.now(UTC)
    content, headers = sign_message(delivery(), SECRET, now)
    client = openai.OpenAI(api_key="x")
    event = client.webhooks.unwrap(content, headers, secret=SECRET)
    assert (event.type, event.data.id) == ("batch.failed", "batch_1")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(content, headers, secret="whsec_QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJC")


def test_later_attempt_has_the_same_id_and_content_and_a_new_timestamp() -> None:
    first_content, first = sign_message(delivery(), SECRET, NOW)
    second_content, second = sign_message(delivery(), SECRET, NOW + timedelta(hours=1))
    assert (first_content, first["webhook-id"]) == (second_content, second["webhook-id"])
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 3_600


@pytest.mark.parametrize(("attempts", "pause_s"), [(1, 5), (2, 10), (5, 80), (12, 10_240), (13, 14_400), (99, 14_400)])
def test_pauses_double_up_to_four_hours_with_jitter(attempts: int, pause_s: int) -> None:
    pauses = {(next_try(NOW, attempts, NOW) or NOW) - NOW for _ in range(20)}
    assert all(0.8 * pause_s <= pause.total_seconds() <= 1.2 * pause_s for pause in pauses)
    assert len(pauses) > 1


def test_message_is_given_up_after_72_hours() -> None:
    assert next_try(NOW, 20, NOW + timedelta(hours=60)) is not None
    assert next_try(NOW, 20, NOW + timedelta(hours=71)) is None
