"""An object storage for tests: moto's server with a bucket, and addresses that are signed for it.

Prints `{"port": …}`, then answers each line `METHOD KEY SECONDS` with a signed address, until its input ends. The host in
them is the first argument.
"""

import json
import sys
import threading
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qs

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
)


class Silent(MotoRequestHandler):
    def log(self, *_arguments, **_more):
        pass


def dated(application):
    """As S3 does, and moto does not: an address that is signed for a time is refused after it."""

    def answer(environment, start):
        fields = parse_qs(environment.get("QUERY_STRING", ""))
        if "X-Amz-Expires" in fields:
            signed = datetime.strptime(fields["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ")
            end = signed.replace(tzinfo=timezone.utc) + timedelta(
                seconds=int(fields["X-Amz-Expires"][0])
            )
            if datetime.now(timezone.utc) > end:
                length = str(len(EXPIRED))
                start("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", length)])
                return [EXPIRED]
        return application(environment, start)

    return answer


host = sys.argv[1]
application = dated(DomainDispatcherApplication(create_backend_app))
server = make_server("0.0.0.0", 0, application, threaded=True, request_handler=Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = boto3.client(
    "s3",
    endpoint_url=f"http://{host}:{server.port}",
    region_name="us-east-1",
    aws_access_key_id="test",
    aws_secret_access_key="test",
    config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, proxies={}),
)
client.create_bucket(Bucket="bucket")
print(json.dumps({"port": server.port}), flush=True)
for line in sys.stdin:
    method, key, seconds = line.split()
    operation = {"GET": "get_object", "PUT": "put_object"}[method]
    url = client.generate_presigned_url(
        operation, Params={"Bucket": "bucket", "Key": key}, ExpiresIn=int(seconds)
    )
    print(url, flush=True)
