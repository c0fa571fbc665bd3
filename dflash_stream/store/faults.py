"""What a failed S3 request means: whether to try again, and what to tell the user.

One table of error codes and one of client-side exceptions. No message holds a key, a token or a signature.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.exceptions import ClientError
from urllib3.exceptions import HTTPError

from dflash_stream.store.base import NotFound, ObjectChanged, PreconditionFailed, StoreError
from dflash_stream.store.retry import Fault, Kind

_CREDENTIALS = (
    "Check the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in AWS_PROFILE, "
    "or the role of the machine"
)
_EXPIRED = "The session token has expired: obtain new credentials and start again; finished work is kept"
_REGION = "The bucket is in another region: set --store.region, and --store.endpoint for a store other than AWS"
_RIGHTS = (
    "The credentials need s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, s3:ListBucket "
    "(without it a missing object looks forbidden) and s3:ListBucketMultipartUploads on this bucket and prefix"
)
_FULL = "The store is full: free space or raise the quota"
_REACH = "Check --store.endpoint (or AWS_ENDPOINT_URL_S3) and that the store is up"
_FEWER = "The store wants fewer requests: lower --store.max_concurrent_uploads and --stream.threads"
_CHECKSUM = "A store that does not know CRC32C checksums works with --store.checksums false"

_THROTTLING = {
    "SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException",
    "TooManyRequests", "ThrottledException", "RequestThrottled", "RequestThrottledException",
    "BandwidthLimitExceeded",
}  # fmt: skip
_TRANSIENT = {
    "InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted",
    "ConditionalRequestConflict",
}  # fmt: skip
_NOT_FOUND = {"NoSuchKey", "NoSuchUpload", "NotFound"}
_DAMAGED = {
    "BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_REMEDIES = {
    "NoSuchBucket": "Create the bucket, or correct --store.url",
    "InvalidBucketName": "Correct the bucket in --store.url",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": _RIGHTS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": "Set this machine's clock",
    "EntityTooSmall": "Raise --store.part_bytes",
    "EntityTooLarge": "Lower --store.part_bytes",
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
}
_BY_STATUS = {
    "400": "An answer without a reason: often an expired session token or a wrong region",
    "301": _REMEDIES["PermanentRedirect"],
    "401": _CREDENTIALS,
    "403": f"{_CREDENTIALS}. {_RIGHTS}",
    "404": "Check bucket and --store.url",
    "501": f"The store does not implement this request. {_CHECKSUM}",
}


_TRANSPORT = (
    boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, HTTPError, OSError, EOFError
)  # fmt: skip


class BadAnswer(Exception):  # noqa: N818
    """The store answered, but not what was asked for. The arguments are those of a Fault."""

    def __init__(self, cause: str, kind: Kind, remedy: str = "", *, may_have_acted: bool = False) -> None:
        super().__init__(cause)
        self.fault = Fault(kind, cause, remedy, may_have_acted=may_have_acted)


def classify(error: Exception) -> Fault:
    """The Fault of an exception from a request or from reading its body; any other is raised again."""
    if isinstance(error, ClientError):
        return _of_answer(error)
    if isinstance(error, BadAnswer):
        return error.fault
    if isinstance(error, StoreError):
        raise error
    return _of_client(error)


def is_expired(error: Exception) -> bool:
    """Whether the store refused a request for credentials that have run out."""
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return code in ("ExpiredToken", "TokenRefreshRequired")


def _of_answer(error: ClientError) -> Fault:
    """An error that the store itself reported, by its code first and its status second."""
    response = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = scrub(str(response.get("Error", {}).get("Message", "")))
    # The answer to a HEAD has no body that names the error: its code is the status again.
    named = f" {code}" if code not in ("", str(status)) else ""
    cause = f"the store answered {status}{named}" + (f" ({message})" if message not in ("", code) else "")
    if status == 412 or code == "PreconditionFailed":
        if error.operation_name == "GetObject":
            return Fault(
                Kind.FINAL, "the object has been replaced since its etag was read", error=ObjectChanged
            )
        return Fault(Kind.FINAL, "the object is not as the condition wants it", error=PreconditionFailed)
    if code in _NOT_FOUND or (status == 404 and code in ("404", "")):
        missing = "upload" if code == "NoSuchUpload" else "object"
        return Fault(Kind.FINAL, f"there is no such {missing}", error=NotFound)
    if code in _THROTTLING or status in (429, 503):
        return Fault(Kind.THROTTLED, cause, _FEWER, may_have_acted=status >= 500)
    if code in _TRANSIENT or (status >= 500 and status not in (501, 507)):
        return Fault(Kind.TRANSIENT, cause, "Look into the health of the store", may_have_acted=status >= 500)
    if code in _REMEDIES:
        return Fault(Kind.FINAL, cause, _REMEDIES[code])
    if code in _DAMAGED:
        return Fault(Kind.FEW, cause, f"The bytes were damaged on the way. {_CHECKSUM}")
    if "checksum" in message.lower():
        return Fault(Kind.FINAL, cause, _CHECKSUM)
    return Fault(Kind.FINAL, cause, _BY_STATUS.get(str(status), ""))


def _of_client(error: Exception) -> Fault:
    """An error on this side of the connection: nothing, or nothing whole, was answered."""
    cause = scrub(f"{error}" or type(error).__name__)
    if isinstance(error, boto.NoCredentialsError):
        return Fault(Kind.FINAL, "no credentials were found", _CREDENTIALS)
    if isinstance(error, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return Fault(Kind.FEW, cause, _CREDENTIALS)
    if isinstance(error, boto.PartialCredentialsError | boto.TokenRetrievalError | boto.SSOError):
        return Fault(Kind.FINAL, cause, _CREDENTIALS)
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        remedy = (
            "The certificate of the store is not trusted here: AWS_CA_BUNDLE names the file of those that are"
        )
        return Fault(Kind.FINAL, cause, remedy)
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ProxyConnectionError):
        return Fault(Kind.TRANSIENT, cause, _REACH)
    if isinstance(error, _TRANSPORT):
        return Fault(Kind.TRANSIENT, cause, _REACH, may_have_acted=True)
    if isinstance(error, boto.BotoCoreError):
        return Fault(Kind.FINAL, cause, "Check --store.url, --store.endpoint and --store.region")
    if type(error).__name__ == "ResponseParserError":
        return Fault(Kind.FEW, f"the answer is not S3's: {cause[:300]}", _REACH, may_have_acted=True)
    raise error


def scrub(text: str) -> str:
    """Text without what may be secret in a URL: user and password, and the query (presigned signatures)."""
    text = re.sub(r"//[^/\s@\"']+@", "//", text)
    return re.sub(r"\?[^\s\"']*(?:Signature|Credential|Token)[^\s\"']*", "?…", text, flags=re.IGNORECASE)


def scrub_url(url: str) -> str:
    """scheme://host:port/path of a URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
