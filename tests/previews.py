"""What a program with the published client sees of the ports of a sandbox: its id and a port are the arguments."""

import json
import sys

from pandastack import Client

client = Client()
client.preview_host = "preview.example"
sandbox = client.sandboxes.get(sys.argv[1])
port = int(sys.argv[2])
print(json.dumps({"one": sandbox.preview_url(port, scheme="http"), "all": sandbox.preview_urls()}))
