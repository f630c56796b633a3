"""Exits with 0 if the file has the sum of the receipts, which are those of the task."""

import sys

with open("/work/total.txt") as file:
    sys.exit(file.read().replace("EUR", "").strip() != "122.40")
