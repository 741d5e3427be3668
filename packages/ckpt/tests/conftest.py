"""Storages for tests; makes ckpt_ranks.py importable, which the tests and the scripts that they run share."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.store import storage

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Flushes nothing in the test's own process: a kill loses no written byte, and fsync takes most of a save's time.

    The programs that tests start flush for real.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            patched.setattr(os, name, lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats a failing request of a storage soon."""
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """An S3 bucket on a server in this process; needs `pip install s3fs 'moto[server]'`."""
    pytest.importorskip("s3fs")
    server_class = pytest.importorskip("moto.server").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    import fsspec

    server = server_class(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}
    secrets = {"key": "test", "secret": "test"}
    names = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    boto3.client("s3", **endpoint, **names).create_bucket(Bucket="bucket")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(fsspec.config.conf, "s3", {**secrets, "client_kwargs": endpoint})
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    return f"file://{tmp_path}/remote/run"
