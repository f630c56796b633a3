"""Writes the lines of a carried SWE-rebench V2 that can be judged here as JSON lines, which a campaign reads.

usage: python convert.py FILE... -o OUTPUT.jsonl [--language NAME]

FILE is a parquet file, which needs pyarrow, or has JSON lines.
Lines whose log parser the swebench package does not have are left out and counted.
"""

import argparse
import importlib.util
import json
import re
from collections import Counter
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


def parsers():
    """Returns the names of the log parsers that the swebench package has."""
    package = importlib.util.find_spec("swebench")
    if package is None:
        raise SystemExit("error: this recipe needs the swebench package: pip install 'megaflow-hpc[swebench]'")
    files = Path(package.origin).parent.glob("harness/log_parsers/*.py")
    return {name for file in files for name in re.findall(r"^(?:def )?(parse_log_\w+)", file.read_text(), re.MULTILINE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--language", help="keep only this language")
    asked = parser.parse_args()
    known, left_out, count = parsers(), Counter(), 0
    with open(asked.output, "w") as output:
        for path in asked.files:
            for row in rows(path):
                name = row["install_config"]["log_parser"]
                if asked.language and row["language"] != asked.language:
                    continue
                if name not in known:
                    left_out[name] += 1
                    continue
                # The images have the checkout in a directory with the repository's name.
                output.write(json.dumps({**row, "workdir": "/" + row["repo"].rpartition("/")[2]}, default=str) + "\n")
                count += 1
    print(f"{asked.output}: {count} lines")
    for name, number in left_out.most_common():
        print(f"left out, no log parser {name}: {number}")


if __name__ == "__main__":
    main()
