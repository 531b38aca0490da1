// Runs model files in onnxruntime-web (WebAssembly, in Node): one JSON line each.
// node web_runner.mjs FOLDER - NAME:CASES ...   with onnxruntime-web in node_modules of the current folder
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const ort = require("onnxruntime-web");
ort.env.logLevel = "fatal";
ort.env.wasm.numThreads = 1;

const ARRAYS = { float32: Float32Array, float16: Uint16Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

function decoded({ dtype, shape, data }) {
  const bytes = Uint8Array.from(Buffer.from(data, "base64"));
  return new ort.Tensor(dtype, new ARRAYS[dtype](bytes.buffer), shape);
}

function encoded(tensor) {
  const bytes = Buffer.from(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
  return { dtype: tensor.type, shape: [...tensor.dims], data: bytes.toString("base64") };
}

async function run(folder, name, cases) {
  const session = await ort.InferenceSession.create(fs.readFileSync(path.join(folder, `${name}.onnx`)), { executionProviders: ["wasm"], logSeverityLevel: 4 });
  const results = [];
  for (const one of JSON.parse(fs.readFileSync(path.join(folder, `${cases}.json`)))) {
    const feeds = Object.fromEntries(session.inputNames.map((key) => [key, decoded(one.inputs[key])]));
    const found = await session.run(feeds);
    results.push(session.outputNames.map((key) => encoded(found[key])));
  }
  await session.release();
  return results;
}

const [folder, , ...files] = process.argv.slice(2);
for (const argument of files) {
  const [name, cases] = argument.split(":");
  console.log(JSON.stringify({ begin: name }));
  try {
    console.log(JSON.stringify({ name, outputs: await run(folder, name, cases) }));
  } catch (error) {
    console.log(JSON.stringify({ name, error: String(error.message ?? error).split(/\s+/).join(" ") }));
  }
}
