// Perfetto's trace processor, as its web page runs it, for a program at the other end of two pipes.
//
//     node engine.mjs DIRECTORY      which holds engine_bundle.js and trace_processor*.wasm
//
// Requests and replies are its own (TraceProcessorRpcStream), each behind its length in four bytes.

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const directory = process.argv[2];
const { stdin } = process;
const read = (name) => fs.readFileSync(path.join(directory, path.basename(name)));

// The bundle is the script of a worker: what it asks of one, and no more.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.importScripts = () => {};
globalThis.location = { href: `file://${directory}/engine_bundle.js` };
globalThis.XMLHttpRequest = class {
  open(method, name) {
    this.name = name;
  }
  send() {
    this.response = new Uint8Array(read(this.name)).buffer;
  }
};
delete globalThis.process; // or it would take itself for a program of Node
console.log = console.info = console.warn = console.debug = console.error;
vm.runInThisContext(read("engine_bundle.js").toString());

const { port1, port2 } = new MessageChannel();
globalThis.onmessage({ data: port1 });
port2.onmessage = ({ data }) => {
  const size = Buffer.alloc(4);
  size.writeUInt32LE(data.length);
  fs.writeSync(1, size);
  for (let at = 0; at < data.length; ) at += fs.writeSync(1, data, at);
};

let unread = Buffer.alloc(0);
stdin.on("data", (part) => {
  unread = Buffer.concat([unread, part]);
  while (unread.length >= 4 && unread.length >= 4 + unread.readUInt32LE(0)) {
    const end = 4 + unread.readUInt32LE(0);
    port2.postMessage(new Uint8Array(unread.subarray(4, end)));
    unread = unread.subarray(end);
  }
});
stdin.on("end", () => port2.close());
