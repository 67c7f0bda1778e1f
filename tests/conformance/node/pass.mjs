// Checks with the official Node client. Prints one JSON object per check: {name, expected, seen}.
// Arguments: the base URL, the id of an output file, the ids of a failed and of a cancelled batch, and the id of a
// file that does not exist. The API key is in OPENAI_API_KEY.

import { createReadStream, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import OpenAI, { toFile } from "openai";

const [baseURL, outputFileId, failedBatchId, cancelledBatchId, missingFileId] = process.argv.slice(2);
const client = new OpenAI({ baseURL, maxRetries: 2 });
const line = '{"custom_id":"grüße 🦜"}\n';
const request = { input_file_id: missingFileId, endpoint: "/v1/chat/completions", completion_window: "24h" };
const ended = ["completed", "failed", "expired", "cancelled"];

async function check(name, expected, act) {
  let seen;
  try {
    seen = await act();
  } catch (error) {
    seen = `${error.constructor.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ name, expected, seen: seen ?? null }));
}

async function raised(act) {
  try {
    await act();
    return "nothing was raised";
  } catch (error) {
    return [error.constructor.name, error.status, error.code ?? null, error.param ?? null, Boolean(error.requestID)];
  }
}

async function firstIds(pages, count) {
  const ids = [];
  for await (const object of pages) {
    ids.push(object.id);
    if (ids.length === count) break;
  }
  return ids;
}

function upload(name = "node.jsonl") {
  return toFile(Buffer.from(line), name).then((file) => client.files.create({ file, purpose: "batch" }));
}

const uploaded = [];
await check("it uploads a buffer", [Buffer.byteLength(line), "node.jsonl", "processed"], async () => {
  const file = await upload();
  uploaded.push(file.id);
  return [file.bytes, file.filename, file.status];
});
await check("it uploads a stream", [Buffer.byteLength(line), "conformance-node.jsonl"], async () => {
  const path = join(tmpdir(), "conformance-node.jsonl");
  writeFileSync(path, line);
  const file = await client.files.create({ file: createReadStream(path), purpose: "batch" });
  uploaded.push(file.id);
  return [file.bytes, file.filename];
});
await check("it reads content", line, async () => (await client.files.content(uploaded[0])).text());
await check("it pages through files", 5, async () => {
  for (let number = 0; number < 3; number++) uploaded.push((await upload(`${number}.jsonl`)).id);
  const newest = await firstIds(client.files.list({ limit: 2 }), 5);
  return newest.filter((id) => uploaded.includes(id)).length;
});
await check("it pages through batches", 7, async () => {
  return new Set(await firstIds(client.batches.list({ limit: 3 }), 7)).size;
});
await check("it deletes a file", [true, "NotFoundError"], async () => {
  const { deleted } = await client.files.delete(uploaded[0]);
  return [deleted, (await raised(() => client.files.retrieve(uploaded[0])))[0]];
});
await check("it creates a batch and waits for its end", ["validating", "failed", "file_id"], async () => {
  const created = await client.batches.create(request);
  let batch = created;
  for (let tries = 0; tries < 240 && !ended.includes(batch.status); tries++) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    batch = await client.batches.retrieve(created.id);
  }
  return [created.status, batch.status, batch.errors?.data?.[0]?.param];
});
await check("it reads an output file", true, async () => {
  const text = await (await client.files.content(outputFileId)).text();
  return text.trim().split("\n").every((row) => JSON.parse(row).response.status_code === 200);
});
await check("it cancels a cancelled batch", "cancelled", async () => {
  return (await client.batches.cancel(cancelledBatchId)).status;
});
await check("it raises ConflictError and does not retry", [["ConflictError", 409, true], 1], async () => {
  let sent = 0;
  const counting = client.withOptions({ fetch: (...given) => (sent++, fetch(...given)) });
  const error = await raised(() => counting.batches.cancel(failedBatchId));
  return [[error[0], error[1], error[4]], sent];
});
await check("it raises NotFoundError", ["NotFoundError", 404, true], async () => {
  const error = await raised(() => client.batches.retrieve("batch_none"));
  return [error[0], error[1], error[4]];
});
await check("it raises BadRequestError", ["BadRequestError", 400, "invalid_value", "completion_window", true], () => {
  return raised(() => client.batches.create({ ...request, completion_window: "1h" }));
});
await check("it raises AuthenticationError", ["AuthenticationError", 401, "invalid_api_key", null, true], () => {
  return raised(() => client.withOptions({ apiKey: "sk-wrong" }).files.list());
});
await check("it makes one batch if the first response is lost", 1, async () => {
  let lost = false;
  const lossy = async (...given) => {
    const answer = await fetch(...given);
    if (lost) return answer;
    lost = true;
    return new Response("{}", { status: 503 });
  };
  const metadata = { check: `node-${Math.random()}` };
  await client.withOptions({ fetch: lossy }).batches.create({ ...request, metadata });
  const { data } = await client.batches.list({ limit: 100 });
  return data.filter((batch) => batch.metadata?.check === metadata.check).length;
});
