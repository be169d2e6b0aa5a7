// What a program with the published client sees of the ports of a sandbox: its id and a port are the arguments.
const { Client } = require("@pandastack/sdk");

(async () => {
  const client = new Client();
  client.previewHost = "preview.example";
  const sandbox = await client.sandboxes.get(process.argv[2]);
  const port = Number(process.argv[3]);
  console.log(JSON.stringify({ one: sandbox.previewUrl(port, "http"), all: await sandbox.previewUrls() }));
})();
