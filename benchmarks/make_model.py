"""Models for benchmarks, written straight into a segment: no checkpoint on disk, random values, any size."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Header
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Source, choose
from tableside.quant.row_format import GPU_ALIGNMENT


def publish_random(
    root: Path,
    name: str,
    tables: dict[str, tuple[int, int, str]],
    pooling: str = "sum",
    seed: int = 0,
    alignment: int = GPU_ALIGNMENT,
) -> None:
    """Publishes tables of name -> (rows, dim, row format) with one feature each. Every row differs from
    its neighbours."""
    model, backend = Model(root, name), choose()
    with model.loading() as version:
        plan = plan_tables(
            StoredTable(rows, RowFormat.parse(f).row_bytes(dim, alignment), 0, 1, 0, name, name, f, dim)
            for name, (rows, dim, f) in tables.items()
        )
        header = Header(name, version, "benchmark", plan, tuple(FeatureSpec(t, t, pooling) for t in tables))
        writer = model.writer(version, header)
        rng = np.random.default_rng(seed)
        pool = rng.standard_normal((1 << 16) + 4096, dtype=np.float32)

        def fill(item: tuple[int, int]) -> None:
            table, chunk = writer.header.tables[item[0]], item[1]
            start, stop = table.chunk_range(chunk)
            shift = (chunk * 37 + item[0]) % 4096
            values = np.resize(pool[shift : shift + (1 << 16)], (stop - start) * table.dim).reshape(
                -1, table.dim
            )
            backend.quantize(
                values, Source.FP32, RowFormat.parse(table.row_format), writer.rows(table, start, stop)
            )
            writer.finish_chunk(table, chunk)

        work = [(i, chunk) for i, t in enumerate(writer.header.tables) for chunk in range(t.chunks)]
        with ThreadPoolExecutor() as threads:
            list(threads.map(fill, work))
        writer.seal({})
        model.publish(version)
