"""Runs unit tests and prints a summary as pytest does."""

import sys
import unittest

result = unittest.TextTestRunner(sys.stdout).run(unittest.defaultTestLoader.discover("r2e_tests", top_level_dir="."))
print("=== short test summary info ===")
failed = {case.id() for case, _ in [*result.failures, *result.errors]}
for suite in unittest.defaultTestLoader.discover("r2e_tests", top_level_dir="."):
    for group in suite:
        for case in group:
            file, kind, name = case.id().rsplit(".", 2)
            print("FAILED" if case.id() in failed else "PASSED", f"{file}.py::{kind}::{name}")
