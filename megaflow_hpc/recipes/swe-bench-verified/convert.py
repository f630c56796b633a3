"""Writes the lines of a carried data set as JSON lines, which a campaign reads.

usage: python convert.py FILE... -o OUTPUT.jsonl        (parquet files or JSON lines; parquet needs pyarrow)
"""

import argparse
import json
from pathlib import Path


def rows(path):
    """Yields the rows of a file as dictionaries."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise SystemExit("error: parquet files need pyarrow: pip install pyarrow") from None
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(100):
            yield from batch.to_pylist()
    else:
        for line in path.read_text().splitlines():
            if line.strip():
                yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    count = 0
    with open(asked.output, "w") as output:
        for path in asked.files:
            for row in rows(path):
                output.write(json.dumps(row, default=str) + "\n")
                count += 1
    print(f"{asked.output}: {count} lines")


if __name__ == "__main__":
    main()
