"""What a user is told when the store cannot be used: what happened, where, what to do; and never a secret."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_stream.config import StoreSettings
from dflash_stream.store import Store, StoreError, open_store
from dflash_stream.store.faults import scrub, scrub_url
from launch.s3_server import SECRET_KEY, S3Server
from tests.store.fault_proxy import FaultProxy, Forward, Reply, Request, answer, refuse

KEY, SECRET, TOKEN = "AKIATESTTESTTEST", "very-secret-key", "very-secret-token"


def complaint(settings: StoreSettings) -> str:
    """What `check` says of a store."""
    with pytest.raises(StoreError) as raised:
        open_store(settings).check()
    said = str(raised.value)
    assert not any(secret in said for secret in (SECRET, TOKEN, SECRET_KEY, "Signature="))
    return said


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that no server knows."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)


@pytest.fixture
def fake(s3_server: S3Server, credentials: None) -> Iterator[FaultProxy]:
    """A store whose every answer is made up."""
    with FaultProxy() as running:
        yield running


def at(fake: FaultProxy, **more: object) -> StoreSettings:
    return StoreSettings.model_validate(
        {"url": "s3://bucket/run", "endpoint": fake.endpoint, "deadline_s": 2} | more
    )


# --- a real server


def test_wrong_credentials_are_named(s3_server: S3Server, s3_url: str, credentials: None) -> None:
    said = complaint(StoreSettings(url=s3_url, endpoint=s3_server.endpoint))
    assert "403" in said
    assert s3_url in said
    assert "AWS_ACCESS_KEY_ID" in said


def test_a_refused_head_is_told_once(s3_server: S3Server, s3_url: str, credentials: None) -> None:
    with pytest.raises(StoreError, match=r"answered 403 \(Forbidden\)\. Check the credentials"):
        open_store(StoreSettings(url=s3_url, endpoint=s3_server.endpoint)).head("run.json")


def test_a_wrong_secret_is_named(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    said = complaint(StoreSettings(url=s3_url))
    assert "SignatureDoesNotMatch" in said
    assert "Check the credentials" in said


def test_a_missing_bucket_is_named(s3_server: S3Server) -> None:
    said = complaint(StoreSettings(url="s3://no-such-bucket/run"))
    assert "NoSuchBucket" in said
    assert "Create the bucket, or correct --store.url" in said


def test_missing_credentials_are_named(
    s3_server: S3Server, s3_url: str, credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    said = complaint(StoreSettings(url=s3_url, endpoint=s3_server.endpoint))
    assert "no credentials were found" in said
    assert "AWS_PROFILE" in said


# --- endpoints that are none


def test_an_endpoint_where_nobody_listens_is_named(s3_server: S3Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    said = complaint(StoreSettings(url="s3://b/run", endpoint=endpoint, deadline_s=0.5))
    assert endpoint in said
    assert "attempts" in said
    assert "--store.endpoint" in said


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "not a url", "ftp://x"])
def test_an_endpoint_that_is_no_url_is_refused_at_once(endpoint: str, credentials: None) -> None:
    with pytest.raises(StoreError, match=r"--store\.endpoint"):
        open_store(StoreSettings(url="s3://b/run", endpoint=endpoint, deadline_s=0.5)).check()


def test_a_web_server_that_is_no_store_is_named(fake: FaultProxy) -> None:
    fake.on("PUT", answer(200, b"<html>hello</html>"), times=99)
    assert "--store.endpoint" in complaint(at(fake, deadline_s=60))


def test_an_endpoint_from_the_environment_is_used_with_the_bucket_in_the_path(
    fake: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by name: before a numeric address boto3 never puts the bucket
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", fake.endpoint.replace("127.0.0.1", "localhost"))
    open_store(StoreSettings(url="s3://bucket/run", deadline_s=5)).put("k", b"x")
    assert fake.log[0].target == "PUT /bucket/run/k"


# --- refusals


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "AccessDenied", "s3:PutObject"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "The session token has expired: obtain new credentials"),
        (301, "PermanentRedirect", "--store.region"),
        (400, "AuthorizationHeaderMalformed", "--store.region"),
        (403, "RequestTimeTooSkewed", "clock"),
        (501, "NotImplemented", "--store.checksums false"),
        (400, "BadDigest", "damaged on the way"),
        (507, "InsufficientStorage", "full"),
    ],
)
def test_a_refusal_comes_with_what_to_do(fake: FaultProxy, status: int, code: str, remedy: str) -> None:
    fake.on("PUT", refuse(status, code), times=99)
    fake.on("HEAD", answer(404), times=99)  # after a 301 botocore asks where the bucket is
    said = complaint(at(fake, deadline_s=60))
    assert code in said
    assert remedy in said
    assert "s3://bucket/run/status/probe-" in said


def test_a_store_that_refuses_checksums_is_served_without_them(fake: FaultProxy) -> None:
    def refuse_checksums(request: Request, forward: Forward) -> Reply:
        if any("checksum" in name.lower() for name in request.headers):
            return refuse(400, "InvalidArgument", "x-amz-checksum-crc32c is not supported")(request, forward)  # type: ignore[return-value]
        return Reply(200, [("ETag", '"e"')])

    fake.on("PUT", refuse_checksums, times=99)
    assert "--store.checksums false" in complaint(at(fake))
    open_store(at(fake, checksums=False)).put("k", b"x")


@pytest.mark.parametrize(("condition", "named"), [("If-None-Match", "If-None-Match"), ("If-Match", "If-Match")])
def test_a_store_that_ignores_conditions_is_refused_by_name(
    s3_server: S3Server, s3_url: str, condition: str, named: str
) -> None:
    with FaultProxy(s3_server.endpoint) as proxy:

        def drop(request: Request, forward: Forward) -> Reply:
            if any(name.lower() == condition.lower() for name in request.headers):
                probes = proxy.matching("PUT .*probe")
                return forward() if len(probes) in (1, 3) else Reply(200, [("ETag", '"e"')])
            return forward()

        proxy.on("PUT .*probe", drop, times=99)
        settings = StoreSettings(url=s3_url, endpoint=proxy.endpoint)
        assert f"ignores {named}" in complaint(settings)
        assert list(open_store(settings).list("")) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert str(taken) in complaint(StoreSettings(url=f"file://{taken}/run"))


# --- credentials that run out


def expired_for(key: str) -> object:
    """Refuses requests that are signed with this key."""

    def fault(request: Request, forward: Forward) -> Reply:
        if key in request.headers.get("Authorization", ""):
            return refuse(400, "ExpiredToken", "The provided token has expired.")(request, forward)  # type: ignore[return-value]
        return forward()

    return fault


def test_newer_credentials_are_picked_up_in_the_middle_of_a_run(
    fake: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = open_store(at(fake))
    store.put("k", b"x")
    fake.on("PUT", expired_for(KEY), times=99)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="has expired: obtain new credentials"):
        store.put("k", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEWER")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "newer-token")
    store.put("k", b"x")
    assert "AKIANEWER" in fake.log[-1].headers["Authorization"]


# --- no secret in any message


def test_urls_are_scrubbed() -> None:
    assert scrub_url("https://user:secret@host:9000/path?token=secret") == "https://host:9000/path"
    assert scrub('to "http://user:secret@proxy:1/x"') == 'to "http://proxy:1/x"'
    signed = "https://b.s3.aws/k?X-Amz-Credential=secret&X-Amz-Signature=secret done"
    assert scrub(signed) == "https://b.s3.aws/k?… done"


def test_secrets_in_the_endpoint_are_not_repeated(credentials: None) -> None:
    settings = StoreSettings(url="s3://b/run", endpoint="http://me:hush@127.0.0.1:1", deadline_s=0.2)
    assert "hush" not in complaint(settings)
